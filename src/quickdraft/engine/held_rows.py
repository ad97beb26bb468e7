"""HeldRows: what a drafter reads of the target's rows, kept until its own rows are made from it.

A drafter needs rows of its own of every token that was kept, but only once it drafts, or once somebody else
may go on from these blocks; and many rows take hardly longer than one. So rows wait per request, at most
HELD_ROWS before they are due. Knows no model and no request beyond its id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from quickdraft.ops.interface import BLOCK_TOKENS, Rows

HELD_ROWS: Final = BLOCK_TOKENS

Join = Callable[[list[Rows]], Rows]


@dataclass(slots=True)
class Held:
    """Rows [n, width] of committed positions start .. end - 1."""

    start: int
    end: int
    parts: list[Rows] = field(default_factory=list)

    @property
    def due(self) -> bool:
        """Whether more should not wait."""
        return self.end - self.start >= HELD_ROWS

    def rows(self, join: Join) -> Rows:
        """All of them, [end - start, width]; `join` puts several behind one another (Ops.join)."""
        return self.parts[0] if len(self.parts) == 1 else join(self.parts)


class HeldRows:
    """Of all requests, but for those that are left behind."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self._left: set[str] = set()

    def ends_at(self, request_id: str, position: int) -> bool:
        """Whether rows up to this position wait."""
        held = self._held.get(request_id)
        return held is not None and held.end == position

    def add(self, request_id: str, start: int, rows: Rows) -> Held:
        """Rows from `start` on, which are kept: give a copy of what will change. They join those that end
        there; others, of a text that was given up, are dropped."""
        held = self._held.get(request_id)
        if held is None or held.end != start:
            held = self._held[request_id] = Held(start, start)
        held.parts.append(rows)
        held.end += len(rows)
        return held

    def take(self, request_id: str, committed: int) -> Held | None:
        """All that wait, no longer held; None where there are none up to the committed tokens."""
        held = self._held.pop(request_id, None)
        return held if held is not None and held.end == committed else None

    def fork(self, source: str, request_id: str) -> None:
        """What waits of `source` waits of `request_id` too."""
        held = self._held.get(source)
        if held is not None:
            self._held[request_id] = Held(held.start, held.end, list(held.parts))

    def follow(self, request_id: str, followed: bool) -> None:
        """Whether rows of the request are to be held from here on; else what waits is dropped."""
        if followed:
            self._left.discard(request_id)
        else:
            self._left.add(request_id)
            self._held.pop(request_id, None)

    def follows(self, request_id: str) -> bool:
        """Whether they are."""
        return request_id not in self._left

    def drop(self, request_id: str) -> None:
        """Drop what waits; unknown ids are fine."""
        self._held.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._held.pop(request_id, None)
        self._left.discard(request_id)
