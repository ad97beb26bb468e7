"""Qwen3.5 over ops: Gated DeltaNet layers with a recurrent state, and every few layers gated attention.

Keys and values exist for the attention layers only, a recurrent state for the others. A checkpoint's
conventions end here: norms hold w of (1 + w), q_proj has a query and a gate per head, A_log becomes
the rate -exp(A_log). An MTP module beside the model (mtp.*) is read where the config asks for
its keys and values; the vision tower is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import ModelFormatError
from quickdraft.models.config import ModelConfig
from quickdraft.models.gated_attention import (
    AttentionBuffers,
    GatedAttention,
    attend,
    load_attention,
    shifted,
)
from quickdraft.models.interface import Taps
from quickdraft.models.llama import final_rows, rope_table
from quickdraft.models.loading.folder import MTP
from quickdraft.models.loading.inventory import Inventory
from quickdraft.models.mtp import MTPModule, TargetParts
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
from quickdraft.ops.weights import concat_rows


@dataclass(frozen=True, slots=True)
class _Delta:
    index: int  # among the recurrent layers
    qkv: Any
    z: Any
    gates: Any  # b, then a
    conv: Buffer
    rate: Buffer
    bias: Buffer
    norm: Buffer


@dataclass(frozen=True, slots=True)
class _Layer:
    mix_norm: Buffer
    mix: GatedAttention | _Delta
    output: Any
    feed_forward_norm: Buffer
    gate_up: Any
    down: Any


class Qwen35:
    """models.interface.Model. Ids from `addressable` on are rows the tokenizer has no token for."""

    def __init__(
        self,
        config: ModelConfig,
        inventory: Inventory,
        ops: Ops,
        *,
        max_rows: int,
        max_wanted: int,
        weight_bytes: int,
        addressable: int,
        taps: Taps = Taps(),
    ) -> None:
        self.config, self.weight_bytes, self._ops = config, weight_bytes, ops
        self._load(inventory, addressable)
        positions = -(-config.context_length // BLOCK_TOKENS) * BLOCK_TOKENS
        rope = ops.constant(rope_table(positions, config.rotary_dim, config.rope_base, None))
        self._attention_rows = AttentionBuffers.of(config, ops, max_rows, rope)
        width = config.width
        recurrent = config.recurrent
        if recurrent is not None:
            channels = recurrent.state.channels
            values = recurrent.value_heads * recurrent.value_dim
            self._gates = ops.empty(max_rows, 2 * recurrent.value_heads)
            self._unmixed = ops.empty(max_rows, channels)
            self._convolved = ops.empty(max_rows, channels)
            self._z, self._delta = ops.empty(max_rows, values), ops.empty(max_rows, values)
        self._x, self._normed = ops.empty(max_rows, width), ops.empty(max_rows, width)
        self._gate_up = ops.empty(max_rows, 2 * config.feed_forward)
        self._inner = ops.empty(max_rows, config.feed_forward)
        self._last = ops.empty(max_wanted, width)
        self.taps = {layer: ops.empty(max_rows, width) for layer in taps.layers}
        self.hidden = ops.empty(max_rows, width) if taps.hidden else None
        self.logits = ops.empty(max_wanted, config.vocabulary_size)
        self.best = ops.ints(max_wanted)
        self.parts = TargetParts(self._embedding, self._head, self._head_bias, rope)
        self.mtp = None
        if config.draft_kv_layers:
            self.mtp = MTPModule(config, inventory, ops, self.parts)
        else:
            inventory.leave(MTP)
        inventory.finish()

    def kv_cache(self, blocks: int, dtype: KVDtype) -> KVCache:
        config = self.config
        layers = config.kv_layers + config.draft_kv_layers
        return self._ops.kv_cache(layers, blocks, config.kv_heads, config.head_dim, dtype)

    def recurrent_cache(self, slots: int, sequences: int, max_pending: int) -> RecurrentCache | None:
        found = self.config.recurrent
        if found is None:
            return None
        return self._ops.recurrent_cache(len(found.indices), slots, sequences, found.state, max_pending)

    def program(self, batch: Batch, kv: KVCache, recurrent: RecurrentCache | None = None) -> Program:
        assert (recurrent is None) == (self.config.recurrent is None), "recurrent layers need their states"
        return self._ops.record(lambda: self.forward(batch, kv, recurrent))

    def best_programs(self, batch: Batch, kv: KVCache) -> None:
        return None  # the bias that keeps unused ids out is not known to best_output

    def forward(self, batch: Batch, kv: KVCache, recurrent: RecurrentCache | None) -> None:
        """Rows of `batch` -> logits and best of its wanted rows, and the taps of all."""
        ops, eps, rows = self._ops, self.config.norm_eps, batch.rows
        x = self._x
        ops.embed(batch, self._embedding, x)
        for index, layer in enumerate(self._layers):
            ops.rms_norm(rows, x, layer.mix_norm, eps, self._normed)
            if isinstance(layer.mix, GatedAttention):
                mixed = attend(ops, self.config, batch, kv, layer.mix, self._normed, self._attention_rows)
            else:
                mixed = self._advance(batch, recurrent, layer.mix)
            ops.linear(rows, mixed, layer.output, self._x, residual=x)
            ops.rms_norm(rows, self._x, layer.feed_forward_norm, eps, self._normed)
            ops.linear(rows, self._normed, layer.gate_up, self._gate_up)
            ops.swiglu(rows, self._gate_up, self._inner)
            x = self.taps.get(index, self._x)  # the next layer reads on from a tap, so it costs no copy
            ops.linear(rows, self._inner, layer.down, x, residual=self._x)
        final_rows(ops, batch, x, self._norm, eps, self.hidden, self._last)
        ops.linear(batch.wanted, self._last, self._head, self.logits, bias=self._head_bias)
        ops.argmax(batch.wanted, self.logits, self.best)

    def _advance(self, batch: Batch, state: RecurrentCache | None, mix: _Delta) -> Buffer:
        assert state is not None, "checked by program"
        ops, rows = self._ops, batch.rows
        ops.linear(rows, self._normed, mix.qkv, self._unmixed)
        ops.linear(rows, self._normed, mix.z, self._z)
        ops.linear(rows, self._normed, mix.gates, self._gates)
        ops.causal_conv(batch, self._unmixed, mix.conv, state, mix.index, self._convolved)
        ops.gated_delta(
            batch, self._convolved, self._gates, mix.rate, mix.bias, state, mix.index, self._delta
        )
        ops.gated_norm(rows, self._delta, self._z, mix.norm, self.config.norm_eps, self._delta)
        return self._delta

    def _load(self, inventory: Inventory, addressable: int) -> None:
        config, ops = self.config, self._ops
        vocabulary, width = config.vocabulary_size, config.width
        self._embedding = ops.pack(inventory.matrix("token_embd.weight", vocabulary, width))
        self._layers = [_load_layer(config, inventory, ops, index) for index in range(config.layers)]
        self._norm = ops.constant(shifted(inventory, "output_norm.weight", width))
        self._head = self._embedding
        if inventory.has("output.weight"):
            self._head = ops.pack(inventory.matrix("output.weight", vocabulary, width))
        self._head_bias = None
        if addressable < vocabulary:  # the bias takes what nobody may choose out of every logits row
            bias = np.zeros(vocabulary, np.float32)
            bias[addressable:] = -np.inf
            self._head_bias = ops.constant(bias)


def _rate(inventory: Inventory, name: str, heads: int) -> NDArray[np.float32]:
    """-exp(A_log); ModelFormatError where that is infinite: with a step of 0 it would make a NaN."""
    logarithms = inventory.vector(name, heads)
    with np.errstate(over="ignore"):
        rate = -np.exp(logarithms)
    if not np.isfinite(rate).all():
        raise ModelFormatError(
            f"{inventory.path}: tensor {inventory.called(name)} holds values too large",
            got=logarithms.max(), expected="at most 88",
        )  # fmt: skip
    return rate


def _load_layer(config: ModelConfig, inventory: Inventory, ops: Ops, index: int) -> _Layer:
    prefix, width, ff = f"blk.{index}.", config.width, config.feed_forward
    recurrent = config.recurrent
    if recurrent is not None and index in recurrent.indices:
        mix: GatedAttention | _Delta = _load_delta(config, inventory, ops, index)
        name, inputs = "linear_attn_output", recurrent.value_heads * recurrent.value_dim
    else:
        mix = _attention_of(config, inventory, ops, index)
        name, inputs = "attn_output", config.heads * config.head_dim
    gate_up = [inventory.matrix(f"{prefix}{part}.weight", ff, width) for part in ("ffn_gate", "ffn_up")]
    return _Layer(
        mix_norm=ops.constant(shifted(inventory, f"{prefix}attn_norm.weight", width)),
        mix=mix,
        output=ops.pack(inventory.matrix(f"{prefix}{name}.weight", width, inputs)),
        feed_forward_norm=ops.constant(shifted(inventory, f"{prefix}ffn_norm.weight", width)),
        gate_up=ops.pack(concat_rows(gate_up)),
        down=ops.pack(inventory.matrix(f"{prefix}ffn_down.weight", width, ff)),
    )


def _attention_of(config: ModelConfig, inventory: Inventory, ops: Ops, index: int) -> GatedAttention:
    recurrent = config.recurrent
    before = sum(layer < index for layer in recurrent.indices) if recurrent else 0
    return load_attention(
        config, inventory, ops, index - before, lambda part: f"blk.{index}.attn_{part}.weight"
    )


def _load_delta(config: ModelConfig, inventory: Inventory, ops: Ops, index: int) -> _Delta:
    recurrent = config.recurrent
    assert recurrent is not None, "only a config with recurrent layers has one"
    prefix, width = f"blk.{index}.linear_attn_", config.width
    heads, channels = recurrent.value_heads, recurrent.state.channels
    gates = [inventory.matrix(f"{prefix}{name}.weight", heads, width) for name in "ba"]
    conv = inventory.array(f"{prefix}conv.weight", (channels, 1, recurrent.window + 1))
    return _Delta(
        index=recurrent.indices.index(index),
        qkv=ops.pack(inventory.matrix(f"{prefix}qkv.weight", channels, width)),
        z=ops.pack(inventory.matrix(f"{prefix}z.weight", heads * recurrent.value_dim, width)),
        gates=ops.pack(concat_rows(gates)),
        conv=ops.constant(np.ascontiguousarray(conv[:, 0].T)),
        rate=ops.constant(_rate(inventory, f"{prefix}a_log", heads)),
        bias=ops.constant(inventory.vector(f"{prefix}dt_bias", heads)),
        norm=ops.constant(inventory.vector(f"{prefix}norm.weight", recurrent.value_dim)),
    )
