"""Leases against a list in order of use; places for windows; blocks in a budget with something beside."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quickdraft.state.budget import kv_blocks
from quickdraft.state.leases import Leases, places_for

BLOCKS, PLACES, NOWHERE = 12, 4, 99


@given(st.lists(st.tuples(st.booleans(), st.integers(0, BLOCKS - 1)), max_size=60))
def test_the_longest_unused_gives_its_place_away(actions: list[tuple[bool, int]]) -> None:
    ended: list[int] = []
    leases = Leases(BLOCKS, PLACES, ended.append)
    order: list[int] = []
    for take, block in actions:
        ended.clear()
        lost = order[:1] if take and block not in order and len(order) == PLACES else []
        if take:
            place = leases.take(block)
            assert place == leases.find(block)
        else:
            leases.touch([block])
        if take or block in order:
            order = [*(other for other in order if other not in (block, *lost)), block]
        assert ended == lost
        table = leases.table(np.arange(BLOCKS, dtype=np.int32), NOWHERE)
        held = table[order].tolist()
        assert len(set(held)) == len(order) and set(held) <= set(range(PLACES))
        assert {block for block in range(BLOCKS) if table[block] != NOWHERE} == set(order)


def test_places_are_enough_for_every_running_window() -> None:
    assert places_for(None, 1000, 4, 256) == 1000
    assert places_for(512, 50, 4, 256) == 50
    places = places_for(512, 10_000, 4, 256)
    assert 4 * (512 + 256) // 16 < places < 2000


@pytest.mark.parametrize("budget", [11, 100, 12345])
def test_blocks_in_a_budget_with_something_beside(budget: int) -> None:
    def beside(blocks: int) -> int:
        return min(blocks, 40 + blocks // 8)

    found = kv_blocks(10, budget, beside)
    assert 10 * found + beside(found) <= budget < 10 * (found + 1) + beside(found + 1)
