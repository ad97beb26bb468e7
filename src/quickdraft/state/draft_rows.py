"""What a drafter that reads hidden states keeps beside the target's blocks and slots, so that it travels
with them: shared, copied, checkpointed and written to disk.

Per block which of its positions have a drafter's row, for a request that does not draft writes none;
per sequence the hidden state of the last row, which the drafter's next row needs: with its recurrent
slot, or without recurrent layers in a place of its own. A row at position p depends on the tokens up to
p alone, as the target's does. Knows no drafter and no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import CapacityError
from quickdraft.ops.interface import BLOCK_TOKENS, KVCache, RecurrentCache
from quickdraft.state.leases import Leases
from quickdraft.state.segment_file import BlockStorage
from quickdraft.state.sequence import SequenceState

_POSITION_BYTES: Final = 8


class BlockMemory(BlockStorage, Protocol):
    """BlockStorage whose blocks can be copied."""

    def copy_block(self, source: int, target: int) -> None:
        """Copy all that a block holds."""


class KVBlocks:
    """BlockMemory of a KV cache."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self.bytes_per_block = kv.bytes_per_block

    def views(self, block: int) -> list[memoryview]:
        return self._kv.views(block)

    def room(self, block: int) -> list[memoryview]:
        return self._kv.room(block)

    def filled(self, block: int) -> None:
        self._kv.filled(block)

    def copy_block(self, source: int, target: int) -> None:
        self._kv.copy_block(source, target)


class JoinedBlocks:
    """BlockMemory of several that are addressed by the same ids: the target's, and its side cars."""

    def __init__(self, parts: Sequence[BlockMemory]) -> None:
        self._parts = tuple(parts)
        self.bytes_per_block = sum(part.bytes_per_block for part in parts)

    def views(self, block: int) -> list[memoryview]:
        return [view for part in self._parts for view in part.views(block)]

    def room(self, block: int) -> list[memoryview]:
        return [view for part in self._parts for view in part.room(block)]

    def filled(self, block: int) -> None:
        for part in self._parts:
            part.filled(block)

    def copy_block(self, source: int, target: int) -> None:
        for part in self._parts:
            part.copy_block(source, target)


