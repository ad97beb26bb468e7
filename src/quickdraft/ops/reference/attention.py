"""kv_write, attention and rope in numpy; attention by spans, merged in ascending order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.interface import BLOCK_TOKENS, SPAN_TOKENS, RopeStyle

Float64 = NDArray[np.float64]


def rope(
    x: NDArray[np.float32],
    positions: NDArray[np.int32],
    heads: int,
    head_dim: int,
    table: NDArray[np.float32],
    style: RopeStyle,
) -> None:
    """Rotate the first `heads` heads of x [T, width] in place; table [positions, rotary_dim]."""
    half = table.shape[1] // 2
    cos = table[positions, None, :half].astype(np.float64)
    sin = table[positions, None, half:].astype(np.float64)
    view = x[:, : heads * head_dim].reshape(len(x), heads, head_dim)
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if style == "interleaved"
        else (slice(0, half), slice(half, 2 * half))
    )
    a, b = view[:, :, first].astype(np.float64), view[:, :, second].astype(np.float64)
    view[:, :, first], view[:, :, second] = a * cos - b * sin, b * cos + a * sin
    x[:, : heads * head_dim] = view.reshape(len(x), heads * head_dim)


def kv_write(
    qkv: NDArray[np.float32],
    query_heads: int,
    keys: NDArray[Any],
    values: NDArray[Any],
    positions: NDArray[np.int32],
    row_starts: NDArray[np.int32],
    block_tables: NDArray[np.int32],
) -> None:
    """Store K and V of each row; keys [blocks, K, D, 16], values [blocks, K, 16, D] of one layer."""
    _, kv_heads, head_dim, _ = keys.shape
    first_key = query_heads * head_dim
    k = qkv[:, first_key : first_key + kv_heads * head_dim].reshape(-1, kv_heads, head_dim)
    v = qkv[:, first_key + kv_heads * head_dim :].reshape(-1, kv_heads, head_dim)
    for sequence in range(len(row_starts) - 1):
        for row in range(row_starts[sequence], row_starts[sequence + 1]):
            block = block_tables[sequence, positions[row] // BLOCK_TOKENS]
            slot = positions[row] % BLOCK_TOKENS
            with np.errstate(over="ignore"):
                keys[block, :, :, slot] = k[row].astype(keys.dtype)
                values[block, :, slot, :] = v[row].astype(values.dtype)


def attention(
    qkv: NDArray[np.float32],
    query_heads: int,
    keys: NDArray[Any],
    values: NDArray[Any],
    positions: NDArray[np.int32],
    row_starts: NDArray[np.int32],
    block_tables: NDArray[np.int32],
    seen_from: NDArray[np.int32],
    scale: float,
) -> NDArray[np.float32]:
    """float32 [T, H * D]; reads only positions seen_from..p of each row's own sequence."""
    _, kv_heads, head_dim, _ = keys.shape
    group = query_heads // kv_heads
    out = np.empty((len(qkv), query_heads, head_dim), np.float32)
    queries = qkv[:, : query_heads * head_dim].reshape(-1, query_heads, head_dim)
    for sequence in range(len(row_starts) - 1):
        for row in range(row_starts[sequence], row_starts[sequence + 1]):
            length = int(positions[row]) + 1
            used = block_tables[sequence, : -(-length // BLOCK_TOKENS)]
            for head in range(query_heads):
                k = np.concatenate([keys[b, head // group].T for b in used])[:length]
                v = np.concatenate([values[b, head // group] for b in used])[:length]
                out[row, head] = _one(
                    queries[row, head].astype(np.float64) * scale,
                    k.astype(np.float64),
                    v.astype(np.float64),
                    int(seen_from[sequence]),
                )
    return out.reshape(len(qkv), query_heads * head_dim)


def _one(query: Float64, keys: Float64, values: Float64, first: int) -> Float64:
    high, total, out = -np.inf, 0.0, np.zeros(values.shape[1])
    for span in range(first // SPAN_TOKENS, -(-len(keys) // SPAN_TOKENS)):
        seen = slice(max(span * SPAN_TOKENS, first), (span + 1) * SPAN_TOKENS)
        scores = keys[seen] @ query
        span_high = scores.max()
        weights = np.exp(scores - span_high)
        merged = max(high, span_high)
        old, new = np.exp(high - merged), np.exp(span_high - merged)
        total = total * old + weights.sum() * new
        out = out * old + (weights @ values[seen]) * new
        high = merged
    return out / total
