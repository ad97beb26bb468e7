"""What a step costs, by the rows it verifies: the curve that decides how long a draft pays.

Costs are in plain steps: 1 is a step of one row of one sequence at the same context. They decide which rows
are verified, so they change time and never a token. Knows no clock and no machine: who measures hands its
figures over as a Costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

ROW_COST: Final = 0.4  # of ConstantCosts; measured, docs/experiments.md
CHAINED_SOURCES: Final = frozenset({"mtp"})  # that run once per drafted token; others once per block


class Costs(Protocol):
    """What verifying and drafting cost here, in plain steps."""

    def step_cost(self, rows: int, context: int) -> float:
        """A step that verifies `rows` (1..64) rows of one sequence after `context` tokens, over one of one
        row there. Never less than 1, never less than with fewer rows."""

    def draft_cost(self, source: str) -> float:
        """One pass of the model that drafts for `source`; 0 for a source that runs none."""


def drafting_cost(costs: Costs, source: str, count: int) -> float:
    """Plain steps that drafting `count` >= 1 tokens from `source` takes."""
    return costs.draft_cost(source) * (count if source in CHAINED_SOURCES else 1)


@dataclass(frozen=True, slots=True)
class ConstantCosts:
    """Every further row costs the same at any context: for toys, tests and machines not measured."""

    row_cost: float = ROW_COST
    passes: Mapping[str, float] = field(default_factory=dict)  # draft source -> plain steps

    def step_cost(self, rows: int, context: int) -> float:
        """See Costs."""
        return 1.0 + self.row_cost * (rows - 1)

    def draft_cost(self, source: str) -> float:
        """See Costs."""
        return self.passes.get(source, 0.0)
