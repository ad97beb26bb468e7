"""rms_norm, head_norm, swiglu, argmax and top in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def rms_norm(x: NDArray[np.float32], weight: NDArray[np.float32], eps: float) -> NDArray[np.float32]:
    """x [T, C] / sqrt(mean(x^2) + eps) * weight [C]."""
    wide = x.astype(np.float64)
    scale = 1.0 / np.sqrt(np.mean(wide * wide, axis=1, keepdims=True) + eps)
    result: NDArray[np.float32] = (wide * scale * weight).astype(np.float32)
    return result


def head_norm(
    x: NDArray[np.float32],
    first_head: int,
    heads: int,
    head_dim: int,
    weight: NDArray[np.float32],
    eps: float,
) -> None:
    """rms_norm of heads first_head .. first_head + heads - 1 of x [T, width], each by itself, in place."""
    for head in range(first_head, first_head + heads):
        part = slice(head * head_dim, (head + 1) * head_dim)
        x[:, part] = rms_norm(x[:, part], weight, eps)


def swiglu(gate_up: NDArray[np.float32]) -> NDArray[np.float32]:
    """[T, 2F] -> silu(first half) * second half, [T, F]."""
    half = gate_up.shape[1] // 2
    gate = gate_up[:, :half].astype(np.float64)
    with np.errstate(over="ignore"):
        return (gate / (1.0 + np.exp(-gate)) * gate_up[:, half:]).astype(np.float32)


def argmax(x: NDArray[np.float32]) -> NDArray[np.int32]:
    """Lowest index of the largest value per row [T]; -1 for a row with any NaN."""
    ids = np.where(np.isnan(x), -np.inf, x).argmax(axis=1).astype(np.int32)
    return np.where(np.isnan(x).any(axis=1), np.int32(-1), ids)


def top(row: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The k largest of row [V], best first, ties by lowest id; NaN is never selected."""
    order = np.lexsort((np.arange(len(row)), -row))
    order = order[~np.isnan(row[order])][:k]
    return order.astype(np.int64), row[order]


def top_rows(x: NDArray[np.float32], k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The k largest of each row of x [T, N], as `top` finds them: ids and values [T, k]; -1 and -inf where a
    row has fewer."""
    ids = np.full((len(x), k), -1, np.int32)
    values = np.full((len(x), k), -np.inf, np.float32)
    for row, (numbers, best) in enumerate(top(line, k) for line in x):
        ids[row, : len(numbers)], values[row, : len(numbers)] = numbers, best
    return ids, values


def grouped_conv(
    x: NDArray[np.float32],
    base: NDArray[np.float32],
    deltas: NDArray[np.float32],
    row_starts: NDArray[np.int32],
) -> NDArray[np.float32]:
    """x [T, C], base [2, C], deltas [T, 2 G] (tap, group); x[t - 1] is 0 for the first row of a sequence."""
    groups = deltas.shape[1] // 2
    wide = np.repeat(deltas.reshape(len(x), 2, groups), x.shape[1] // groups, axis=2)
    kernel = base[None].astype(np.float64) + wide
    before = np.concatenate([np.zeros_like(x[:1]), x[:-1]])
    before[row_starts[:-1]] = 0
    result: NDArray[np.float32] = (kernel[:, 0] * x + kernel[:, 1] * before).astype(np.float32)
    return result
