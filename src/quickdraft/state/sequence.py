"""SequenceState: what one sequence has computed, in blocks; pending rows versus committed ones.

The one owner of a sequence's place in the cache. Only the walk's verdict (`commit`) turns pending
rows into committed ones; blocks that only pending rows needed go back at once. The block table is
a growing int32 array, so a step hands it to the kernels without touching every entry.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.state.blocks import BlockPool

_FIRST_CAPACITY = 16


def blocks_for(tokens: int) -> int:
    """Blocks that hold this many positions."""
    return -(-tokens // BLOCK_TOKENS)


class SequenceState:
    """Block table and token counts of one sequence."""

    __slots__ = ("_pool", "_table", "blocks", "committed", "pending")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._table = np.empty(_FIRST_CAPACITY, np.int32)
        self.blocks = 0  # how many it owns, alone or shared
        self.committed = 0
        self.pending = 0

    @property
    def block_table(self) -> NDArray[np.int32]:
        """Its blocks in order of position; a view, valid until the next change of this state."""
        return self._table[: self.blocks]

    def missing_blocks(self, tokens: int) -> int:
        """Blocks it would have to take before it could hold `tokens` positions."""
        return max(0, blocks_for(tokens) - self.blocks)

    def reserve(self, count: int) -> None:
        """Make room for `count` pending rows; CapacityError with nothing changed when blocks are short."""
        assert self.pending == 0, "the last step was not committed"
        assert count >= 0, f"reserve {count} rows"
        missing = self.missing_blocks(self.committed + count)
        if missing:
            self._append(self._pool.take(missing))
        self.pending = count

    def commit(self, keep: int) -> None:
        """Keep the first `keep` pending rows; the blocks of the rest are freed."""
        assert 0 <= keep <= self.pending, f"commit {keep} of {self.pending} pending rows"
        self.committed += keep
        self.pending = 0
        self._keep_blocks(blocks_for(self.committed))

    def resume(self, blocks: list[int], committed: int) -> None:
        """Start an empty sequence from `committed` tokens in `blocks`, whose owner it becomes."""
        assert not self.blocks and blocks_for(committed) == len(blocks), "resume an empty sequence"
        self._append(blocks)
        self.committed = committed

    def exchange(self, first: int, blocks: list[int]) -> None:
        """Use these blocks from index `first` on, which hold the same tokens and are owned by it already."""
        assert first + len(blocks) <= self.blocks, f"exchange {len(blocks)} blocks from {first}"
        self._table[first : first + len(blocks)] = blocks

    def fork(self, copy_block: Callable[[int, int], None]) -> SequenceState:
        """A second sequence with the same committed tokens: full blocks shared, the partial one copied.

        CapacityError with nothing changed when there is no block for the copy.
        """
        assert self.pending == 0, "fork between steps only"
        twin = SequenceState(self._pool)
        full, rest = divmod(self.committed, BLOCK_TOKENS)
        own = self._pool.take(1) if rest else []
        shared = self._table[:full].tolist()
        for block in shared:
            self._pool.share(block)
        twin._append(shared + own)
        twin.committed = self.committed
        if own:
            copy_block(int(self._table[full]), own[0])
        return twin

    def release(self) -> None:
        """Give every block back; may be called again."""
        self.committed = self.pending = 0
        self._keep_blocks(0)

    def _append(self, blocks: list[int]) -> None:
        wanted = self.blocks + len(blocks)
        if wanted > len(self._table):
            grown = np.empty(max(wanted, 2 * len(self._table)), np.int32)
            grown[: self.blocks] = self._table[: self.blocks]
            self._table = grown
        self._table[self.blocks : wanted] = blocks
        self.blocks = wanted

    def _keep_blocks(self, count: int) -> None:
        if count < self.blocks:
            surplus = self._table[count : self.blocks].tolist()
            self.blocks = count
            self._pool.give_back(surplus)
