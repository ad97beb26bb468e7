"""Gated attention over ops: queries and keys normalised per head, partial rope, an output gate.

One layer's weights and how they attend, for the layers of the hybrid and for its MTP module. Knows no
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
    """Weights of one layer; `index` is its place in the KV cache."""

    index: int
    qkv: Any
    gate: Any
    query_norm: Buffer
    key_norm: Buffer


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
    config: ModelConfig, inventory: Inventory, ops: Ops, index: int, name: Callable[[str], str]
) -> GatedAttention:
    """The layer whose tensors are name("q"), "k", "v", "q_norm" and "k_norm"; q holds per head a query,
    then a gate."""
    width, dim = config.width, config.head_dim
    both = inventory.matrix(name("q"), 2 * config.heads * dim, width)
    rows = np.arange(2 * config.heads * dim).reshape(config.heads, 2, dim)
    parts: list[Weight] = [take_rows(both, rows[:, 0].ravel())]
    parts += [inventory.matrix(name(part), config.kv_heads * dim, width) for part in "kv"]
    return GatedAttention(
        index=index,
        qkv=ops.pack(concat_rows(parts)),
        gate=ops.pack(take_rows(both, rows[:, 1].ravel())),
        query_norm=ops.constant(shifted(inventory, name("q_norm"), dim)),
        key_norm=ops.constant(shifted(inventory, name("k_norm"), dim)),
    )


def shifted(inventory: Inventory, name: str, size: int) -> NDArray[np.float32]:
    """A norm's factors: the checkpoint holds them less 1."""
    return np.float32(1) + inventory.vector(name, size)


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
    heads, kv_heads, dim, rows = config.heads, config.kv_heads, config.head_dim, batch.rows
    ops.linear(rows, x, layer.qkv, to.qkv)
    ops.linear(rows, x, layer.gate, to.gate)
    ops.head_norm(rows, to.qkv, 0, heads, dim, layer.query_norm, config.norm_eps)
    ops.head_norm(rows, to.qkv, heads, kv_heads, dim, layer.key_norm, config.norm_eps)
    ops.rope(batch, to.qkv, heads + kv_heads, dim, to.rope, config.rope_style)
    ops.kv_write(batch, to.qkv, heads, kv, layer.index)
    ops.attention(batch, to.qkv, heads, kv, layer.index, 1.0 / math.sqrt(dim), to.attended)
    ops.sigmoid_gate(rows, to.attended, to.gate, to.attended)
    return to.attended
