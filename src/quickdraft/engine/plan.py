"""StepPlan: what one step computes. Plain values, printable; `to_dict` is JSON.

Knows no request and no model: rows are tokens at positions of a sequence, T is data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quickdraft.speculate.choose import LogitsRow
from quickdraft.speculate.draft import LOOKUP


@dataclass(frozen=True, slots=True, eq=False)
class PlanEntry:
    """Rows of one sequence: `tokens` at positions start, start + 1, ...; logits of the last `wanted`.

    `block_table` is a view into the sequence's state, valid until the step is committed.
    """

    request_id: str
    tokens: tuple[int, ...]
    start: int
    wanted: int
    drafted: tuple[int, ...]  # the last len(drafted) tokens are a draft
    source: str
    block_table: NDArray[np.int32]
    slot: int = -1  # of its recurrent state; -1 for a model without recurrent layers
    replay: int = 0  # rows of the slot's history to apply before these
    extended: int = 0  # so many of the last drafted tokens are of `extended_source`, not of `source`
    best_only: bool = False  # of its rows only the argmax will be asked; what else is asked takes longer
    extended_source: str = LOOKUP
    noise: tuple[float, int] | None = (
        None  # (temperature, seed) its rows are drawn with, where nothing else is
    )

    def to_dict(self) -> dict[str, object]:
        """Every field as a JSON value."""
        return {
            "request_id": self.request_id,
            "tokens": list(self.tokens),
            "start": self.start,
            "wanted": self.wanted,
            "drafted": list(self.drafted),
            "source": self.source,
            "extended": self.extended,
            "extended_source": self.extended_source,
            "block_table": self.block_table.tolist(),
            "best_only": self.best_only,
            "noise": self.noise,
            "slot": self.slot,
            "replay": self.replay,
        }


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The entries of a step, verify blocks first."""

    entries: tuple[PlanEntry, ...]

    @property
    def rows(self) -> int:
        return sum(len(entry.tokens) for entry in self.entries)

    @property
    def best_only(self) -> bool:
        """Whether nobody will ask for more than the argmax of a row."""
        return all(entry.best_only or not entry.wanted for entry in self.entries)

    def to_dict(self) -> dict[str, object]:
        """The plan as a JSON value."""
        return {"rows": self.rows, "entries": [entry.to_dict() for entry in self.entries]}


class Runner(Protocol):
    """Whatever computes logits: the model, or a toy in tests."""

    def run(self, plan: StepPlan) -> Sequence[Sequence[LogitsRow]]:
        """One list per entry, `wanted` rows each; rows are valid until the next run."""
