"""Leases: places in a memory smaller than what is addressed, taken from whoever was used longest ago.

A drafter whose layers all have a window reads the rows near the end of a text and no others, so its cache
need not hold every block of the target's: a block has a place there while it is leased. Integers only:
knows no rows and no buffer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.interface import BLOCK_TOKENS


class Leases:
    """Places 0 .. places - 1 for some of the blocks 0 .. blocks - 1. `on_end(block)` is called when a block
    loses its place to another."""

    def __init__(self, blocks: int, places: int, on_end: Callable[[int], None]) -> None:
        assert 1 <= places <= blocks, f"{places} places for {blocks} blocks"
        self._places = np.full(blocks, -1, np.int32)
        self._free = list(range(places - 1, -1, -1))
        self._used: OrderedDict[int, None] = OrderedDict()  # blocks with a place, the longest unused first
        self._on_end = on_end

    def find(self, block: int) -> int:
        """The place of a block, -1 for none; not a use."""
        return int(self._places[block])

    def take(self, block: int) -> int:
        """The place of a block, now its own; the most recent use."""
        if self._places[block] < 0:
            if not self._free:
                other = self._used.popitem(last=False)[0]
                self._free.append(int(self._places[other]))
                self._places[other] = -1
                self._on_end(other)
            self._places[block] = self._free.pop()
        self._used[block] = None
        self._used.move_to_end(block)
        return int(self._places[block])

    def touch(self, blocks: Iterable[int]) -> None:
        """A use of those that have a place."""
        for block in blocks:
            if block in self._used:
                self._used.move_to_end(block)

    def table(self, blocks: NDArray[np.int32], nowhere: int) -> NDArray[np.int32]:
        """The places of blocks, `nowhere` for those that have none."""
        found = self._places[blocks]
        return np.where(found < 0, np.int32(nowhere), found)


def places_for(window: int | None, blocks: int, sequences: int, chunk_rows: int) -> int:
    """Places that let every running sequence keep its window while others read, and an eighth of the blocks
    for what the prefix cache may resume; all blocks without a window."""
    if window is None:
        return blocks
    running = sequences * (-(-(window + chunk_rows) // BLOCK_TOKENS) + 2)
    return min(blocks, running + blocks // 8)
