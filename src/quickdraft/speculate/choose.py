"""choose: one token from one row of logits, under one request's sampling parameters."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class LogitsRow(Protocol):
    """One row of logits [V], read lazily: a greedy request never touches the whole row."""

    def argmax(self) -> int:
        """Lowest id of the largest logit; -1 when the row holds NaN."""

    def top(self, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The k best (ids, logits), best first, ties by lowest id."""

    def full(self) -> NDArray[np.float32]:
        """The whole row, read-only; valid until the next step."""

    def gumbel(
        self, temperature: float, seed: int, position: int,
        values: NDArray[np.float32] | None = None, ids: NDArray[np.int64] | None = None,
    ) -> int:
        """Ops.gumbel_choice over `values` (processed logits, or survivors named by `ids`), or over
        this row as it stands."""
