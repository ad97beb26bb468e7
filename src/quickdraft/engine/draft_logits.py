"""DraftLogits: a row of a drafter's logits over the ids of a draft vocabulary, as choose reads it.

A chooser sees these ids and no others: what is not among them has no logit (-inf).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.interface import Ops, Rows
from quickdraft.speculate.choose import LogitsRow


def margin(row: LogitsRow, token: int) -> float:
    """How clearly a model prefers what it drafts: how far the best logit is from the second, and as much less
    than nothing where processors or noise chose another token than the best."""
    ids, values = row.top(2)
    if len(ids) < 2:
        return 0.0
    lead = float(values[0] - values[1])
    return lead if ids[0] == token else -lead


class DraftLogits:
    """speculate.choose.LogitsRow over `logits` [n] of `ids` [n], which increase, of a vocabulary of `size`
    tokens; `best` is their argmax, -1 where there is a NaN."""

    __slots__ = ("_best", "_ids", "_logits", "_ops", "_size")

    def __init__(self, ops: Ops, ids: NDArray[np.int64], size: int, logits: Rows, best: int) -> None:
        self._ops, self._ids, self._size, self._logits, self._best = ops, ids, size, logits, best

    def argmax(self) -> int:
        return int(self._ids[self._best]) if self._best >= 0 else -1

    def top(self, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """At most as many as there are ids; the ids increase, so ties stay with the lowest."""
        places, values = self._ops.top(self._logits, min(k, len(self._ids)))
        return self._ids[places], values

    def full(self) -> NDArray[np.float32]:
        row = np.full(self._size, -np.inf, np.float32)
        row[self._ids] = self._logits
        row.flags.writeable = False
        return row

    def gumbel(
        self,
        temperature: float,
        seed: int,
        position: int,
        values: NDArray[np.float32] | None = None,
        ids: NDArray[np.int64] | None = None,
    ) -> int:
        if values is None:
            values, ids = self._logits, self._ids
        return self._ops.gumbel_choice(values, temperature, seed, position, ids)
