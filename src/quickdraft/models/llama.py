"""The Llama family over ops: rms_norm, grouped-query attention with rope, swiglu.

Qwen2 (a bias on q, k and v) and Qwen3 (q and k normalised per head) are options of the same decoder.

`forward` is written once; a backend runs or records it. Weights are read through an Inventory, so
a tensor that is missing, left over or mis-shaped is an error that names it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import ModelFormatError
from quickdraft.models.config import ModelConfig
from quickdraft.models.interface import Taps
from quickdraft.models.loading.inventory import Inventory
from quickdraft.models.mtp import TargetParts
from quickdraft.ops.interface import (
    BLOCK_TOKENS,
    Batch,
    Buffer,
    KVCache,
    KVDtype,
    Ops,
    Program,
    RecurrentCache,
)
from quickdraft.ops.weights import Weight, concat_rows


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Buffer
    qkv: Any
    qkv_bias: Buffer | None
    query_norm: Buffer | None
    key_norm: Buffer | None
    output: Any
    feed_forward_norm: Buffer
    gate_up: Any
    down: Any


class Llama:
    """models.interface.Model. Buffers hold `max_rows` rows and the logits of `max_wanted`."""

    def __init__(
        self,
        config: ModelConfig,
        inventory: Inventory,
        ops: Ops,
        *,
        max_rows: int,
        max_wanted: int,
        weight_bytes: int,
        taps: Taps = Taps(),
    ) -> None:
        self.config, self.weight_bytes, self._ops = config, weight_bytes, ops
        width = config.width
        embedding = inventory.matrix("token_embd.weight", config.vocabulary_size, width)
        self._embedding = ops.pack(embedding)
        self._layers = [self._layer(inventory, index) for index in range(config.layers)]
        self._norm = ops.constant(inventory.vector("output_norm.weight", width))
        self._head = self._embedding
        if inventory.has("output.weight"):
            self._head = ops.pack(inventory.matrix("output.weight", config.vocabulary_size, width))
        self._sketch = ops.sketch(self._head)
        factors: NDArray[Any] | None = None
        if config.rope_factors:
            factors = np.array(config.rope_factors, np.float64)
        elif inventory.has("rope_freqs.weight"):
            factors = inventory.vector("rope_freqs.weight", config.rotary_dim // 2)
            if factors.min() <= 0:
                raise ModelFormatError(
                    f"{inventory.path}: tensor rope_freqs.weight", got=factors.min(), expected="above 0"
                )
        inventory.finish()
        positions = -(-config.context_length // BLOCK_TOKENS) * BLOCK_TOKENS
        self._rope = ops.constant(rope_table(positions, config.rotary_dim, config.rope_base, factors))
        self.parts = TargetParts(self._embedding, self._head, None, self._rope)
        self._x = ops.empty(max_rows, width)
        self._normed = ops.empty(max_rows, width)
        self._qkv = ops.empty(max_rows, config.qkv_width)
        self._mixed = ops.empty(max_rows, config.heads * config.head_dim)
        self._gate_up = ops.empty(max_rows, 2 * config.feed_forward)
        self._hidden = ops.empty(max_rows, config.feed_forward)
        self._last = ops.empty(max_wanted, width)
        self.taps = {layer: ops.empty(max_rows, width) for layer in taps.layers}
        self.hidden = ops.empty(max_rows, width) if taps.hidden else None
        self.logits = ops.empty(max_wanted, config.vocabulary_size)
        self.best = ops.ints(max_wanted)

    def kv_cache(self, blocks: int, dtype: KVDtype) -> KVCache:
        config = self.config
        layers = config.kv_layers + config.draft_kv_layers
        return self._ops.kv_cache(layers, blocks, config.kv_heads, config.head_dim, dtype)

    def recurrent_cache(self, slots: int, sequences: int, max_pending: int) -> None:
        return None

    def program(self, batch: Batch, kv: KVCache, recurrent: RecurrentCache | None = None) -> Program:
        assert recurrent is None, "no layer here has a recurrent state"
        return self._ops.record(lambda: self.forward(batch, kv))

    def best_programs(self, batch: Batch, kv: KVCache) -> tuple[Program, Program] | None:
        if self._sketch is None:
            return None
        ops, wanted = self._ops, batch.wanted

        def best() -> None:
            self._read(batch, kv)
            ops.best_output(wanted, self._last, self._head, self._sketch, self.logits, self.best)

        return ops.record(best), ops.record(lambda: ops.linear(wanted, self._last, self._head, self.logits))

    def forward(self, batch: Batch, kv: KVCache) -> None:
        """Rows of `batch` -> logits and best of its wanted rows."""
        self._read(batch, kv)
        self._ops.linear(batch.wanted, self._last, self._head, self.logits)
        self._ops.argmax(batch.wanted, self.logits, self.best)

    def _read(self, batch: Batch, kv: KVCache) -> None:
        """Rows of `batch` -> the head's inputs of its wanted rows, in `_last`."""
        ops, config = self._ops, self.config
        x = self._x
        ops.embed(batch, self._embedding, x)
        for index, layer in enumerate(self._layers):
            self._attend(batch, kv, layer, index, x)
            ops.rms_norm(batch.rows, self._x, layer.feed_forward_norm, config.norm_eps, self._normed)
            ops.linear(batch.rows, self._normed, layer.gate_up, self._gate_up)
            ops.swiglu(batch.rows, self._gate_up, self._hidden)
            x = self.taps.get(index, self._x)  # the next layer reads on from a tap, so it costs no copy
            ops.linear(batch.rows, self._hidden, layer.down, x, residual=self._x)
        final_rows(ops, batch, x, self._norm, config.norm_eps, self.hidden, self._last)

    def _attend(self, batch: Batch, kv: KVCache, layer: _Layer, index: int, x: Buffer) -> None:
        ops, config = self._ops, self.config
        ops.rms_norm(batch.rows, x, layer.attention_norm, config.norm_eps, self._normed)
        ops.linear(batch.rows, self._normed, layer.qkv, self._qkv, bias=layer.qkv_bias)
        self._normalise_heads(batch, layer)
        turned = config.heads + config.kv_heads
        ops.rope(batch, self._qkv, turned, config.head_dim, self._rope, config.rope_style)
        ops.kv_write(batch, self._qkv, config.heads, kv, index)
        scale = 1.0 / math.sqrt(config.head_dim)
        ops.attention(batch, self._qkv, config.heads, kv, index, scale, self._mixed)
        ops.linear(batch.rows, self._mixed, layer.output, self._x, residual=x)

    def _normalise_heads(self, batch: Batch, layer: _Layer) -> None:
        ops, config = self._ops, self.config
        for first, heads, weight in (
            (0, config.heads, layer.query_norm),
            (config.heads, config.kv_heads, layer.key_norm),
        ):
            if weight is not None:
                ops.head_norm(batch.rows, self._qkv, first, heads, config.head_dim, weight, config.norm_eps)

    def _layer(self, inventory: Inventory, index: int) -> _Layer:
        config, ops, prefix = self.config, self._ops, f"blk.{index}."
        width, kv_width = config.width, config.kv_heads * config.head_dim

        def matrix(name: str, outputs: int, inputs: int) -> Weight:
            return inventory.matrix(f"{prefix}{name}.weight", outputs, inputs)

        def vector(name: str, size: int) -> NDArray[np.float32]:
            return inventory.vector(f"{prefix}{name}", size)

        def head_norm(name: str) -> Buffer | None:
            return ops.constant(vector(f"{name}.weight", config.head_dim)) if config.head_norm else None

        bias = None
        if config.qkv_bias:
            sizes = (config.heads * config.head_dim, kv_width, kv_width)
            parts = [vector(f"attn_{part}.bias", size) for part, size in zip("qkv", sizes, strict=True)]
            bias = ops.constant(np.concatenate(parts))
        qkv = [
            matrix("attn_q", config.heads * config.head_dim, width),
            matrix("attn_k", kv_width, width),
            matrix("attn_v", kv_width, width),
        ]
        gate_up = [matrix(name, config.feed_forward, width) for name in ("ffn_gate", "ffn_up")]
        return _Layer(
            attention_norm=ops.constant(inventory.vector(f"{prefix}attn_norm.weight", width)),
            qkv=ops.pack(concat_rows(qkv)),
            qkv_bias=bias,
            query_norm=head_norm("attn_q_norm"),
            key_norm=head_norm("attn_k_norm"),
            output=ops.pack(matrix("attn_output", width, config.heads * config.head_dim)),
            feed_forward_norm=ops.constant(inventory.vector(f"{prefix}ffn_norm.weight", width)),
            gate_up=ops.pack(concat_rows(gate_up)),
            down=ops.pack(matrix("ffn_down", width, config.feed_forward)),
        )


def final_rows(
    ops: Ops, batch: Batch, x: Buffer, norm: Buffer, eps: float, hidden: Buffer | None, last: Buffer
) -> None:
    """The final norm of the wanted rows into `last`, and of all rows into `hidden` where there is one."""
    if hidden is None:
        ops.gather_rows(batch, x, last)
        ops.rms_norm(batch.wanted, last, norm, eps, last)
    else:
        ops.rms_norm(batch.rows, x, norm, eps, hidden)
        ops.gather_rows(batch, hidden, last)


def rope_table(
    positions: int, rotary_dim: int, base: float, factors: NDArray[Any] | None
) -> NDArray[np.float32]:
    """float32 [positions, rotary_dim]: cos then sin of p / base^(2i / rotary_dim) (/ factor_i)."""
    frequencies = 1.0 / base ** (np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if factors is not None:
        frequencies /= factors
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    table = np.empty((positions, rotary_dim), np.float32)
    half = rotary_dim // 2
    np.cos(angles, out=table[:, :half], casting="same_kind", dtype=np.float64)
    np.sin(angles, out=table[:, half:], casting="same_kind", dtype=np.float64)
    return table
