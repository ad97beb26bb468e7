"""Which positions have a drafter's rows, against a model that keeps a set; hidden states beside slots."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quickdraft.errors import CapacityError
from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.state.blocks import BlockPool
from quickdraft.state.draft_rows import DraftRows, HiddenPlaces, HiddenStates, resume_earlier
from quickdraft.state.sequence import SequenceState
from quickdraft.state.spec import Recurrent

BLOCKS = 40


def lowest(rows: set[int], end: int) -> int:
    first = end
    while first - 1 in rows:
        first -= 1
    return first


def test_rows_are_those_a_set_of_positions_would_say() -> None:
    source = random.Random(1)
    for _ in range(300):
        kv = ReferenceOps().kv_cache(1, BLOCKS, 1, 8, "float32")
        memory = DraftRows(kv)
        for number in range(BLOCKS):  # blocks come with whatever was there
            memory.views(number)[-1][:] = bytes([source.randrange(256), source.randrange(256)])
        table = np.array(source.sample(range(20), 10), np.int32)
        rows: set[int] = set()
        start = 0
        while start < 100:
            end = min(160, start + source.choice([1, 2, 15, 16, 17, 40]))
            kind = source.randrange(3)
            if kind == 0:
                memory.drop(table, start, end)
                rows -= set(range(start, 200))
            else:  # warm: goes on from what is there; cold: begins anew, and a block has one run
                warm = kind == 1 and start > 0
                first = memory.first(table, start) if warm else start + 1
                memory.drop(table, start, end)
                memory.put(table, start, end, first)
                kept = start if warm else start // BLOCK_TOKENS * BLOCK_TOKENS
                rows = {row for row in rows if row < kept} | set(range(start if warm else first, end))
            start = end
            assert memory.first(table, start) == lowest(rows, start)
            if source.random() < 0.3 and start % BLOCK_TOKENS:  # resume within the last block, as a copy
                start -= source.randrange(start % BLOCK_TOKENS)
                last = start // BLOCK_TOKENS
                if start % BLOCK_TOKENS:
                    copy = 20 + last
                    memory.copy_block(int(table[last]), copy)
                    table[last] = copy
                rows -= set(range(start, 200))


def test_hidden_states_travel_with_their_slot() -> None:
    states = ReferenceOps().recurrent_cache(1, 4, 2, Recurrent(2, 8, 8, 48, 3), 3)
    memory = HiddenStates(states, 5)
    assert memory.bytes_per_slot == sum(len(view) for view in memory.views(0)) > states.bytes_per_slot
    row = np.arange(5, dtype=np.float32)
    memory.put(0, 7, row)
    memory.copy(0, 3)
    assert np.array_equal(memory.get(3, 7), row) and memory.get(3, 8) is None
    for view, other in zip(memory.views(1), memory.views(3), strict=True):
        view[:] = other
    assert np.array_equal(memory.get(1, 7), row)
    memory.clear(3)
    assert memory.get(3, 7) is None and memory.get(3, 0) is None


def test_a_place_stays_with_a_sequence_that_holds_blocks() -> None:
    pool, places = BlockPool(8), HiddenPlaces(2, 3)
    states = {name: SequenceState(pool) for name in "abc"}
    for name in "ab":
        states[name].reserve(1)
        states[name].commit(1)
        places.put(places.place(name, states[name]), 1, np.full(3, ord(name), np.float32))
    with pytest.raises(CapacityError, match="more sequences at once than may draft"):
        places.place("c", states["c"])
    states["a"].release()
    place = places.place("a", states["a"])
    kept = places.get(place, 1)
    assert kept is not None and kept[0] == ord("a"), "nobody needed its place"
    assert places.get(place, 2) is None
    assert places.place("c", states["c"]) == place and places.get(place, 1) is None
    assert places.place("b", states["b"]) == 1 - place
    places.forget("b")
    places.forget("b")
    assert places.place("a", states["a"]) == 1 - place


def test_resuming_earlier_never_begins_a_block_and_computes_one_or_two_tokens_again() -> None:
    assert [resume_earlier(position) for position in (0, 1, 2, 3, 15, 16, 17, 18, 33)] == [
        0, 0, 1, 2, 14, 15, 15, 17, 31,
    ]  # fmt: skip
