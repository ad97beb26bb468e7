"""linear and embed: the formulas of ops/interface.py, group by group in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.interface import activation_group
from quickdraft.ops.weights import Blocks, Dense, Stacked, Weight


def quantise(x: NDArray[np.float32], group: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """int8 activations: codes int32 [T, I] in -127..127 and scales float32 [T, I / group]."""
    rows, inputs = x.shape
    groups = x.reshape(rows, inputs // group, group)
    scales = (np.abs(groups).max(axis=2) / np.float32(127)).astype(np.float32)
    safe = np.where(scales == 0, np.float32(1), scales)
    codes = np.clip(np.rint(groups / safe[:, :, None]), -127, 127)
    codes = np.where(scales[:, :, None] == 0, 0, codes).astype(np.int32)
    return codes.reshape(rows, inputs), scales


def linear(x: NDArray[np.float32], weight: Weight | Stacked, sixteen: Any = None) -> NDArray[np.float32]:
    """x [T, I] times weight [N, I] transposed -> float32 [T, N], without bias. `sixteen`, a numpy type:
    activations are rounded to it for quantised weights, to the type of a dense weight's values for those."""
    if isinstance(weight, Stacked):
        return np.concatenate([linear(x, part, sixteen) for part in weight.parts], axis=1)
    if isinstance(weight, Blocks):
        return linear(x, weight.value(), sixteen)
    if isinstance(weight, Dense) or sixteen is not None:
        if sixteen is not None:
            x = x.astype(weight.values.dtype if isinstance(weight, Dense) else sixteen)
        return (x.astype(np.float64) @ weight.dequantised().astype(np.float64).T).astype(np.float32)
    group = activation_group(weight)
    values = weight.dequantised().astype(np.float64)
    if weight.order is not None:
        x, values = x[:, weight.order], values[:, weight.order]
    codes, scales = quantise(x, group)
    per_input = np.repeat(scales, group, axis=1).astype(np.float64)
    return ((codes * per_input) @ values.T).astype(np.float32)


def embed(tokens: NDArray[np.int32], table: Weight) -> NDArray[np.float32]:
    """Dequantised rows of table [V, C] -> float32 [T, C]."""
    return table.dequantised()[tokens]
