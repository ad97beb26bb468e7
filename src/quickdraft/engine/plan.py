"""StepPlan: what one step computes. Plain values, printable and JSON-able."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quickdraft.speculate.choose import LogitsRow


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """Rows of one sequence: `tokens` at positions start, start + 1, ...; logits of the last `wanted`."""

    request_id: str
    tokens: tuple[int, ...]
    start: int
    wanted: int
    drafted: tuple[int, ...]  # the last len(drafted) tokens are a draft
    source: str
    block_table: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The entries of a step, verify blocks first."""

    entries: tuple[PlanEntry, ...]

    @property
    def rows(self) -> int:
        return sum(len(entry.tokens) for entry in self.entries)


class Runner(Protocol):
    """Whatever computes logits: the model, or a toy in tests."""

    def run(self, plan: StepPlan) -> Sequence[Sequence[LogitsRow]]:
        """One list per entry, `wanted` rows each; rows are valid until the next run."""
