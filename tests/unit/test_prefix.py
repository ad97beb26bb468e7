"""The prefix index and cache against a plain list of texts, over a memory that really is overwritten."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quickdraft.errors import CapacityError
from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.state.blocks import BlockPool
from quickdraft.state.cache import PrefixCache
from quickdraft.state.persist import DiskStore
from quickdraft.state.sequence import SequenceState, blocks_for
from quickdraft.state.tokens import token_bytes
from tests.support.toy import ToyModel


class World:
    """A pool, its cache, and a memory of one token per slot."""

    def __init__(self, blocks: int, folder: Path | None = None, budget: int = 1 << 20) -> None:
        self.memory = ToyModel(blocks)
        self.pool = BlockPool(blocks, self.memory.poison)
        store = DiskStore(folder, bytes(32), self.memory, budget) if folder else None
        self.cache = PrefixCache(self.pool, self.memory.copy_block, store)

    def compute(self, tokens: list[int], publish_at: int | None = None):
        """Resume and compute `tokens` as the engine does; the report, the state still held."""
        state = SequenceState(self.pool)
        cursor, report = self.cache.attach(state, tokens)
        assert state.committed == report.cached_tokens < len(tokens)
        self.check(state, tokens)
        try:
            while state.committed < len(tokens):
                step = min(publish_at or len(tokens), len(tokens) - state.committed)
                state.reserve(step)
                for position in range(state.committed, state.committed + step):
                    block = int(state.block_table[position // BLOCK_TOKENS])
                    assert self.pool.private(block)
                    self.memory.write(block, position % BLOCK_TOKENS, tokens[position])
                state.commit(step)
                cursor = self.cache.publish(cursor, state, tokens, partial=False)
        except CapacityError:
            self.leave(state, cursor, tokens)
            raise
        self.check(state, tokens)
        return report, state, cursor

    def check(self, state: SequenceState, tokens: list[int]) -> None:
        stored = [
            self.memory.read(int(state.block_table[p // BLOCK_TOKENS]), p % BLOCK_TOKENS)
            for p in range(state.committed)
        ]
        assert stored == tokens[: state.committed]

    def leave(self, state, cursor, tokens) -> None:
        self.cache.publish(cursor, state, tokens, partial=True)
        state.release()

    def ask(self, tokens: list[int]):
        report, state, cursor = self.compute(tokens)
        self.leave(state, cursor, tokens)
        return report


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def text(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1000) for _ in range(length)]


@st.composite
def texts(draw):
    """Texts that share beginnings of any length, down to within a block."""
    made: list[list[int]] = []
    for _ in range(draw(st.integers(1, 12))):
        base = draw(st.sampled_from(made)) if made else []
        keep = draw(st.integers(0, len(base)))
        tail = draw(st.lists(st.integers(0, 2), min_size=1, max_size=40))
        made.append(base[:keep] + tail)
    return made


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


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1:] = b"?" if data[-1:] != b"?" else b"!"
    file.write_bytes(data)


def become_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


HARM = [lambda file: None, flip, lambda file: file.write_bytes(b""), Path.unlink, become_a_folder]


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


def test_an_evicted_text_is_called_evicted() -> None:
    world = World(8)
    world.ask(text(100, 1))
    world.ask(text(100, 2))
    report = world.ask(text(100, 1))
    assert report.reason == "evicted" and report.cached_tokens < 99


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


@given(
    texts(),
    st.integers(1, 9),
    st.integers(0, 2000),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from(HARM)), min_size=24, max_size=24),
)
@settings(max_examples=400, deadline=None)
def test_a_small_pool_over_a_folder_that_is_tampered_with(sequence, blocks: int, budget: int, moves) -> None:
    folder = Path(tempfile.mkdtemp())
    world, held = World(blocks, folder, budget), []
    for tokens, (keep, writes, harm) in zip(sequence * 2, moves, strict=False):
        while len(held) > keep:
            world.leave(*held.pop(0))
        for _ in range(writes):
            world.cache.disk.write_next()
        for file in [each for each in sorted(folder.glob("*/*.kv")) if each.is_file()][::2]:
            harm(file)
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
    while world.cache.disk.write_next():
        pass
    world.cache.disk.close()
    shutil.rmtree(folder)
