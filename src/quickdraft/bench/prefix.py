"""`bench prefix`: time to the first token with nothing cached, with the document cached, after a restart.

One document, then a question of exactly so many new tokens, asked of three engines: one without a
prefix cache, one that has read the document, and one that was opened again over the same folder.
Times count from the request's ids to its first token. No time is shown unless every answer has
the ids of the engine without a cache, and unless exactly the document was cached.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console

from quickdraft.bench.check import Output, refusal
from quickdraft.bench.machine import commit
from quickdraft.bench.report import check_json_folder, say, write_json
from quickdraft.bench.workloads import RANDOM_SEED, long_document
from quickdraft.config import usable_cores
from quickdraft.engine.opened import EngineConfig, Opened, open_model
from quickdraft.engine.plan import PlanEntry, StepPlan
from quickdraft.errors import ConfigError
from quickdraft.state.sequence import SequenceState, blocks_for
from quickdraft.types import Backend, SamplingParams

SCHEMA: Final = "quickdraft-prefix-1"
ANSWER: Final = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
FORWARD_ROWS: Final = 33
REPEATS: Final = 3
_QUESTIONS: Final = ("Name", "Quote", "List", "Tell", "Explain", "Show", "Find")  # no first letter twice
_ASKED: Final = (
    " what the text above says about this. Answer in a few plain sentences, quote the sentence that you "
    "rely on, and name the person, the place and the year if they are given. Do not guess."
)


@dataclass(slots=True)
class Measured:
    """Requests of one kind: milliseconds to the first token, and what was wrong with any of them."""

    times_ms: list[float] = field(default_factory=list)
    cached_tokens: set[int] = field(default_factory=set)
    outputs: dict[int, Output] = field(default_factory=dict)  # by question

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)


@dataclass(frozen=True, slots=True)
class PrefixResult:
    """One run of `bench prefix`; times are None when `failed` says why."""

    model: str
    threads: int
    commit: str | None
    prompt_tokens: int
    new_tokens: int
    cached_tokens: int
    cache_bytes: int  # of KV memory the cached tokens take
    checkpoint_bytes: int  # of recurrent states kept beside them, all that the requests left
    disk_bytes: int  # written for the document, its first question and its answer
    ids_equal_cold: bool
    ttft_cold_ms: float | None
    ttft_warm_ms: float | None
    ttft_restart_ms: float | None
    forward_33_rows_ms: float | None
    failed: str | None = None

    def to_dict(self) -> dict[str, object]:
        """The JSON shape of `--json`."""
        names = [name for name in self.__slots__ if name != "failed" or self.failed]
        values = {name: getattr(self, name) for name in names}
        return {"schema": SCHEMA} | {
            name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()
        }


def run(
    model: str | Path,
    tokens: int = 6000,
    new_tokens: int = 32,
    json_path: Path | None = None,
    threads: int | None = None,
    head_bits: int | None = None,
    backend: Backend = Backend.AUTO,
) -> PrefixResult:
    """Measure, print, write `json_path` if given; ContextTooLong when the model cannot hold the prompt."""
    check_json_folder(json_path)
    threads = usable_cores() if threads is None else threads
    config = EngineConfig(threads=threads, max_sequences=1, head_bits=head_bits, backend=backend)
    with tempfile.TemporaryDirectory(prefix="quickdraft-bench-") as folder:
        cached = replace(config, cache_dir=Path(folder))
        result = _measure(model, config, cached, tokens, new_tokens)
    _print(result)
    if json_path is not None:
        write_json(json_path, result.to_dict())
    return result


def _measure(
    model: str | Path, plain: EngineConfig, cached: EngineConfig, tokens: int, new_tokens: int
) -> PrefixResult:
    cold, warm, restart = Measured(), Measured(), Measured()
    opened = open_model(model, cached)
    document, questions = prompt_parts(opened, tokens, new_tokens)
    opened.validate([*document, *questions[0], *([0] * (ANSWER.max_tokens or 0))], ANSWER)
    say(f"reading {tokens} tokens for the first time")
    _ask(opened, document + questions[0], 0, cold)
    if opened.engine.scheduler.slots is not None:  # a recurrent state is kept where two texts have parted
        firsts = {question[0] for question in questions}
        other = next(token for token in range(len(questions) + 1) if token not in firsts)
        _ask(opened, [*document, other, *questions[0][1:]], 0, Measured())
    disk_bytes = _write_all(opened)
    warm_questions = range(1, 1 + REPEATS)
    for index in warm_questions:
        _ask(opened, document + questions[index], index, warm)
    forward_ms = forward(opened, document, FORWARD_ROWS)
    checkpoint_bytes = _checkpoint_bytes(opened)
    opened.close()
    restart_questions = range(1 + REPEATS, len(questions))
    for index in restart_questions:
        say("restarting")
        opened = open_model(model, cached)
        _ask(opened, document + questions[index], index, restart)
        opened.close()
    cache_bytes = blocks_for(tokens) * opened.runner.kv.bytes_per_block
    opened = open_model(model, replace(plain, prefix_cache=False))
    say(f"the same {len(questions) - 1} questions without a cache")
    for index in (*warm_questions, *restart_questions):
        _ask(opened, document + questions[index], index, cold)
    failed = _refusal(cold, warm, restart, tokens, is_text=opened.tokenizer is not None)
    equal = all(
        output.ids == cold.outputs[index].ids
        for measured in (warm, restart)
        for index, output in measured.outputs.items()
    )
    shown = failed is None
    return PrefixResult(
        model=opened.name,
        threads=plain.threads or 0,
        commit=commit(),
        prompt_tokens=tokens + new_tokens,
        new_tokens=new_tokens,
        cached_tokens=min(warm.cached_tokens),
        cache_bytes=cache_bytes,
        checkpoint_bytes=checkpoint_bytes,
        disk_bytes=disk_bytes,
        ids_equal_cold=equal,
        ttft_cold_ms=cold.median_ms if shown else None,
        ttft_warm_ms=warm.median_ms if shown else None,
        ttft_restart_ms=restart.median_ms if shown else None,
        forward_33_rows_ms=forward_ms if shown else None,
        failed=failed,
    )


def prompt_parts(opened: Opened, tokens: int, new_tokens: int) -> tuple[list[int], list[list[int]]]:
    """A document of exactly `tokens` ids, and questions of `new_tokens` ids, each with its own first id."""
    if tokens < 2 or new_tokens < 1:
        raise ConfigError(
            "a document of two tokens and a question of one is the least", got=f"{tokens}, {new_tokens}"
        )
    if opened.tokenizer is None:
        ids = np.random.default_rng(RANDOM_SEED).integers(
            0, opened.runner.model.config.vocabulary_size, tokens
        )
        rest = ids.tolist() * new_tokens
        return ids.tolist(), [[index, *rest[: new_tokens - 1]] for index in range(len(_QUESTIONS))]
    text = opened.tokenizer.encode(long_document() + "\n\n")
    asked = opened.tokenizer.encode(_ASKED)
    document = (text * (1 + tokens // len(text)))[:tokens]
    firsts = [opened.tokenizer.encode(word)[0] for word in _QUESTIONS]
    assert len(set(firsts)) == len(firsts), "questions share their first token"
    return document, [[first, *asked * new_tokens][:new_tokens] for first in firsts]


def forward(opened: Opened, tokens: Sequence[int], rows: int) -> float:
    """Milliseconds of one run of the model over the last `rows` of `tokens`, the rest being cached."""
    engine, cache = opened.engine, opened.engine.scheduler.cache
    assert cache is not None, "the context is taken from the prefix cache"
    state = SequenceState(engine.scheduler.pool, engine.scheduler.slots)
    rows = min(rows, len(tokens) - 1)
    start = len(tokens) - rows
    state.begin()
    cache.attach(state, tokens[: start + 1])
    assert engine.scheduler.slots or state.committed == start, f"{state.committed} of {start} tokens cached"
    while state.committed < start:  # from the last recurrent state on
        count = min(engine.scheduler.chunk_rows, start - state.committed)
        _run(opened, state, tokens[state.committed :][:count])
        state.commit(count)
    times = []
    for _ in range(2 * REPEATS + 1):
        times.append(_run(opened, state, tokens[start:]))
        state.commit(0)
    state.release()
    return statistics.median(times)


def _run(opened: Opened, state: SequenceState, tokens: Sequence[int]) -> float:
    """Milliseconds of one run over these tokens, which follow the state's own."""
    state.reserve(len(tokens))
    entry = PlanEntry(
        "forward", tuple(tokens), state.committed, 1, (), "", state.block_table, state.slot, state.replay
    )
    started = time.perf_counter()
    opened.runner.run(StepPlan((entry,)))
    return 1000.0 * (time.perf_counter() - started)


