"""SequenceState: what one sequence has computed, in blocks; pending rows versus committed ones.

The one owner of a sequence's place in the cache. Only the walk's verdict (`commit`) turns pending
rows into committed ones; blocks that only pending rows needed go back at once. The block table is
a growing int32 array, so a step hands it to the kernels without touching every entry.

With recurrent layers it also owns a slot: the state of those layers after `committed - replay`
tokens. The step applies its certain rows to the slot itself; the drafted rows that were kept wait in
the slot's history until the next step, or `settle`, applies them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import CapacityError
from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.state.blocks import BlockPool
from quickdraft.state.slots import SlotPool

_FIRST_CAPACITY = 16


def blocks_for(tokens: int) -> int:
    """Blocks that hold this many positions."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a sequence's recurrent state after `position` tokens, in a checkpoint slot."""

    position: int
    slot: int
    likely: bool  # a later text may well go on from here


class SequenceState:
    """Block table, token counts and perhaps the recurrent slot of one sequence."""

    __slots__ = (
        "_drafted", "_pool", "_slots", "_table",
        "blocks", "committed", "pending", "replay", "slot", "snapshots",
    )  # fmt: skip

    def __init__(self, pool: BlockPool, slots: SlotPool | None = None) -> None:
        self._pool, self._slots = pool, slots
        self.slot = -1  # none: no recurrent layers, or not begun
        self.replay = 0  # rows of the slot's history that are committed, and not applied to it yet
        self.snapshots: list[Snapshot] = []  # its own until their tokens are published
        self._drafted = 0
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

    def begin(self) -> None:
        """Take a slot, if there are recurrent layers, with the state before any token."""
        if self._slots is not None:
            assert self.slot < 0 and self.committed == 0, "only an empty sequence begins"
            self.slot = self._slots.take_sequence()
            self._slots.storage.clear(self.slot)

    def reserve(self, count: int, drafted: int = 0) -> None:
        """Make room for `count` pending rows, the last `drafted` of them a draft; CapacityError with
        nothing changed when blocks are short."""
        assert self.pending == 0, "the last step was not committed"
        assert 0 <= drafted <= count, f"reserve {count} rows, {drafted} of them drafted"
        missing = self.missing_blocks(self.committed + count)
        if missing:
            self._append(self._pool.take(missing))
        self.pending, self._drafted = count, drafted

    def commit(self, keep: int) -> None:
        """Keep the first `keep` pending rows; the blocks of the rest are freed.

        A slot has advanced by every row that was not drafted: after a step that ran and keeps fewer
        than those, nothing can be decoded from it.
        """
        assert 0 <= keep <= self.pending, f"commit {keep} of {self.pending} pending rows"
        if self.slot >= 0:
            self.replay = max(0, keep - (self.pending - self._drafted))
        self.committed += keep
        self.pending = self._drafted = 0
        self._keep_blocks(blocks_for(self.committed))

    def resume(self, blocks: list[int], committed: int) -> None:
        """Start an empty sequence from `committed` tokens in `blocks`, whose owner it becomes."""
        assert not self.blocks and blocks_for(committed) == len(blocks), "resume an empty sequence"
        self._append(blocks)
        self.committed = committed

    def settle(self) -> None:
        """Bring the slot up to the committed tokens."""
        assert self.pending == 0, "settle between steps only"
        if self.replay:
            assert self._slots is not None, "rows to replay, and no slot"
            self._slots.storage.settle(self.slot, self.replay)
            self.replay = 0

    def exchange(self, first: int, blocks: list[int]) -> None:
        """Use these blocks from index `first` on, which hold the same tokens and are owned by it already."""
        assert first + len(blocks) <= self.blocks, f"exchange {len(blocks)} blocks from {first}"
        self._table[first : first + len(blocks)] = blocks

    def fork(self, copy_block: Callable[[int, int], None]) -> SequenceState:
        """A second sequence with the same committed tokens: full blocks shared, the partial one and the
        recurrent state copied.

        CapacityError with nothing changed when there is no block or slot for the copy.
        """
        assert self.pending == 0, "fork between steps only"
        twin = SequenceState(self._pool, self._slots)
        full, rest = divmod(self.committed, BLOCK_TOKENS)
        if self.slot >= 0:
            self._fork_slot(twin)
        try:
            own = self._pool.take(1) if rest else []
        except CapacityError:
            twin.release()
            raise
        shared = self._table[:full].tolist()
        for block in shared:
            self._pool.share(block)
        twin._append(shared + own)
        twin.committed = self.committed
        if own:
            copy_block(int(self._table[full]), own[0])
        return twin

    def release(self) -> None:
        """Give every block and slot back; may be called again."""
        self.committed = self.pending = self.replay = self._drafted = 0
        self._keep_blocks(0)
        if self.slot >= 0:
            assert self._slots is not None, "a slot of no pool"
            for slot in (self.slot, *(snapshot.slot for snapshot in self.snapshots)):
                self._slots.give_back(slot)
            self.slot = -1
            self.snapshots.clear()

    def _fork_slot(self, twin: SequenceState) -> None:
        assert self._slots is not None, "a slot of no pool"
        self.settle()
        twin.begin()
        self._slots.storage.copy(self.slot, twin.slot)

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
