"""Choices: what the host asks of logits on the card, the rows of a step together: two starts and one copy.

Numbers that already lie on the host, as candidates of a drafter, are compared there. Kernels are in
choose.py; knows no request and no step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from quickdraft.ops.cuda import choose
from quickdraft.ops.cuda.batch import ALIGNED, Staging
from quickdraft.ops.cuda.buffers import CardRows, to_tensor
from quickdraft.ops.cuda.launch import Launcher, ceil_divide
from quickdraft.ops.interface import MAX_TOP_ROWS, Noise
from quickdraft.ops.reference import gumbel
from quickdraft.ops.reference import rows as host_rows

HOST_CHOICES: Final = 4096  # numbers on the host, at most, that are drawn from there rather than copied
DRAW: Final = 3  # int64 of a row: the temperature's bits, seed, position
LEAST_DRAWS: Final = 64  # rows there is room for

Top = tuple[NDArray[np.int64], NDArray[np.float32]]


class Choices:
    """Of one backend; `workspace(name, count, type)` gives memory."""

    def __init__(
        self, launcher: Launcher, device: torch.device, workspace: Callable[..., torch.Tensor]
    ) -> None:
        self._launcher, self._device, self._workspace = launcher, device, workspace
        self._draws = Draws(LEAST_DRAWS, device)

    def top(self, row: Any, k: int) -> Top:
        """See Ops.top."""
        if not isinstance(row, CardRows):
            return host_rows.top(np.asarray(row), k)
        if k > MAX_TOP_ROWS:
            return top_sorted(row.tensor, k)
        ids, values = self.top_of_rows(row.tensor[None], 1, k)
        there = ids[0] >= 0
        return ids[0][there].astype(np.int64), values[0][there]

    def top_of_rows(
        self, x: torch.Tensor, rows: int, k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """See Ops.top_together."""
        count = ceil_divide(rows * k, ALIGNED) * ALIGNED
        found = self._workspace("top", 2 * count, torch.int32)
        values = found[count:].view(torch.float32)
        choose.start_top_rows(self._launcher, rows, x, k, found, values, self._workspace)
        numbers: NDArray[np.int32] = np.array(found.cpu().numpy()).reshape(2, count)[:, : rows * k]
        ids, bits = numbers.reshape(2, rows, k)
        return ids, bits.view(np.float32)

    def gumbel(self, row: Any, noise: Noise, ids: Sequence[int] | NDArray[np.int64] | None) -> int:
        """See Ops.gumbel_choice."""
        if isinstance(row, CardRows):
            values = row.tensor
        elif len(row) > HOST_CHOICES:
            values = to_tensor(np.asarray(row, np.float32), self._device)
        else:
            return gumbel.choice(np.asarray(row), noise.temperature, noise.seed, noise.position, ids)
        names = None if ids is None else to_tensor(np.asarray(ids, np.int64), self._device)
        return int(self.gumbel_rows(values, None, [noise], names)[0, 1])

    def gumbel_rows(
        self, x: torch.Tensor, best: torch.Tensor | None, noises: Sequence[Noise | None],
        names: torch.Tensor | None = None,
    ) -> NDArray[np.int64]:  # fmt: skip
        """See Ops.gumbel_rows; without `best` -1 takes its place. `names`: the ids of the columns of x."""
        count = len(noises)
        if self._draws.rows < count:
            self._draws = Draws(count, self._device)
        draws, chosen = self._draws.set(noises), self._workspace("chosen", 2 * count, torch.int64)
        inputs = x, names, draws, best, chosen, self._workspace
        choose.start_gumbel_rows(self._launcher, count, *inputs)
        found: NDArray[np.int64] = np.array(chosen.cpu().numpy()).reshape(count, 2)
        return found


class Draws:
    """What up to `rows` rows are drawn with, on its way to the card."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows, self._staging = rows, Staging(2 * DRAW * rows, device)
        self._packed = torch.zeros(2 * DRAW * rows, dtype=torch.int32, device=device)

    def set(self, noises: Sequence[Noise | None]) -> torch.Tensor:
        """int64 [rows, DRAW] of gumbel_of_piece."""
        self._staging.free()
        numbers = self._staging.numbers.view(np.int64).reshape(-1, DRAW)
        for row, noise in zip(numbers, noises, strict=False):
            row[:] = 0
            if noise is not None:
                row[0] = np.float64(noise.temperature).view(np.int64)
                row[1:] = np.array([noise.seed & (2**64 - 1), noise.position], np.uint64).view(np.int64)
        self._staging.send(self._packed, 2 * DRAW * len(noises))
        return self._packed.view(torch.int64).view(-1, DRAW)


def top_sorted(row: torch.Tensor, k: int) -> Top:
    """See Ops.top, for a k that is too large to be found one by one: by keys as in keys_of, of which no two
    are equal; only the k best cross to the host, which reads ids and values from them."""
    lowest = choose.LOWEST_KEY.value
    values = torch.where(row == 0.0, 0.0, row)
    bits = values.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    names = torch.arange(len(row), dtype=torch.int64, device=row.device)
    keys = torch.where(row.isnan(), lowest, ordered * 2**32 + (2**32 - 1 - names))
    best: NDArray[np.int64] = torch.topk(keys, min(k, len(row))).values.cpu().numpy()
    best = best[best != lowest]
    high = (best >> 32).astype(np.int32)
    found: NDArray[np.float32] = np.where(high < 0, high ^ 0x7FFFFFFF, high).astype(np.int32).view(np.float32)
    return 2**32 - 1 - (best & (2**32 - 1)), found
