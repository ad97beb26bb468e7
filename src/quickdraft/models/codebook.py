"""Codebook: rows of a table by number, kept as compactly as the file has them.

A selector's tables have a row per token, and a draft reads some tens of them, so they are not expanded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import ModelFormatError


@dataclass(frozen=True, slots=True)
class Codebook:
    """[N, R] in float32, float16 or bfloat16; or int8 codes whose row n is times scales[n] (float16 [N])."""

    codes: NDArray[Any]
    scales: NDArray[np.float16] | None = None

    def __post_init__(self) -> None:
        if (self.codes.dtype == np.int8) != (self.scales is not None):
            raise ModelFormatError("a codebook whose scales and type do not fit", got=self.codes.dtype)

    def __len__(self) -> int:
        return len(self.codes)

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """float32 [len(numbers), R], the exact values of the file."""
        values: NDArray[np.float32] = self.codes[numbers].astype(np.float32)
        if self.scales is not None:
            values *= self.scales[numbers].astype(np.float32)[:, None]
        return values
