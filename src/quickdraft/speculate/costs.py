"""What a step costs, as the drafting rule sees it; a plain step, of one row, costs 1.

Knows no clock and no machine: who measures hands its figures over as a Costs.
"""

from __future__ import annotations

from typing import Final, Protocol

ROW_COST: Final = 0.4  # a further row of a verify block, in plain steps (measured: docs/experiments.md)
DRAFT_COST: Final = 0.2  # a run of a model that drafts


class Costs(Protocol):
    """Costs in plain steps; they decide the length of drafts, never their tokens."""

    def step_cost(self, rows: int) -> float:
        """Of a step that verifies `rows` >= 1 rows of a sequence; grows with them."""

    def draft_cost(self, source: str) -> float:
        """Of one draft by a model, of whatever length; 0 for a source that computes nothing."""


class ConstantCosts:
    """Every further row costs the same, and so does every draft of a model."""

    def step_cost(self, rows: int) -> float:
        return 1.0 + ROW_COST * (rows - 1)

    def draft_cost(self, source: str) -> float:
        return 0.0 if source == "lookup" else DRAFT_COST