def _ask(opened: Opened, prompt: Sequence[int], question: int, measured: Measured) -> None:
    engine = opened.engine
    started = time.perf_counter()
    request = opened.request(opened.next_id(), prompt, ANSWER)
    engine.add(request)
    first = None
    while engine.has_work:
        events = engine.step()
        if first is None and events:
            first = time.perf_counter()
    assert first is not None, "a request ends with an event"
    measured.times_ms.append(1000.0 * (first - started))
    measured.cached_tokens.add(request.timings.cached_tokens)
    measured.outputs[question] = Output(tuple(request.output_ids), request.timings, request.error)


def _checkpoint_bytes(opened: Opened) -> int:
    slots = opened.engine.scheduler.slots
    return opened.engine.metrics().checkpoints * slots.storage.bytes_per_slot if slots is not None else 0


def _write_all(opened: Opened) -> int:
    while opened.engine.idle():
        pass
    return int(opened.engine.metrics().disk["written_bytes"])


def _refusal(cold: Measured, warm: Measured, restart: Measured, tokens: int, *, is_text: bool) -> str | None:
    """Why no time may be shown, or None."""
    for name, measured in (("warm", warm), ("restart", restart)):
        if measured.cached_tokens != {tokens}:
            return f"{name}: {sorted(measured.cached_tokens)} tokens were cached, not {tokens}"
        outputs = list(measured.outputs.values())
        plain = [cold.outputs[index] for index in measured.outputs]
        reason = refusal(outputs, plain, [None] * len(outputs), is_text=is_text)
        if reason is not None:
            return f"{name}: {reason}"
    return None if cold.cached_tokens == {0} else "cold: something was cached"


def _print(result: PrefixResult) -> None:
    console = Console()
    where = f"{result.model}, {result.threads} threads: {result.prompt_tokens} tokens, "
    lines = [f"{where}the last {result.new_tokens} of them new"]
    if result.failed is not None:
        lines.append(f"FAIL {result.failed}")
    else:
        cold, warm, restart = result.ttft_cold_ms, result.ttft_warm_ms, result.ttft_restart_ms
        assert cold and warm and restart and result.forward_33_rows_ms
        lines += [
            f"first token, nothing cached      {cold:10.1f} ms",
            f"first token, document in memory  {warm:10.1f} ms  {cold / warm:6.1f} x sooner, "
            f"{warm / result.forward_33_rows_ms:.2f} x one forward of {FORWARD_ROWS} rows "
            f"({result.forward_33_rows_ms:.1f} ms)",
            f"first token after a restart      {restart:10.1f} ms  {cold / restart:6.1f} x sooner, "
            f"{result.disk_bytes / 1e6:.1f} MB on disk",
            "ids equal those without a cache",
        ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
