"""What the tests of recurrent state over the HybridToy share: texts, drafters, engines, and `ask`.

`ask` compares every answer with plain decoding without a cache, and `run_all` checks that no block or
slot leaks and that every checkpoint holds the state of its tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

from quickdraft.engine.drafters import Drafting
from quickdraft.engine.loop import Engine
from quickdraft.engine.request import Request
from quickdraft.speculate.lookup import LookupDrafter
from quickdraft.types import SamplingParams
from tests.support.toy import (
    VOCABULARY,
    AlwaysDraft,
    HybridToy,
    RandomDrafter,
    ScriptedDrafter,
    run_all,
    toy_engine,
    toy_request,
)

INTERVAL = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.9, top_p=0.9, seed=5)
LONG = dataclasses.replace(GREEDY, max_tokens=150)
NAMES = itertools.count()
TRUTHS: dict[str, list[int]] = {}


def text(length: int, seed: int) -> tuple[int, ...]:
    """Random tokens of few kinds, so that lookup drafts; never the last four of the vocabulary."""
    source = random.Random(seed)
    alphabet = [source.randrange(1, VOCABULARY - 4) for _ in range(4)]
    return tuple(source.choice(alphabet) for _ in range(length))


def truth(prompt: Sequence[int], params: SamplingParams = GREEDY) -> list[int]:
    key = f"{tuple(prompt)} {params}"
    if key not in TRUTHS:
        engine = toy_engine(Drafting([]), model=HybridToy(64), chunk_rows=1000)
        TRUTHS[key] = run_all(engine, [toy_request("plain", prompt, params, 1000)])["plain"]
    return TRUTHS[key]


def hybrid(
    drafting: Drafting | None = None, *, blocks: int = 256, checkpoints: int = 32, sequences: int = 4, **more
) -> Engine:
    model = HybridToy(blocks, sequences, checkpoints)
    return toy_engine(
        drafting or Drafting([]), model=model, blocks=blocks, max_sequences=sequences,
        cache=True, checkpoint_interval=INTERVAL, **more,
    )  # fmt: skip


def ask_all(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams = GREEDY,
    marks: Sequence[int] = (),
) -> list[Request]:
    """Answer prompts in one batch; the ids are those of plain decoding."""
    requests = [toy_request(f"r{next(NAMES)}", prompt, params, 1000, marks=marks) for prompt in prompts]
    drafter = getattr(engine.drafting, "drafter", None)
    for request in requests if drafter is not None else ():
        drafter.truth[request.request_id] = truth(request.tokens, params)
    run_all(engine, requests)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_ids == truth(prompt, params)
    return requests


def ask(engine: Engine, prompt: Sequence[int], params: SamplingParams = GREEDY, marks=()) -> Request:
    return ask_all(engine, [prompt], params, marks)[0]


def cached(request: Request) -> int:
    return request.timings.cached_tokens


DRAFTERS = {
    "off": lambda: Drafting([]),
    "lookup": lambda: Drafting([LookupDrafter()]),
    "always right": lambda: AlwaysDraft(ScriptedDrafter({}, 63, 63)),
    "always wrong": lambda: AlwaysDraft(ScriptedDrafter({}, 0, 15)),
    "random": lambda: AlwaysDraft(RandomDrafter({}, 0, 0, seed=4)),
} | {f"{k} right": lambda k=k: AlwaysDraft(ScriptedDrafter({}, k, 15)) for k in range(16)}
