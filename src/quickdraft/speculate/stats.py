"""What drafts were worth: counts per source, of one request (its Timings) and of the whole process.

`record` is the one place that counts, so a request's numbers and the global ones cannot drift
apart. Acceptance over the recent window shows a collapse that the lifetime average would hide.
Readers in other threads see plain integers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from quickdraft.speculate.draft import LOOKUP, Verdict
from quickdraft.types import Timings

WINDOW_DRAFTS: Final = 256  # how many of a source's latest drafts "recent" means


@dataclass(slots=True)
class SourceStats:
    """Counts of one draft source: drafts verified, their tokens, and those of them emitted."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    recent_drafted: int = 0
    recent_accepted: int = 0
    _window: deque[tuple[int, int]] = field(default_factory=deque)

    def record(self, drafted: int, accepted: int) -> None:
        """Count one verified draft."""
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        self.recent_drafted += drafted
        self.recent_accepted += accepted
        self._window.append((drafted, accepted))
        if len(self._window) > WINDOW_DRAFTS:
            old_drafted, old_accepted = self._window.popleft()
            self.recent_drafted -= old_drafted
            self.recent_accepted -= old_accepted

    @property
    def recent_acceptance(self) -> float | None:
        """Share of drafted tokens emitted, over the window; None before the first draft."""
        return self.recent_accepted / self.recent_drafted if self.recent_drafted else None


@dataclass(slots=True)
class SpeculationStats:
    """Counts over every request since start: steps that emitted, rows verified, tokens emitted.

    `accepted_per_position[i]` counts drafts whose token i was accepted.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    sources: dict[str, SourceStats] = field(default_factory=dict)
    accepted_per_position: list[int] = field(default_factory=list)

    def record(
        self,
        timings: Timings,
        source: str,
        verdict: Verdict,
        extended: int = 0,
        extended_source: str = LOOKUP,
    ) -> None:
        """Count one verify block, here and in the request's own timings; the last `extended` drafted tokens
        count for `extended_source`, those before them for `source`.

        A block that emitted nothing (its first row failed) is no step and no drafted token.
        """
        emitted = len(verdict.tokens)
        if not emitted:
            return
        self.steps += 1
        self.rows += 1 + verdict.drafted
        self.tokens += emitted
        timings.steps += 1
        timings.rows += 1 + verdict.drafted
        timings.completion_tokens += emitted
        if verdict.drafted:
            accepted = verdict.accepted
            own = verdict.drafted - extended
            self._count(timings, source, own, min(accepted, own))
            self._count(timings, extended_source, extended, max(0, accepted - own))
            missing = accepted - len(self.accepted_per_position)
            self.accepted_per_position += [0] * missing
            for position in range(accepted):
                self.accepted_per_position[position] += 1

    def _count(self, timings: Timings, source: str, drafted: int, accepted: int) -> None:
        if drafted:
            timings.drafted[source] = timings.drafted.get(source, 0) + drafted
            timings.accepted[source] = timings.accepted.get(source, 0) + accepted
            self.sources.setdefault(source, SourceStats()).record(drafted, accepted)

    def to_dict(self) -> dict[str, object]:
        """The counts as a JSON value."""
        return {
            "steps": self.steps,
            "rows": self.rows,
            "tokens": self.tokens,
            "sources": {
                name: {
                    "drafts": one.drafts,
                    "drafted": one.drafted,
                    "accepted": one.accepted,
                    "recent_acceptance": one.recent_acceptance,
                }
                for name, one in self.sources.items()
            },
        }
