"""The scheduler by hand: order, chunks, drafts that give way, who is preempted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from quickdraft.engine.plan import StepPlan
from quickdraft.engine.request import Request
from quickdraft.engine.scheduler import Running, Scheduler
from quickdraft.errors import ConfigError
from quickdraft.speculate.draft import Draft
from quickdraft.state.blocks import BlockPool
from quickdraft.state.cache import PrefixCache
from quickdraft.types import SamplingParams


def scheduler(
    blocks: int = 20, max_wanted: int = 32, chunk_rows: int = 64, max_sequences: int = 4
) -> Scheduler:
    pool = BlockPool(blocks)
    return Scheduler(pool, chunk_rows + max_wanted, chunk_rows, max_sequences, max_wanted)


def request(name: str, prompt_tokens: int, max_tokens: int = 50) -> Request:
    return Request(name, [1] * prompt_tokens, SamplingParams(max_tokens=max_tokens), max_context=1000)


def nothing(requests: Sequence[tuple[Request, int]], rows: int) -> list[Draft]:
    return [Draft() for _ in requests]


def all_of_it(requests: Sequence[tuple[Request, int]], rows: int) -> list[Draft]:
    """The first takes what it can."""
    drafts = []
    for _, room in requests:
        drafts.append(Draft((2,) * min(room, rows), "lookup"))
        rows -= len(drafts[-1].tokens)
    return drafts


def settle(plan: StepPlan, items: list[Running], emit: int = 1) -> list[tuple[str, int, int]]:
    """Commit a step as the engine does, `emit` tokens a verify block; (id, rows, wanted) of its entries."""
    for entry, item in zip(plan.entries, items, strict=True):
        if entry.wanted:
            item.request.tokens += [1] * min(emit, entry.wanted)
            item.state.commit(min(emit, entry.wanted))
        else:
            item.state.commit(len(entry.tokens))
    return [(entry.request_id, len(entry.tokens), entry.wanted) for entry in plan.entries]


def test_verify_blocks_first_then_chunks_within_the_row_budget_oldest_first() -> None:
    sched = scheduler(chunk_rows=10)
    for name, tokens in (("a", 1), ("b", 9), ("c", 30), ("d", 5)):
        sched.add(request(name, tokens))
    assert settle(*sched.plan(nothing)) == [("a", 1, 1), ("b", 8, 0), ("c", 2, 0)]
    assert settle(*sched.plan(nothing)) == [("a", 1, 1), ("b", 1, 1), ("c", 10, 0)]
    assert settle(*sched.plan(nothing)) == [("a", 1, 1), ("b", 1, 1), ("c", 10, 0)]
    assert settle(*sched.plan(nothing)) == [("a", 1, 1), ("b", 1, 1), ("c", 7, 0), ("d", 3, 0)]


def test_max_sequences_and_first_come_first_served() -> None:
    sched = scheduler(max_sequences=2)
    for name in "abc":
        sched.add(request(name, 1))
    assert [name for name, _, _ in settle(*sched.plan(nothing))] == ["a", "b"]
    sched.remove("a")
    assert [name for name, _, _ in settle(*sched.plan(nothing))] == ["b", "c"]


def test_drafts_share_the_wanted_rows_and_never_displace_a_last_token() -> None:
    sched = scheduler(max_wanted=10)
    for name in "abc":
        sched.add(request(name, 1))
    assert settle(*sched.plan(all_of_it)) == [("a", 8, 8), ("b", 1, 1), ("c", 1, 1)]


def test_a_draft_stops_one_short_of_the_last_token_that_may_be_emitted() -> None:
    sched = scheduler()
    sched.add(request("a", 1, max_tokens=5))
    assert settle(*sched.plan(all_of_it)) == [("a", 5, 5)]
    assert settle(*sched.plan(all_of_it)) == [("a", 4, 4)]


def test_a_draft_never_takes_a_block_that_a_known_token_needs() -> None:
    sched = scheduler(blocks=3)
    for name in "ab":
        sched.add(request(name, 16, max_tokens=20))
    settle(*sched.plan(nothing))  # both read 15 of 16 tokens: a block each, one is free
    settle(*sched.plan(nothing))
    # both now need a second block and only one is there: the older one gets it, and may draft into it
    plan, items = sched.plan(all_of_it)
    assert settle(plan, items) == [("a", 16, 16)]
    assert sched.preemptions == 1 and sched.waiting[0].request.request_id == "b"


def test_a_draft_gives_way_rather_than_preempt() -> None:
    sched = scheduler(blocks=4)
    sched.add(request("a", 15, max_tokens=48))
    sched.add(request("b", 31, max_tokens=20))
    settle(*sched.plan(nothing))  # a holds 1 block, b holds 2, one is free
    assert settle(*sched.plan(nothing)) == [("a", 1, 1), ("b", 1, 1)]
    sched.running[1].request.tokens += [
        1,
        1,
    ]  # b knows three tokens it has not computed: needs the free block
    plan, items = sched.plan(all_of_it)
    assert settle(plan, items) == [("a", 1, 1), ("b", 2, 0)]
    assert sched.preemptions == 0


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    sched = scheduler(blocks=6, max_sequences=3)
    for name in "abcd":
        sched.add(request(name, 31, max_tokens=60))
    for _ in range(3):
        settle(*sched.plan(nothing))
    assert [name for name, _, _ in settle(*sched.plan(nothing))] == ["a", "b"]  # c gave its blocks to both
    assert sched.preemptions == 1
    assert [item.request.request_id for item in sched.waiting] == ["c", "d"]
    assert sched.waiting[0].state.blocks == 0 and len(sched.waiting[0].request.tokens) == 32
    sched.remove("a")
    plan, items = sched.plan(nothing)
    assert settle(plan, items)[-1] == ("c", 31, 0), "prompt and output are read again up to the last token"


def test_what_a_preempted_reader_finds_again_is_no_hit() -> None:
    sched = scheduler(blocks=7, chunk_rows=16)
    sched.cache = PrefixCache(sched.pool, lambda source, target: None)
    sched.add(request("old", 1, max_tokens=60))
    young = Request("young", [2] * 81, SamplingParams(max_tokens=1), max_context=1000)
    sched.add(young)
    for _ in range(4):
        settle(*sched.plan(nothing))
    sched.running[0].request.tokens += [1] * 55  # as if four blocks had filled at once
    while not sched.preemptions:
        settle(*sched.plan(nothing))
    assert young.output_length == 0
    sched.remove("old")
    settle(*sched.plan(nothing))
    assert sched.running[0].state.committed > 16, "what the cache kept was meant to be found"
    assert (young.timings.cached_tokens, young.cache.reason) == (0, "empty")
    assert (sched.prefix_queries, sched.prefix_hits) == (82, 0)


def test_an_older_reader_waits_for_a_younger_writer_and_keeps_what_it_read() -> None:
    """The writer's accepted runs eat the blocks the reader was promised."""
    sched = scheduler(blocks=7, chunk_rows=16)
    sched.add(request("old", 81, max_tokens=1))
    sched.add(request("young", 1, max_tokens=60))
    settle(*sched.plan(nothing))
    old, young = sched.running
    young.request.tokens += [1] * 31
    young.state.reserve(32)
    young.state.commit(32)  # as if two blocks had filled at once; it needs its third now
    young.request.tokens.append(1)
    waited, read = 0, [old.state.committed]
    while sched.preemptions == 0 and read[-1] < 80:
        settle(*sched.plan(nothing))
        read.append(old.state.committed)
        waited += read[-1] == read[-2]
    assert read == sorted(read), "the older request lost what it had read"
    assert waited > 0, "blocks were meant to be short"
    assert sched.running[0] is old
    for _ in range(6):
        settle(*sched.plan(nothing))
    assert old.state.committed > 80, "the older request never got on"


@pytest.mark.parametrize("limits", [(4, 64, 5, 4), (70, 0, 4, 8), (10, 4, 4, 16), (10, 4, 0, 8)])
def test_limits_that_cannot_work_are_refused(limits: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match="step limits"):
        Scheduler(BlockPool(4), *limits)
