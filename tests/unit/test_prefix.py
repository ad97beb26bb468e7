"""The prefix index and cache against a plain list of texts, over a memory that really is overwritten."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quickdraft.errors import CapacityError
from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.state.draft_rows import resume_earlier
from quickdraft.state.sequence import SequenceState, blocks_for
from quickdraft.state.tokens import token_bytes
from tests.support.prefix_world import World, shared, text, texts


@given(texts(), st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_a_hit_is_the_longest_beginning_ever_computed(sequence: list[list[int]], step: int) -> None:
    world, seen = World(400), []
    for tokens in sequence:
        report, state, cursor = world.compute(tokens, publish_at=step)
        expected = max([shared(tokens, old) for old in seen], default=0)
        assert report.cached_tokens == min(expected, len(tokens) - 1)
        complete = report.cached_tokens == len(tokens) - 1
        assert (report.reason == "none") == complete and report.reason != "evicted"
        assert (report.reason == "empty") == (not seen and not complete)
        world.leave(state, cursor, tokens)
        seen.append(tokens)
    assert world.pool.free == world.pool.count
    assert world.pool.idle <= sum(blocks_for(len(tokens)) for tokens in seen)


@given(texts(), st.integers(1, 9), st.lists(st.integers(0, 3), min_size=12, max_size=12))
@settings(max_examples=300, deadline=None)
def test_a_small_pool_evicts_and_never_serves_wrong_tokens(sequence, blocks: int, hold: list[int]) -> None:
    world, held = World(blocks), []
    for tokens, steps in zip(sequence, hold, strict=False):
        while len(held) > steps:
            world.leave(*held.pop(0))
        try:
            _, state, cursor = world.compute(tokens, publish_at=7)
        except CapacityError:
            continue
        held.append((state, cursor, tokens))
        for other in held:
            world.check(other[0], other[2])
    for item in held:
        world.leave(*item)
    assert world.pool.free == world.pool.count


def test_two_that_compute_the_same_end_up_with_the_same_blocks() -> None:
    world, tokens = World(20), text(40, 1)
    first, second = SequenceState(world.pool), SequenceState(world.pool)
    cursors = [world.cache.attach(state, tokens)[0] for state in (first, second)]
    for index, state in enumerate((first, second)):
        state.reserve(40)
        for p in range(40):
            world.memory.write(int(state.block_table[p // BLOCK_TOKENS]), p % BLOCK_TOKENS, tokens[p])
        state.commit(40)
        cursors[index] = world.cache.publish(cursors[index], state, tokens, partial=False)
    assert first.block_table[:2].tolist() == second.block_table[:2].tolist()
    assert first.block_table[2] != second.block_table[2]  # still written to
    assert world.pool.free == 20 - 4
    for state, cursor in zip((first, second), cursors, strict=True):
        world.leave(state, cursor, tokens)
    assert world.pool.idle == 3


def test_reasons() -> None:
    world, base = World(100), text(100, 2)
    assert world.ask(base).reason == "empty"
    again = world.ask(base)
    assert (again.cached_tokens, again.reason, again.token) == (99, "none", None)
    longer = world.ask([*base, 7, 8, 9])
    assert (longer.cached_tokens, longer.reason, longer.token, longer.cached_token) == (100, "end", 7, None)
    edited = [*base[:37], 5000, *base[38:]]
    report = world.ask(edited)
    assert (report.cached_tokens, report.reason) == (37, "differs")
    assert (report.token, report.cached_token) == (5000, base[37])
    other = world.ask([6000, *base])
    assert (other.cached_tokens, other.reason, other.cached_token) == (0, "differs", base[0])
    assert world.ask([8]).reason == "none"  # a single token is always computed


@pytest.mark.parametrize(("length", "again"), [(1, 1), (2, 1), (16, 1), (17, 2), (37, 1), (98, 1)])
def test_resuming_earlier_gives_the_same_reason(length: int, again: int) -> None:
    world, base = World(100), text(100, 2)
    world.ask(base)
    edited, state = [*base[:length], 5000, 1], SequenceState(world.pool)
    held = world.cache.shared_blocks(edited, resume_earlier)
    _, report = world.cache.attach(state, edited, resume_earlier)
    assert (state.committed, report.cached_tokens) == (length - again, length - again)
    assert (report.reason, report.token, report.cached_token) == ("differs", 5000, base[length])
    assert (report.again_tokens, report.shared_tokens) == (again, length)
    assert report.to_dict()["position"] == length and held == 0
    world.check(state, edited)
    rest = state.committed % BLOCK_TOKENS
    assert not rest or world.pool.private(int(state.block_table[-1])), "the next token is written there"
    assert world.cache.shared_blocks(edited, resume_earlier) == state.committed // BLOCK_TOKENS
    state.release()


def test_an_evicted_text_is_called_evicted() -> None:
    world = World(8)
    world.ask(text(100, 1))
    world.ask(text(100, 2))
    report = world.ask(text(100, 1))
    assert report.reason == "evicted" and report.cached_tokens < 99


def test_what_was_evicted_is_no_reason_where_more_is_cached() -> None:
    world, tokens = World(8), text(16, 1)
    world.ask(tokens[:5])
    world.ask(text(16 * 8, 2))  # evicts it
    world.ask(tokens)
    report = world.ask([*tokens[:9], 5000, 1])
    assert (report.cached_tokens, report.reason, report.cached_token) == (9, "differs", tokens[9])
    again = World(8)
    again.ask([*text(5, 1), 4000])
    again.ask(text(16 * 8, 2))
    assert again.ask([*text(5, 1), 5000]).reason == "evicted", "five tokens of it were"


def test_many_short_texts_are_evicted_a_few_at_a_time_the_oldest_first() -> None:
    world = World(1000)
    for index in range(1100):
        world.ask([index, *text(10, index)])
    evicted = world.cache.index.evicted_blocks
    assert 100 <= evicted < 130
    assert world.ask([evicted + 1, *text(10, evicted + 1)]).reason == "none"
    assert world.ask([90, *text(10, 90)]).cached_tokens == 0


def test_short_requests_do_not_push_out_a_long_conversation_and_the_newest_stays() -> None:
    world, long = World(64), text(16 * 50, 3)
    world.ask(long)
    for index in range(40):
        newest = text(50, 100 + index)
        world.ask(newest)
        assert world.ask(newest).cached_tokens == 49, "the newest was evicted first"
    assert world.ask(long).cached_tokens == len(long) - 1, "short requests pushed a long one out"


def test_a_long_text_does_not_stay_for_ever() -> None:
    world = World(64)
    world.ask(text(16 * 50, 3))
    for index in range(8):
        world.ask(text(16 * 30, 100 + index))
    assert world.ask(text(16 * 30, 107)).cached_tokens == 16 * 30 - 1
    assert world.ask(text(16 * 50, 3)).cached_tokens == 0


@pytest.mark.parametrize("blocks", [62, 64, 100])
def test_two_conversations_and_a_title_request_between_all_stay(blocks: int) -> None:
    world = World(blocks)
    a, b, title = text(400, 1), text(450, 2), text(53, 3)
    world.ask(a), world.ask(b)
    for turn in range(5):
        a, b = a + text(5, 10 + turn), b + text(5, 20 + turn)
        assert world.ask(a).cached_tokens == len(a) - 5
        world.ask([*title, turn])
        assert world.ask(b).cached_tokens == len(b) - 5
    assert (world.cache.index.evicted_blocks == 0) == (blocks == 100)


def test_a_long_dead_conversation_does_not_outlive_the_newest() -> None:
    world, dead = World(100), text(300, 1)
    for turn in range(20):
        dead = dead + text(20, turn)
        world.ask(dead)
    for index in range(20):
        newest = text(900, 500 + index)
        world.ask(newest)
        assert world.ask(newest).cached_tokens == 899


def test_what_is_used_often_stays() -> None:
    world, system = World(32), text(160, 4)
    for index in range(30):
        expected = 160 if index else 0
        assert world.ask(system + text(100, 50 + index)).cached_tokens == expected


def test_no_room_for_the_copy_still_shares_the_full_blocks() -> None:
    world, tokens = World(3), text(45, 5)
    world.ask(tokens)
    state = SequenceState(world.pool)
    _, report = world.cache.attach(state, [*tokens[:40], 1, 2])
    assert report.cached_tokens == 32 and report.reason == "evicted"
    state.release()
    assert world.pool.free == 3


def test_the_search_reads_each_block_once() -> None:
    world, tokens = World(300), text(4000, 6)
    world.ask(tokens)
    match = world.cache.index.match(token_bytes(tokens), 3999)
    assert [node.end for node in match.path] == list(range(16, 3985, 16)) and match.tokens == 3999


@pytest.mark.parametrize("limit", range(40))
def test_a_match_never_passes_its_limit(limit: int) -> None:
    world, tokens = World(10), text(40, 7)
    world.ask(tokens)
    assert world.cache.index.match(token_bytes(tokens), limit).tokens == limit
