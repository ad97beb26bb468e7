"""What a step costs, by the rows it verifies: the curve that decides how long a draft pays.

Costs are in plain steps: 1 is a step of one row of one sequence at the same context. They decide which rows
are verified, so they change time and never a token. Knows no clock and no machine: who measures hands its
figures over as a Costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from quickdraft.types import MAX_ROWS

ROW_COST: Final = 0.4  # of ConstantCosts; measured, docs/experiments.md
CHAINED_SOURCES: Final = frozenset({"mtp"})  # that run once per drafted token; others once per block


@dataclass(frozen=True, slots=True)
class BatchCosts:
    """A step of several sequences, in any unit that is the same for all steps: `shared[n]` for n rows in all,
    `own[r]` per token of context for r rows of one sequence, `each` per sequence."""

    shared: Sequence[float]
    own: Sequence[float]
    each: float = 0.0
    measured: bool = True  # False: what sequences save by sharing a step is not known

    def of_rows(self, total: int) -> float:
        """`shared`, beyond its end along its last line."""
        last = len(self.shared) - 1
        if total <= last:
            return self.shared[total]
        return self.shared[last] + (total - last) * (self.shared[last] - self.shared[last - 1])


class Costs(Protocol):
    """What verifying and drafting cost here, in plain steps."""

    def step_costs(self, context: int) -> Sequence[float]:
        """By rows (1..64; what is at 0 is not used): a step that verifies so many rows of one sequence after
        `context` tokens, over one of one row there. Never less than 1, never falling."""

    def batch_costs(self) -> BatchCosts:
        """Of steps of several sequences."""

    def draft_cost(self, source: str) -> float:
        """One pass of the model that drafts for `source` (its longest block); 0 where none runs."""

    def block_costs(self, source: str) -> Sequence[tuple[int, float]]:
        """Of a model that drafts blocks of several lengths: (tokens, one pass) of each, both ascending; empty
        where nothing tells them apart."""

    def upkeep_cost(self, source: str) -> float:
        """Following the text with that model, per token, whether it drafts or not; 0 where not known."""


def drafting_cost(costs: Costs, source: str, count: int) -> float:
    """Plain steps that drafting `count` >= 1 tokens from `source` takes; of blocks the shortest that can."""
    if source in CHAINED_SOURCES:
        return costs.draft_cost(source) * count
    return next((one for most, one in costs.block_costs(source) if most >= count), costs.draft_cost(source))


@dataclass(frozen=True, slots=True)
class ConstantCosts:
    """Every further row costs the same at any context: for toys, tests and machines not measured."""

    row_cost: float = ROW_COST
    passes: Mapping[str, float] = field(default_factory=dict)  # draft source -> plain steps
    upkeep: Mapping[str, float] = field(default_factory=dict)  # the same, per token

    def step_costs(self, context: int) -> Sequence[float]:
        """See Costs."""
        return [1.0 + self.row_cost * (rows - 1) for rows in range(MAX_ROWS + 1)]

    def step_cost(self, rows: int, context: int) -> float:
        """Of so many rows."""
        return 1.0 + self.row_cost * (rows - 1)

    def batch_costs(self) -> BatchCosts:
        """See Costs; what sequences save by sharing a step is not known, and taken to be nothing."""
        rows = range(MAX_ROWS + 1)
        return BatchCosts(
            [self.row_cost * count for count in rows], [0.0 for _ in rows], 1.0 - self.row_cost, False
        )

    def draft_cost(self, source: str) -> float:
        """See Costs."""
        return self.passes.get(source, 0.0)

    def block_costs(self, source: str) -> Sequence[tuple[int, float]]:
        """See Costs."""
        return ()

    def upkeep_cost(self, source: str) -> float:
        """See Costs."""
        return self.upkeep.get(source, 0.0)