class DraftRows:
    """BlockMemory over a KV cache and, per block, the run of positions [from, to) that have rows.

    Whoever computes tokens says so at once, with `drop` or with `put`: what a block says before its first
    token was computed means nothing. With fewer `places` than `blocks` a block has rows while it is leased,
    and the cache's blocks behind the places are nobody's.
    """

    def __init__(self, kv: KVCache, blocks: int | None = None, places: int | None = None) -> None:
        self._blocks = KVBlocks(kv)
        self._runs = np.zeros((blocks or kv.blocks, 2), np.uint8)
        self.bytes_per_block = kv.bytes_per_block + 2
        self._leases: Leases | None = None
        if blocks is not None and places is not None and places < blocks:
            assert places < kv.blocks, "no block of the cache is left for what has no place"
            self._leases = Leases(blocks, places, self._forget)
            self._runs[:] = (BLOCK_TOKENS, 0)
        self._nowhere = places or 0  # what has no place is said to lie there, and not read

    def views(self, block: int) -> list[memoryview]:
        place = block if self._leases is None else self._leases.find(block)
        return [*self._blocks.views(place if place >= 0 else self._nowhere), self._runs[block].data]

    def room(self, block: int) -> list[memoryview]:
        place = block if self._leases is None else self._leases.take(block)
        return [*self._blocks.room(place), self._runs[block].data]

    def filled(self, block: int) -> None:
        self._blocks.filled(block if self._leases is None else self._leases.find(block))

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block of all layers and what it says."""
        self._runs[target] = self._runs[source]
        if self._leases is None:
            self._blocks.copy_block(source, target)
        elif self._leases.find(source) >= 0:
            self._leases.touch([source])
            place = self._leases.take(target)
            self._blocks.copy_block(self._leases.find(source), place)

    def reserve(self, blocks: NDArray[np.int32], start: int, end: int) -> None:
        """Positions start..end-1 are about to get rows."""
        if self._leases is not None:
            for block in blocks[start // BLOCK_TOKENS : -(-end // BLOCK_TOKENS)].tolist():
                self._leases.take(block)

    def table(self, blocks: NDArray[np.int32], first: int) -> NDArray[np.int32]:
        """Blocks of the cache in which the rows of a sequence's blocks lie, those from position `first` on in
        use now."""
        if self._leases is None:
            return blocks
        self._leases.touch(blocks[first // BLOCK_TOKENS :].tolist())
        return self._leases.table(blocks, self._nowhere)

    def _forget(self, block: int) -> None:
        self._runs[block] = (BLOCK_TOKENS, 0)

    def first(self, blocks: NDArray[np.int32], end: int) -> int:
        """The lowest position from which on all positions below `end` have rows; `end`: not even the last.
        `blocks` are those of a sequence, in order."""
        if not end:
            return 0
        count = -(-end // BLOCK_TOKENS)
        runs = self._runs[blocks[:count]]
        if runs[-1, 1] >= end - BLOCK_TOKENS * (count - 1):
            runs[-1, 1] = BLOCK_TOKENS  # of a copy: what lies behind `end` does not matter
        broken = np.flatnonzero((runs[:, 1] < BLOCK_TOKENS) | (runs[:, 0] > 0))
        if not len(broken):
            return 0
        last = int(broken[-1])
        whole = runs[last, 1] == BLOCK_TOKENS
        return min(BLOCK_TOKENS * last + (int(runs[last, 0]) if whole else BLOCK_TOKENS), end)

    def put(self, blocks: NDArray[np.int32], start: int, end: int, first: int) -> None:
        """Positions `first`..end-1 have rows now, of which start..end-1, at least one, were computed."""
        for index in range(start // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)):
            before = index * BLOCK_TOKENS
            self._runs[blocks[index]] = (
                max(0, min(first - before, BLOCK_TOKENS)), min(end - before, BLOCK_TOKENS)
            )  # fmt: skip

    def drop(self, blocks: NDArray[np.int32], start: int, end: int) -> None:
        """Positions start..end-1 were computed and have no rows."""
        first, used = divmod(start, BLOCK_TOKENS)
        if used and self._runs[blocks[first], 1] > used:
            self._runs[blocks[first], 1] = used
        first, last = first + bool(used), -(-end // BLOCK_TOKENS)
        if first < last:  # rarely, and an empty selection takes as long as a whole one
            self._runs[blocks[first:last]] = (BLOCK_TOKENS, 0)


class LastHidden(Protocol):
    """The hidden state [width] of the last row of each sequence, in places 0..sequences-1."""

    @property
    def sequences(self) -> int: ...
    @property
    def travels(self) -> bool: ...  # with what the prefix cache keeps
    def place(self, name: str, state: SequenceState) -> int:
        """The place of the sequence `name`, whose state this is; -1: it has not begun. CapacityError where
        all places are in use."""

    def put(self, place: int, position: int, hidden: NDArray[np.float32]) -> None:
        """The hidden state of the row before `position`, up to which the sequence is computed."""

    def get(self, place: int, position: int) -> NDArray[np.float32] | None:
        """The hidden state of the row before `position`, read-only; None where nobody kept it."""

    def forget(self, name: str) -> None:
        """The sequence is over; unknown names are fine."""


class HiddenPlaces:
    """LastHidden without recurrent slots. A sequence keeps its place as long as it holds blocks, or until
    another needs it: at most `sequences` hold blocks at once."""

    travels = False

    def __init__(self, sequences: int, width: int) -> None:
        self.sequences = sequences
        self._places: dict[str, tuple[int, SequenceState]] = {}
        self._free = list(range(sequences - 1, -1, -1))
        self._positions = np.zeros(sequences, np.int64)
        self._hidden = np.zeros((sequences, width), np.float32)

    def place(self, name: str, state: SequenceState) -> int:
        found = self._places.get(name)
        if found is not None:
            return found[0]
        if not self._free:
            idle = next((other for other, (_, its) in self._places.items() if not its.blocks), None)
            if idle is None:
                raise CapacityError(
                    "more sequences at once than may draft", got=name, expected=f"at most {self.sequences}"
                )
            self.forget(idle)
        place = self._free.pop()
        self._positions[place] = 0
        self._places[name] = place, state
        return place

    def put(self, place: int, position: int, hidden: NDArray[np.float32]) -> None:
        self._positions[place], self._hidden[place] = position, hidden

    def get(self, place: int, position: int) -> NDArray[np.float32] | None:
        return self._hidden[place] if position and self._positions[place] == position else None

    def forget(self, name: str) -> None:
        found = self._places.pop(name, None)
        if found is not None:
            self._free.append(found[0])


class HiddenStates:
    """LastHidden in the slots of a RecurrentCache, which it is: one that keeps one more thing per slot, a
    hidden state [width] and its position."""

    travels = True

    def __init__(self, states: RecurrentCache, width: int) -> None:
        self._states = states
        self.slots, self.sequences, self.max_pending = states.slots, states.sequences, states.max_pending
        self._bytes = np.zeros((states.slots, _POSITION_BYTES + 4 * width), np.uint8)
        self._positions: NDArray[Any] = self._bytes[:, :_POSITION_BYTES].view(np.int64)[:, 0]
        self._hidden: NDArray[Any] = self._bytes[:, _POSITION_BYTES:].view(np.float32)
        self.bytes_per_slot = states.bytes_per_slot + hidden_bytes(width)
        self.checkpoints_in = states.checkpoints_in

    def clear(self, slot: int) -> None:
        self._states.clear(slot)
        self._positions[slot] = 0

    def copy(self, source: int, target: int) -> None:
        self._states.copy(source, target)
        self._bytes[target] = self._bytes[source]

    def settle(self, slot: int, rows: int) -> None:
        self._states.settle(slot, rows)

    def views(self, slot: int) -> list[memoryview]:
        return [*self._states.views(slot), self._bytes[slot].data]

    def room(self, slot: int) -> list[memoryview]:
        return [*self._states.room(slot), self._bytes[slot].data]

    def filled(self, slot: int) -> None:
        self._states.filled(slot)

    def place(self, name: str, state: SequenceState) -> int:
        return state.slot

    def forget(self, name: str) -> None:
        pass

    def put(self, slot: int, position: int, hidden: NDArray[np.float32]) -> None:
        self._positions[slot], self._hidden[slot] = position, hidden

    def get(self, slot: int, position: int) -> NDArray[np.float32] | None:
        return self._hidden[slot] if position and self._positions[slot] == position else None


def resume_earlier(position: int) -> int:
    """Where a sequence resumes whose shared tokens end at `position` and whose LastHidden does not travel:
    so much earlier that computing the target's rows from there gives the hidden states of all rows that
    lack, and that the row of the first is in a block that it gets."""
    earlier = max(0, position - 1)
    return earlier if earlier % BLOCK_TOKENS else max(0, earlier - 1)


def hidden_bytes(width: int) -> int:
    """What HiddenStates adds to a slot."""
    return _POSITION_BYTES + 4 * width
