"""Weight formats as values: what a tensor *is*, before a backend packs it for its kernels.

A value holds exactly what the file holds (scales are not rounded, codes are not changed); the
value of element [n, k] is stated in each class. Packing is the backend's business (`Ops.pack`).
N outputs, K inputs, G = K / group_size groups along K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import ModelFormatError


@dataclass(frozen=True, slots=True)
class Dense:
    """[N, K] in float32, float16 or bfloat16 (ml_dtypes.bfloat16)."""

    values: NDArray[Any]

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def dequantised(self) -> NDArray[np.float32]:
        """float32 [N, K], exactly the values the linear uses."""
        return self.values.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Int8Groups:
    """value[n, k] = scales[n, k // group_size] * codes[n, k]; codes int8 in -128..127."""

    codes: NDArray[np.int8]  # [N, K]
    scales: NDArray[np.float16]  # [N, G]
    group_size: int = 32

    def __post_init__(self) -> None:
        _check_groups(self.codes, self.scales, None, self.group_size)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantised(self) -> NDArray[np.float32]:
        """float32 [N, K]."""
        scales = np.repeat(self.scales.astype(np.float32), self.group_size, axis=1)
        return scales * self.codes.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """Codes 0..15. With `minimums`: value = scale * code + minimum. Without: scale * (code - 8)."""

    codes: NDArray[np.uint8]  # [N, K], one code per byte
    scales: NDArray[np.float16]  # [N, G]
    minimums: NDArray[np.float16] | None = None  # [N, G]
    group_size: int = 32

    def __post_init__(self) -> None:
        _check_groups(self.codes, self.scales, self.minimums, self.group_size)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantised(self) -> NDArray[np.float32]:
        """float32 [N, K]."""
        scales = np.repeat(self.scales.astype(np.float32), self.group_size, axis=1)
        codes = self.codes.astype(np.float32)
        if self.minimums is None:
            return scales * (codes - np.float32(8))
        return scales * codes + np.repeat(self.minimums.astype(np.float32), self.group_size, axis=1)


Weight = Dense | Int8Groups | Int4Groups


def concat_rows(parts: list[Weight]) -> Weight | None:
    """One weight whose outputs are the parts' outputs in order; None when formats differ."""
    first = parts[0]
    if isinstance(first, Dense):
        dense = [p for p in parts if isinstance(p, Dense) and p.values.dtype == first.values.dtype]
        if len(dense) == len(parts):
            return Dense(np.concatenate([p.values for p in dense]))
    elif isinstance(first, Int8Groups):
        eight = [p for p in parts if isinstance(p, Int8Groups) and p.group_size == first.group_size]
        if len(eight) == len(parts):
            codes, scales = zip(*((p.codes, p.scales) for p in eight), strict=True)
            return Int8Groups(np.concatenate(codes), np.concatenate(scales), first.group_size)
    else:
        four = [
            p
            for p in parts
            if isinstance(p, Int4Groups)
            and p.group_size == first.group_size
            and (p.minimums is None) == (first.minimums is None)
        ]
        if len(four) == len(parts):
            minimums = [p.minimums for p in four if p.minimums is not None]
            return Int4Groups(
                np.concatenate([p.codes for p in four]),
                np.concatenate([p.scales for p in four]),
                np.concatenate(minimums) if minimums else None,
                first.group_size,
            )
    return None


def _check_groups(
    codes: NDArray[Any], scales: NDArray[Any], minimums: NDArray[Any] | None, group_size: int
) -> None:
    outputs, inputs = codes.shape
    expected = (outputs, inputs // group_size)
    if inputs % group_size or scales.shape != expected:
        raise ModelFormatError(
            "quantised weight with wrong scales",
            got=f"codes {codes.shape}, scales {scales.shape}, group size {group_size}",
            expected=f"scales {expected} and a multiple of the group size",
        )
    if minimums is not None and minimums.shape != expected:
        raise ModelFormatError("quantised weight with wrong minimums", got=minimums.shape, expected=expected)
