"""How much of a prompt is cached, over random texts of the HybridToy: never less than is promised.

While nothing is evicted, a prompt that shares s tokens with an earlier text resumes at s - INTERVAL + 1
or later, and at the last end of a prompt, end of an answer, mark or place of parting among the s.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from quickdraft.engine.loop import Engine
from tests.support.hybrid_toy import (
    DRAFTERS,
    GREEDY,
    INTERVAL,
    LONG,
    SAMPLED,
    ask,
    cached,
    hybrid,
    text,
)

PARAMS = [GREEDY, SAMPLED, LONG, dataclasses.replace(LONG, ignore_eos=False)]


def opened(source: random.Random, folder: Path) -> Engine:
    drafting = DRAFTERS[source.choice(list(DRAFTERS))]()
    rows = source.choice([7, 32, 48, 1000])
    return hybrid(drafting, blocks=2000, checkpoints=1000, chunk_rows=rows, disk=(folder, 1 << 24))


def next_prompt(source: random.Random, earlier: list[tuple[int, ...]]) -> tuple[int, ...]:
    """A new text, or an earlier one up to anywhere and then something else."""
    if not earlier or source.random() < 0.2:
        return text(source.randrange(1, 300), source.randrange(10**6))
    base = source.choice(earlier)
    kept = source.choice([len(base), source.randrange(1, len(base) + 1)])
    return (*base[:kept], *text(source.randrange(30), source.randrange(10**6)))[:450]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(a), len(b)))


@pytest.mark.parametrize("restarts", [False, True])
def test_cached_tokens_are_as_many_as_promised(tmp_path: Path, restarts: bool) -> None:
    source, known, gained = random.Random(7), list[tuple[tuple[int, ...], set[int]]](), 0
    engine = opened(source, tmp_path)
    for _ in range(60):
        prompt = next_prompt(source, [one for one, _ in known])
        last = len(prompt) - 1
        marks = [source.randrange(len(prompt) + 1)] if source.random() < 0.3 else []
        shares = [min(common(prompt, one), last) for one, _ in known]
        shared = max(shares, default=0)
        places = [at for (_, kept), share in zip(known, shares, strict=True) for at in kept if at <= share]
        promised = max(*places, shared - INTERVAL + 1, 0, 0)
        request = ask(engine, prompt, source.choice(PARAMS), marks)
        assert promised <= cached(request) <= shared
        gained += cached(request)
        computed = tuple(request.tokens[:-1])
        known.append((computed, {last, len(computed), shared, *(at for at in marks if at > cached(request))}))
        while engine.idle():
            pass
        if restarts and source.random() < 0.3:
            engine.scheduler.cache.disk.close()
            engine = opened(source, tmp_path)
    assert gained > 2000 and engine.metrics().checkpoints_evicted == 0
    engine.scheduler.cache.disk.close()
