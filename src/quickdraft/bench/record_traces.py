"""Recording traces: every workload decoded once, one row at a time, every drafter asked at every position.

Nothing is verified here, so the tokens are plain decoding's; what a model would draft depends on the tokens
before it and on nothing that a policy decides. Besides the workloads of `bench stages` two on which drafts
do not pay, `random` and `adversarial`; some of the sequences again with a `prediction` or a `corpus`, which
change no token; and `mixed`, four of them decoded as one batch.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from quickdraft.bench.report import say
from quickdraft.bench.traces import Trace, TracedWorkload, TraceSet
from quickdraft.bench.workloads import (
    RANDOM_SEED,
    Copy,
    Encoding,
    PromptIds,
    Random,
    Workload,
    all_workloads,
    edited_file,
    encoding_of,
    ledger,
    prompt_ids,
)
from quickdraft.engine.drafters import Asking, Drafting
from quickdraft.engine.loop import Engine
from quickdraft.engine.opened import Opened
from quickdraft.errors import ConfigError, EngineError
from quickdraft.speculate.draft import Draft, Drafter, ModelDrafter
from quickdraft.types import FinishReason, SamplingParams, Speculation

RANDOM: Final = "random"
# sentences that begin alike, each with another ending: the latest occurrence is followed by a wrong one
ADVERSARIAL: Final = "adversarial"
SAMPLED: Final = {RANDOM: 2.0, ADVERSARIAL: 0.8}  # temperatures; everything else is greedy
MIXED: Final = "mixed"
PREDICTED: Final = "prediction"  # the file to edit came as the request's prediction too
SERVED_BEFORE: Final = "corpus"  # the answers to the other requests of its kind are in a lookup corpus
OF_EACH_OTHER: Final = "extract"
MIXED_TRACES: Final = ("copy/0", "code-edit/0", "summary/0", "chat/1")


def traced_workloads() -> tuple[Workload, ...]:
    """What is recorded, in order; `mixed` is made of their sequences."""
    return (
        *all_workloads(),
        Workload(RANDOM, (Random(),), 256),
        Workload(ADVERSARIAL, (Copy(ledger(), repeats=1, shown_tokens=0),), 320),
    )


def record_opened(opened: Opened, workloads: Sequence[Workload], max_tokens: int | None = None) -> TraceSet:
    """Decode all of them. ConfigError for a model file without the tokenizer or template they need."""
    encoding, found = encoding_of(opened), []
    for workload in workloads:
        prompts = prompt_ids(workload, encoding, max_tokens)
        say(f"{workload.name}: {len(prompts)} prompt{'' if len(prompts) == 1 else 's'}")
        traces = [_trace(opened, f"{workload.name}/{index}", prompt) for index, prompt in enumerate(prompts)]
        found.append(TracedWorkload(workload.name, tuple(traces)))
    known = {trace.name: trace for work in found for trace in work.traces}
    found += _with_texts(known, encoding)
    if all(name in known for name in MIXED_TRACES):
        mixed = tuple(known[name] for name in MIXED_TRACES)
        found.append(TracedWorkload(MIXED, mixed, together=len(mixed)))
    return TraceSet(
        opened.name, opened.engine.drafting.longest, tuple(found), opened.held_out, opened.shipped
    )


def _with_texts(known: Mapping[str, Trace], encoding: Encoding) -> list[TracedWorkload]:
    """The same sequences as they would be decoded with a prediction, and with a corpus."""
    found, edit = [], known.get("code-edit/0")
    if edit is not None and encoding.encode is not None:
        prediction = tuple(encoding.encode(f"```python\n{edited_file()}```"))
        trace = dataclasses.replace(edit, name=f"{PREDICTED}/0", prediction=prediction)
        found.append(TracedWorkload(PREDICTED, (trace,)))
    alike = [trace for name, trace in known.items() if name.startswith(f"{OF_EACH_OTHER}/")]
    if len(alike) > 1:
        traces = tuple(
            dataclasses.replace(
                trace,
                name=f"{SERVED_BEFORE}/{index}",
                corpus=tuple(other.output for other in alike if other is not trace),
            )
            for index, trace in enumerate(alike)
        )
        found.append(TracedWorkload(SERVED_BEFORE, traces))
    return found


def sampled_params(workload: str, max_tokens: int) -> SamplingParams:
    """How sequences of a workload are decoded: greedily, or sampled and never ended by themselves."""
    temperature = SAMPLED.get(workload, 0.0)
    return SamplingParams(
        temperature=temperature, seed=RANDOM_SEED, ignore_eos=temperature > 0.0, max_tokens=max_tokens
    )


class _Recording(Drafting):
    """Drafts nothing, and keeps what its models would have drafted."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters)
        self._asked = [drafter for drafter in drafters if isinstance(drafter, ModelDrafter)]
        self.found: dict[str, list[Draft]] = {drafter.source: [] for drafter in self._asked}

    def propose_all(self, asking: Sequence[Asking], rows: int) -> list[Draft]:
        for one in asking:
            for drafter in self._asked:
                self.found[drafter.source].append(drafter.propose(one.view, drafter.longest))
        return [Draft()] * len(asking)


def _trace(opened: Opened, name: str, prompt: PromptIds) -> Trace:
    shared = opened.engine
    recording = _Recording(shared.drafting.drafters)
    scheduler = dataclasses.replace(shared.scheduler, waiting=deque(), running=[])
    engine = Engine(scheduler, shared.runner, recording, tapped=shared.tapped)
    every = Speculation(sources=recording.sources)  # all write their rows
    params = dataclasses.replace(sampled_params(name.partition("/")[0], prompt.max_tokens), speculation=every)
    request = opened.request(f"trace-{name}", prompt.ids, params)
    engine.add(request)
    while engine.has_work:
        engine.step()
    if request.finish is FinishReason.ERROR:
        raise EngineError(f"{name}: decoding failed", got=request.error)
    output = tuple(request.tokens[request.prompt_length :])
    return Trace(name, tuple(prompt.ids), output, prompt.max_tokens, _whole(recording.found, len(output)))


def _whole(found: Mapping[str, Sequence[Draft]], count: int) -> dict[str, tuple[Draft, ...]]:
    for source, drafts in found.items():
        if len(drafts) != count:
            raise ConfigError(f"{source} was asked {len(drafts)} times", expected=f"{count}, once a token")
    return {source: tuple(drafts) for source, drafts in found.items()}
