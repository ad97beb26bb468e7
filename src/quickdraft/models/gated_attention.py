"""Attention over ops with queries and keys normalised per head, partial rope and an output gate; an MTP
module may lack the norms or the gate.

One layer's weights and how they attend, for the layers of the hybrid and for MTP modules. Knows no
tensor names beyond what `name` says, and no residual stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quickdraft.models.config import ModelConfig
from quickdraft.models.loading.inventory import Inventory
from quickdraft.ops.interface import Batch, Buffer, KVCache, Ops
from quickdraft.ops.weights import Weight, concat_rows, take_rows


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """Weights of one layer; `index` is its place in the KV cache. None: the layer has no such part."""

    index: int
    qkv: Any
    gate: Any | None
    query_norm: Buffer | None
    key_norm: Buffer | None


@dataclass(frozen=True, slots=True)
class AttentionBuffers:
    """Rows of one layer at a time: qkv, gate and attended [max_rows, ...], and the rope table."""

    qkv: Buffer
    gate: Buffer
    attended: Buffer
    rope: Buffer

    @classmethod
    def of(cls, config: ModelConfig, ops: Ops, max_rows: int, rope: Buffer) -> AttentionBuffers:
        queries = config.heads * config.head_dim
        return cls(
            ops.empty(max_rows, config.qkv_width),
            ops.empty(max_rows, queries),
            ops.empty(max_rows, queries),
            rope,
        )


def load_attention(
    config: ModelConfig,
    inventory: Inventory,
    ops: Ops,
    index: int,
    name: Callable[[str], str],
    *,
    gate: bool = True,
    head_norm: bool = True,
    norm_offset: int = 1,
) -> GatedAttention:
    """The layer whose tensors are name("q"), "k", "v" and, with `head_norm`, "q_norm" and "k_norm"; with
    `gate` q holds per head a query, then a gate."""
    width, dim, queries = config.width, config.head_dim, config.heads * config.head_dim
    query: Weight = inventory.matrix(name("q"), queries * (1 + gate), width)
    gates = None
    if gate:
        rows = np.arange(2 * queries).reshape(config.heads, 2, dim)
        gates = ops.pack(take_rows(query, rows[:, 1].ravel()))
        query = take_rows(query, rows[:, 0].ravel())
    parts = [query, *(inventory.matrix(name(part), config.kv_heads * dim, width) for part in "kv")]

    def norm(part: str) -> Buffer | None:
        return ops.constant(shifted(inventory, name(part), dim, norm_offset)) if head_norm else None

    return GatedAttention(index, ops.pack(concat_rows(parts)), gates, norm("q_norm"), norm("k_norm"))


def shifted(inventory: Inventory, name: str, size: int, offset: int = 1) -> NDArray[np.float32]:
    """A norm's factors: the checkpoint holds them less `offset`."""
    return np.float32(offset) + inventory.vector(name, size)


def attend(
    ops: Ops,
    config: ModelConfig,
    batch: Batch,
    kv: KVCache,
    layer: GatedAttention,
    x: Buffer,
    to: AttentionBuffers,
) -> Buffer:
    """Normed rows x [T, C] -> to.attended [T, H * D], before the output projection."""
    write_keys(ops, config, batch, kv, layer, x, to)
    heads, dim, rows = config.heads, config.head_dim, batch.rows
    if layer.gate is not None:
        ops.linear(rows, x, layer.gate, to.gate)
    ops.attention(batch, to.qkv, heads, kv, layer.index, 1.0 / math.sqrt(dim), to.attended)
    if layer.gate is not None:
        ops.sigmoid_gate(rows, to.attended, to.gate, to.attended)
    return to.attended


def write_keys(
    ops: Ops,
    config: ModelConfig,
    batch: Batch,
    kv: KVCache,
    layer: GatedAttention,
    x: Buffer,
    to: AttentionBuffers,
) -> None:
    """The first half of `attend`: keys and values of the rows, into the cache, and queries."""
    heads, kv_heads, dim, rows = config.heads, config.kv_heads, config.head_dim, batch.rows
    ops.linear(rows, x, layer.qkv, to.qkv)
    for first, count, weight in ((0, heads, layer.query_norm), (heads, kv_heads, layer.key_norm)):
        if weight is not None:
            ops.head_norm(rows, to.qkv, first, count, dim, weight, config.norm_eps)
    ops.rope(batch, to.qkv, heads + kv_heads, dim, to.rope, config.rope_style)
    ops.kv_write(batch, to.qkv, heads, kv, layer.index)
