"""Q4_K, Q5_K and Q6_K from float32, which the gguf package only decodes: rounding to the nearest code.

Plain on purpose, and written from ggml's block layouts, not from the decoder under test.
"""

from __future__ import annotations

import gguf
import numpy as np
from numpy.typing import NDArray

K_TYPES = ("Q4_K", "Q5_K", "Q6_K")


def quantised(values: NDArray[np.float32], type_name: str) -> NDArray[np.uint8]:
    """float32 [N, K] -> bytes [N, bytes per row] of any type that is written by tests."""
    kind = gguf.GGMLQuantizationType[type_name]
    if type_name not in K_TYPES:
        packed: NDArray[np.uint8] = gguf.quants.quantize(values, kind)
        return packed
    blocks = values.astype(np.float64).reshape(-1, 256)
    rows = _six_bits(blocks) if type_name == "Q6_K" else _with_minimums(blocks, type_name == "Q5_K")
    return rows.reshape(len(values), -1)


def _two_level(
    numbers: NDArray[np.float64], largest_step: int
) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """[B, G] positive numbers -> a half per block and steps whose products come near them."""
    halves = (numbers.max(axis=1, keepdims=True) / largest_step).astype(np.float16)
    steps = np.rint(numbers / np.maximum(halves.astype(np.float64), 1e-12)).clip(0, largest_step)
    return halves, steps.astype(np.uint8)


def _with_minimums(blocks: NDArray[np.float64], five_bits: bool) -> NDArray[np.uint8]:
    groups, largest = blocks.reshape(-1, 8, 32), 31 if five_bits else 15
    lowest = np.minimum(groups.min(axis=2), 0)
    d, scales = _two_level((groups.max(axis=2) - lowest) / largest, 63)
    dmin, minimums = _two_level(-lowest, 63)
    step = np.maximum(d.astype(np.float64) * scales, 1e-12)[:, :, None]
    codes = (groups + (dmin.astype(np.float64) * minimums)[:, :, None]) / step
    codes = np.rint(codes).clip(0, largest).astype(np.uint8)
    packed = np.empty((len(blocks), 12), np.uint8)
    packed[:, 0:4] = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    packed[:, 4:8] = minimums[:, :4] | (minimums[:, 4:] >> 4) << 6
    packed[:, 8:12] = scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4
    low = (codes[:, 0::2] & 15 | (codes[:, 1::2] & 15) << 4).reshape(-1, 128)
    high = [np.packbits(codes >> 4, axis=1, bitorder="little").reshape(-1, 32)] if five_bits else []
    return np.concatenate([d.view(np.uint8), dmin.view(np.uint8), packed, *high, low], axis=1)


def _six_bits(blocks: NDArray[np.float64]) -> NDArray[np.uint8]:
    groups = blocks.reshape(-1, 16, 16)
    d, scales = _two_level(np.abs(groups).max(axis=2) / 31, 127)
    codes = groups / np.maximum(d.astype(np.float64) * scales, 1e-12)[:, :, None]
    codes = (np.rint(codes).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4
    high = sum(((codes[:, :, quarter] >> 4) << 2 * quarter for quarter in range(4)), np.uint8(0))
    return np.concatenate([low.reshape(-1, 128), high.reshape(-1, 64), scales, d.view(np.uint8)], axis=1)
