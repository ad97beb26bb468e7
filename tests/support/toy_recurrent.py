"""ToyRecurrent: recurrent states that are a running hash of tokens, in slots as a real model keeps them.

Certain rows change the slot, pending rows only a scratch copy and the history; what a step is told to
replay comes from there first. A slot holds the hash and how many tokens went into it, so a stale
checkpoint, a wrong rollback, a missing or a second replay and a poisoned slot are all caught.
"""

from __future__ import annotations

import numpy as np

from quickdraft.engine.plan import PlanEntry

MAX_PENDING = 15
POISONED = 2**63
_PRIME = 2**61 - 1
_NO_TOKEN = -1


def advanced(state: int, token: int) -> int:
    """The hash after one more token."""
    return (state * 6_364_136_223_846_793 + token + 11) % _PRIME


class ToyRecurrent:
    """ops.interface.RecurrentCache; [slots, 2] uint64: hash, tokens."""

    bytes_per_slot = 16
    max_pending = MAX_PENDING
    checkpoints_in = "memory"

    def __init__(self, sequences: int, checkpoints: int) -> None:
        self.sequences, self.slots = sequences, sequences + checkpoints
        self.data = np.full((self.slots, 2), POISONED, np.uint64)
        self.history = np.full((sequences, MAX_PENDING), _NO_TOKEN)

    def poison(self, slot: int) -> None:
        self.data[slot] = POISONED
        self._forget(slot)

    def clear(self, slot: int) -> None:
        self.data[slot] = 0
        self._forget(slot)

    def copy(self, source: int, target: int) -> None:
        assert self.data[source, 1] != POISONED, f"slot {source} is free and copied"
        self.data[target] = self.data[source]
        self._forget(target)

    def settle(self, slot: int, rows: int) -> None:
        tokens = self.history[slot, :rows].tolist()
        assert 0 < rows <= MAX_PENDING and _NO_TOKEN not in tokens, f"replay {rows} rows of {tokens}"
        self._apply(slot, tokens)
        self._forget(slot)

    def views(self, slot: int) -> list[memoryview]:
        return [self.data[slot, :1].view(np.uint8).data, self.data[slot, 1:].view(np.uint8).data]

    room = views

    def filled(self, slot: int) -> None:
        pass

    def advance(self, entry: PlanEntry) -> list[int]:
        """Run the rows of one entry; the hash after each."""
        assert 0 <= entry.slot < self.sequences, f"slot {entry.slot} belongs to no sequence"
        if entry.replay:
            self.settle(entry.slot, entry.replay)
        assert self.data[entry.slot, 1] == entry.start, (
            f"{entry.request_id}: the state of {self.data[entry.slot, 1]} tokens at {entry.start}"
        )
        certain = len(entry.tokens) - len(entry.drafted)
        states = [self._apply(entry.slot, [token]) for token in entry.tokens[:certain]]
        self._forget(entry.slot)
        scratch = int(self.data[entry.slot, 0])
        for row, token in enumerate(entry.drafted):
            scratch = advanced(scratch, token)
            self.history[entry.slot, row] = token
            states.append(scratch)
        return states

    def _apply(self, slot: int, tokens: list[int]) -> int:
        state, count = (int(value) for value in self.data[slot])
        for token in tokens:
            state = advanced(state, token)
        self.data[slot] = state, count + len(tokens)
        return state

    def _forget(self, slot: int) -> None:
        if slot < self.sequences:
            self.history[slot] = _NO_TOKEN
