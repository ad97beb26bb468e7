"""int8 keys and values in numpy: how a block holds them, and attention over them.

The formulas are in ops/interface.py (kv_write, attention). Codes are computed in float32 as kernels
do, integer sums are exact, the rest is float64. Knows no batch and no block table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.interface import BLOCK_TOKENS, KV_SCALE_BYTES, SPAN_TOKENS

Bytes = NDArray[np.uint8]  # blocks of one kv head, or of all: [..., D + 4, 16]
Span = tuple[float, float, NDArray[Any]]  # maximum, total, weighted sum [D]


def write(keys: Bytes, values: Bytes, slot: int, k: NDArray[np.float32], v: NDArray[np.float32]) -> None:
    """Store one token's k and v [K, D] in a slot of a block [K, D + 4, 16]."""
    head_dim = k.shape[1]
    for block, x, places in ((keys, k, _key_places(head_dim)), (values, v, _value_places(head_dim))):
        codes, scales = quantise(x)
        heads = block.reshape(len(x), -1)
        heads[:, places[slot]] = codes.view(np.uint8)
        heads[:, BLOCK_TOKENS * head_dim :].view(np.float32)[:, slot] = scales


def quantise(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Codes int8 [K, D] and scales float32 [K] of x [K, D]."""
    scales = (np.abs(x).max(axis=1) / np.float32(127)).astype(np.float32)
    safe = np.where(scales == 0, np.float32(1), scales)[:, None]
    codes = np.clip(np.rint(x / safe), -127, 127)
    return np.where(scales[:, None] == 0, 0, codes).astype(np.int8), scales


def spans(
    query: NDArray[np.float32], scale: float, keys: Bytes, values: Bytes, first: int, length: int
) -> Iterator[Span]:
    """Spans of one query [D] over positions first..length-1 of one head's blocks [n, D + 4, 16]."""
    codes, query_scale = _int16_codes(query)
    k, key_scales = _stored(keys, _key_places(len(query)))
    v, value_scales = _stored(values, _value_places(len(query)))
    for part in seen_spans(first, length):
        scores = (k[part] @ codes) * (query_scale * scale * key_scales[part])
        weights = np.exp(scores - scores.max())
        coded, unit = _int16_codes((weights * value_scales[part]).astype(np.float32))
        yield float(scores.max()), float(weights.sum()), (coded @ v[part]) * unit


def seen_spans(first: int, length: int) -> Iterator[slice]:
    """Positions first..length-1, cut into spans aligned to position 0."""
    for span in range(first // SPAN_TOKENS, -(-length // SPAN_TOKENS)):
        yield slice(max(span * SPAN_TOKENS, first), min((span + 1) * SPAN_TOKENS, length))


def _int16_codes(x: NDArray[np.float32]) -> tuple[NDArray[np.int64], float]:
    scale = np.abs(x).max() / np.float32(32767)
    inverse = np.float32(0) if scale == 0 else np.float32(1) / scale
    return np.clip(np.rint(x * inverse), -32767, 32767).astype(np.int64), float(scale)


def _stored(blocks: Bytes, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Codes [16 n, D] and scales [16 n] of blocks [n, D + 4, 16]."""
    flat = np.ascontiguousarray(blocks).reshape(len(blocks), -1)
    codes = flat.view(np.int8)[:, places].reshape(-1, places.shape[1])
    scales = flat[:, places.size :].view(np.float32)
    return codes.astype(np.int64), scales.reshape(-1).astype(np.float64)


def _key_places(head_dim: int) -> NDArray[np.int64]:
    """[16, D]: where the code of a slot's key lies in its head's bytes."""
    slot, d = np.ogrid[:BLOCK_TOKENS, :head_dim]
    places: NDArray[np.int64] = (d // 2 * BLOCK_TOKENS + slot) * 2 + d % 2
    return places


def _value_places(head_dim: int) -> NDArray[np.int64]:
    """[16, D]: the same of values."""
    slot, d = np.ogrid[:BLOCK_TOKENS, :head_dim]
    places: NDArray[np.int64] = (slot // 2 * head_dim + d) * 2 + slot % 2
    return places


def head_dim_of(keys: Bytes) -> int:
    """D of an array of blocks [..., D + 4, 16]."""
    return int(keys.shape[-2]) - KV_SCALE_BYTES
