"""kv_write, attention and rope in numpy; attention by spans, merged in ascending order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.interface import BLOCK_TOKENS, RopeStyle
from quickdraft.ops.reference import int8_kv

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
    """Store K and V of each row in one layer of a KVCache, keys and values [blocks, ...]."""
    kv_heads, head_dim = _heads(keys)
    first_key = query_heads * head_dim
    k = qkv[:, first_key : first_key + kv_heads * head_dim].reshape(-1, kv_heads, head_dim)
    v = qkv[:, first_key + kv_heads * head_dim :].reshape(-1, kv_heads, head_dim)
    for sequence in range(len(row_starts) - 1):
        for row in range(row_starts[sequence], row_starts[sequence + 1]):
            block = block_tables[sequence, positions[row] // BLOCK_TOKENS]
            slot = positions[row] % BLOCK_TOKENS
            if keys.dtype == np.uint8:
                int8_kv.write(keys[block], values[block], slot, k[row], v[row])
                continue
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
    window: int | None = None,
    block: bool = False,
) -> NDArray[np.float32]:
    """float32 [T, H * D]; reads only what each row sees of its own sequence."""
    kv_heads, head_dim = _heads(keys)
    group = query_heads // kv_heads
    spans = int8_kv.spans if keys.dtype == np.uint8 else _spans
    out = np.empty((len(qkv), query_heads, head_dim), np.float32)
    queries = qkv[:, : query_heads * head_dim].reshape(-1, query_heads, head_dim)
    for sequence in range(len(row_starts) - 1):
        last = row_starts[sequence + 1] - 1
        for row in range(row_starts[sequence], last + 1):
            length = int(positions[last if block else row]) + 1
            first = int(seen_from[sequence])
            if window is not None:
                first = max(first, int(positions[row]) - window + 1)
            used = block_tables[sequence, : -(-length // BLOCK_TOKENS)]
            for head in range(query_heads):
                k, v = keys[used, head // group], values[used, head // group]
                out[row, head] = _merged(spans(queries[row, head], scale, k, v, first, length))
    return out.reshape(len(qkv), query_heads * head_dim)


def _heads(keys: NDArray[Any]) -> tuple[int, int]:
    """K and D of one layer's keys."""
    return keys.shape[1], int8_kv.head_dim_of(keys) if keys.dtype == np.uint8 else keys.shape[2]


def _spans(
    query: NDArray[np.float32],
    scale: float,
    keys: NDArray[Any],
    values: NDArray[Any],
    first: int,
    length: int,
) -> Iterator[int8_kv.Span]:
    """Spans of one query over positions first..length-1 of blocks [n, D, 16] and [n, 16, D]."""
    head_dim = len(query)
    k = np.swapaxes(keys, 1, 2).reshape(-1, head_dim)[:length].astype(np.float64)
    v = values.reshape(-1, head_dim)[:length].astype(np.float64)
    for seen in int8_kv.seen_spans(first, length):
        scores = k[seen] @ (query.astype(np.float64) * scale)
        weights = np.exp(scores - scores.max())
        yield scores.max(), weights.sum(), weights @ v[seen]


def _merged(spans: Iterable[int8_kv.Span]) -> Float64:
    high, total, out = -np.inf, 0.0, np.zeros(1)
    for span_high, span_total, span_out in spans:
        merged = max(high, span_high)
        old, new = np.exp(high - merged), np.exp(span_high - merged)
        total = total * old + span_total * new
        out = out * old + span_out * new
        high = merged
    return out / total
