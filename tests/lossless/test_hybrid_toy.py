"""Recurrent state over the HybridToy: cached == cold whatever is shared, drafted, evicted or lost.

Each toy logit depends on the paged memory and on the hash in the sequence's slot, so any stale
checkpoint, wrong rollback or missing replay changes the ids. `truth` is plain decoding, no cache.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from quickdraft.engine.drafters import Drafting
from quickdraft.engine.loop import Engine
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
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def text(length: int, seed: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(1, VOCABULARY) for _ in range(length))


TRUTHS: dict[str, list[int]] = {}


def truth(prompt: Sequence[int], params: SamplingParams = PARAMS) -> list[int]:
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


def ask(engine: Engine, prompt: Sequence[int], marks: Sequence[int] = (), params: SamplingParams = PARAMS):
    """Answer one prompt; its cached tokens. The ids are those of plain decoding."""
    request = toy_request(f"r{random.random()}", prompt, params, 1000, marks=marks)
    drafter = getattr(engine.drafting, "drafter", None)
    if drafter is not None:
        drafter.truth[request.request_id] = truth(prompt, params)
    run_all(engine, [request])
    assert request.output_ids == truth(prompt, params)
    return request


DRAFTERS = {
    "off": lambda: Drafting([]),
    "always right": lambda: AlwaysDraft(ScriptedDrafter({}, 63, 63)),
    "always wrong": lambda: AlwaysDraft(ScriptedDrafter({}, 0, 15)),
    "random": lambda: AlwaysDraft(RandomDrafter({}, 0, 0, seed=4)),
} | {f"{k} right": lambda k=k: AlwaysDraft(ScriptedDrafter({}, k, 15)) for k in range(16)}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter(drafter: str) -> None:
    engine = hybrid(DRAFTERS[drafter]())
    long = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    prompt = text(50, 1)
    first = ask(engine, prompt, params=long)
    again = ask(engine, prompt, params=long)
    assert again.timings.cached_tokens == 49
    nxt = ask(engine, (*prompt, *first.output_ids, *text(9, 2)))
    assert nxt.timings.cached_tokens == 50 + 150 - 1
