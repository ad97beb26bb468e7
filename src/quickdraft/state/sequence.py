"""SequenceState: what one sequence has computed, in blocks; pending rows versus committed ones.

The one owner of a sequence's place in the cache. Only the walk's verdict (`commit`) turns pending
rows into committed ones; blocks that only pending rows needed go back at once.
"""

from __future__ import annotations

from collections.abc import Callable

from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.state.blocks import BlockPool


def blocks_for(tokens: int) -> int:
    """Blocks that hold this many positions."""
    return -(-tokens // BLOCK_TOKENS)


class SequenceState:
    """Block table and token counts of one sequence."""

    __slots__ = ("_pool", "block_table", "committed", "pending")

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.block_table: list[int] = []
        self.committed = 0
        self.pending = 0

    def reserve(self, count: int) -> None:
        """Make room for `count` pending rows; CapacityError with nothing changed when blocks are short."""
        assert self.pending == 0, "the last step was not committed"
        missing = blocks_for(self.committed + count) - len(self.block_table)
        if missing > 0:
            self.block_table += self._pool.take(missing)
        self.pending = count

    def commit(self, keep: int) -> None:
        """Keep the first `keep` pending rows; the blocks of the rest are freed."""
        assert 0 <= keep <= self.pending, f"commit {keep} of {self.pending} pending rows"
        self.committed += keep
        self.pending = 0
        needed = blocks_for(self.committed)
        if needed < len(self.block_table):
            self._pool.give_back(self.block_table[needed:])
            del self.block_table[needed:]

    def fork(self, copy_block: Callable[[int, int], None]) -> SequenceState:
        """A second sequence with the same committed tokens: full blocks shared, the last one copied."""
        assert self.pending == 0, "fork between steps only"
        twin = SequenceState(self._pool)
        full, rest = divmod(self.committed, BLOCK_TOKENS)
        own = self._pool.take(1) if rest else []
        for block in self.block_table[:full]:
            self._pool.share(block)
        if own:
            copy_block(self.block_table[full], own[0])
        twin.block_table = self.block_table[:full] + own
        twin.committed = self.committed
        return twin

    def release(self) -> None:
        """Give every block back; may be called again."""
        self._pool.give_back(self.block_table)
        self.block_table = []
        self.committed = self.pending = 0
