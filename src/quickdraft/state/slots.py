"""SlotPool: which recurrent states are free: some for running sequences, the rest for checkpoints.

Integers only; `storage` is where the states lie, opaque here. A slot is free or has one owner: a
sequence, or the prefix cache. What a free slot holds means nothing (tests poison it).
"""

from __future__ import annotations

from collections.abc import Callable

from quickdraft.errors import CapacityError
from quickdraft.ops.interface import RecurrentCache


class SlotPool:
    """Slots 0..sequences-1 for sequences, those from there on for checkpoints.

    `on_free(slot)` is called whenever a slot is given back.
    """

    def __init__(self, storage: RecurrentCache, on_free: Callable[[int], None] | None = None) -> None:
        self.storage, self.sequences = storage, storage.sequences
        self.checkpoints = storage.slots - storage.sequences
        sequences = storage.sequences
        assert self.checkpoints >= 0, f"{storage.slots} slots for {sequences} sequences"
        self._free_sequences = list(range(sequences - 1, -1, -1))
        self._free_checkpoints = list(range(storage.slots - 1, sequences - 1, -1))
        self._owned = bytearray(storage.slots)
        self._on_free = on_free

    @property
    def max_pending(self) -> int:
        """Drafted rows a sequence may have in one step."""
        return self.storage.max_pending

    @property
    def free_sequences(self) -> int:
        """Slots left for sequences."""
        return len(self._free_sequences)

    @property
    def free_checkpoints(self) -> int:
        """Slots left for checkpoints; those the prefix cache could evict do not count."""
        return len(self._free_checkpoints)

    def take_sequence(self) -> int:
        """A slot for a sequence; CapacityError when all are in use."""
        if not self._free_sequences:
            raise CapacityError(
                "recurrent states ran out", got="one more sequence", expected=f"at most {self.sequences}"
            )
        return self._taken(self._free_sequences)

    def take_checkpoint(self) -> int | None:
        """A slot for a checkpoint; None when all are in use."""
        return self._taken(self._free_checkpoints) if self._free_checkpoints else None

    def give_back(self, slot: int) -> None:
        """Its owner needs it no more."""
        assert self._owned[slot], f"slot {slot} freed twice"
        self._owned[slot] = 0
        (self._free_sequences if slot < self.sequences else self._free_checkpoints).append(slot)
        if self._on_free is not None:
            self._on_free(slot)

    def _taken(self, free: list[int]) -> int:
        slot = free.pop()
        self._owned[slot] = 1
        return slot
