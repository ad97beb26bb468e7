"""SlotKeeper: a slot of recurrent state for each sequence whose plan entry names none.

What a sequence computed last tells which of its pending rows were kept: its next entry starts behind
them. A sequence that starts at 0 starts from an empty state. Knows no scheduler and no prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from quickdraft.engine.plan import PlanEntry
from quickdraft.ops.interface import RecurrentCache


class SlotKeeper:
    """Slots by request id, the least recently used first."""

    def __init__(self, states: RecurrentCache) -> None:
        self._states = states
        self._last: dict[str, tuple[int, int]] = {}  # id -> (slot, position behind its certain rows)

    def place(self, entries: Sequence[PlanEntry]) -> list[tuple[int, int]]:
        """(slot, replay) of each entry of the next step."""
        placed = []
        busy = {entry.request_id for entry in entries}
        for entry in entries:
            slot, certain = self._last.pop(entry.request_id, (-1, 0))
            if entry.start == 0:
                slot, certain = slot if slot >= 0 else self._free(busy), 0
                self._states.clear(slot)
            assert slot >= 0, f"{entry.request_id} goes on at {entry.start}, but its state is gone"
            end = entry.start + len(entry.tokens) - len(entry.drafted)
            self._last[entry.request_id] = slot, end
            placed.append((slot, max(0, entry.start - certain)))
        return placed

    def _free(self, busy: set[str]) -> int:
        used = {slot for slot, _ in self._last.values()}
        unused = set(range(self._states.sequences)) - used
        if unused:
            return min(unused)
        oldest = next(name for name in self._last if name not in busy)
        return self._last.pop(oldest)[0]
