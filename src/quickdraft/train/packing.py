"""Quantising what is exported: linears to symmetric int8 or int4 in groups of 32 inputs, as
compressed-tensors packs them, and tables of the selector to int8 rows. Both read back as scale * code.
Knows arrays only.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import UnsupportedError

Array = NDArray[Any]
GROUP: Final = 32  # of activations too, so a coarser one would be no faster
_TRIED: Final = np.linspace(0.80, 1.10, 31)  # of the extreme value, as the end of the 4-bit codes


def quantised_linear(weight: Array, bits: int) -> dict[str, Array]:
    """[O, I] -> weight_packed, weight_scale (F16 [O, I / 32]) and weight_shape. UnsupportedError where the
    inputs are no multiple of 32."""
    outputs, inputs = weight.shape
    if inputs % GROUP:
        raise UnsupportedError(
            f"a linear of {inputs} inputs in {bits} bits", expected=f"a multiple of {GROUP}", hint="--bits 16"
        )
    values = weight.astype(np.float32).reshape(outputs, -1, GROUP)
    scales = _scales8(values) if bits == 8 else _scales4(values)
    codes = _codes(values, scales, bits) + (1 << bits - 1)
    bytes_of: Array = codes.astype(np.uint8).reshape(outputs, inputs)
    if bits == 4:
        bytes_of = bytes_of[:, ::2] | bytes_of[:, 1::2] << 4
    return {
        "weight_packed": np.ascontiguousarray(bytes_of).view("<i4"),
        "weight_scale": scales,
        "weight_shape": np.array([outputs, inputs], np.int64),
    }


def quantised_rows(table: Array) -> tuple[Array, Array]:
    """[N, R] -> int8 codes and F16 scales [N]."""
    values = table.astype(np.float32)
    scales = (np.abs(values).max(1) / 127).astype(np.float16)
    return _codes(values, scales, 8, -127).astype(np.int8), scales


def _codes(values: Array, scales: Array, bits: int, low: int | None = None) -> Array:
    """Nearest codes of values [..., n] by scales [...]; 0 where the scale is."""
    steps = scales.astype(np.float32)[..., None]
    ratio = np.divide(values, steps, out=np.zeros_like(values), where=steps != 0)
    top = 1 << bits - 1
    nearest: Array = np.rint(ratio).clip(-top if low is None else low, top - 1)
    return nearest.astype(np.int16)


def _scales8(values: Array) -> Array:
    scales: Array = np.abs(values).max(-1) / 127
    return scales.astype(np.float16)


def _scales4(values: Array) -> Array:
    """The scale of least squared error among some at which the group's extreme value meets code -8."""
    at = np.abs(values).argmax(-1)[..., None]
    extreme = np.take_along_axis(values, at, -1)[..., 0]
    best = np.full(extreme.shape, np.inf, np.float32)
    chosen = np.zeros(extreme.shape, np.float16)
    for factor in _TRIED:
        scales = (extreme * np.float32(factor / -8)).astype(np.float16)
        read = _codes(values, scales, 4) * scales.astype(np.float32)[..., None]
        error = ((read - values) ** 2).sum(-1)
        better = error < best
        best, chosen = np.where(better, error, best), np.where(better, scales, chosen)
    return chosen
