"""An MTP module: one attention layer that predicts the token after next.

It is part of a Qwen3.5 checkpoint, or a drafter folder beside another target (models/mtp_folder.py).

A row lies at the position of a known token: from that token and the target's hidden state of the row
before it (after the final norm) comes a hidden state y, whose logits are the next token's; y takes the
place of the target's hidden state where drafts are chained. So what a row writes depends on the tokens
up to its own position and on nothing after them, as the target's rows do, and its keys and values,
the last layer of the KV cache, are shared with the target's blocks. Position 0 has no row.
Embedding, head (all of it, or the rows of a draft vocabulary) and rope table are the target's. Knows no
sequence and no draft.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from quickdraft.models.config import ModelConfig
from quickdraft.models.draft_vocab import DraftVocab, packed_head
from quickdraft.models.gated_attention import AttentionBuffers, attend, load_attention, shifted, write_keys
from quickdraft.models.loading.folder import MTP
from quickdraft.models.loading.inventory import Inventory, TensorFile
from quickdraft.ops.interface import Batch, Buffer, KVCache, Ops, Program
from quickdraft.ops.weights import Weight, concat_rows, take_columns

MODULE_ROWS: Final = 64  # rows of a run at most; more come in pieces
_LAYER: Final = f"{MTP}layers.0."


@dataclass(frozen=True, slots=True)
class MTPForm:
    """What differs between modules; the defaults are those of Qwen3.5."""

    norm_offset: int = 1  # norms hold their factors less this
    gate: bool = True  # q_proj has an output gate beside each query
    head_norm: bool = True  # q and k are normalised per head


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a drafter uses of the model it drafts for."""

    embedding: Any
    head: Any
    head_bias: Buffer | None
    rope: Buffer


class MTPModule:
    """Weights and buffers. `previous` [64, C] is read: the hidden states before each row; `hidden` [64, C]
    is y of each; `last` [1, C] is y of the wanted row, `logits` and `best` what the head makes of it:
    [1, V] and an id, or with a `vocab` [1, len(vocab)] and a place in it.

    `config` is the target's with the module's own feed_forward, norm_eps and rope_style; its rows are the
    KV layer after the target's."""

    def __init__(
        self,
        config: ModelConfig,
        inventory: Inventory,
        ops: Ops,
        target: TargetParts,
        form: MTPForm = MTPForm(),
    ) -> None:
        self.config, self._ops, self._target, self._form = config, ops, target, form
        self.vocab: DraftVocab | None = None
        self.files: tuple[Path, ...] = ()  # its own, where they are not the target's
        width, ff, rows = config.width, config.feed_forward, MODULE_ROWS
        self._load(inventory)
        self._attention_rows = AttentionBuffers.of(config, ops, rows, target.rope)
        self.previous, self.hidden = ops.empty(rows, width), ops.empty(rows, width)
        self._x, self._normed = ops.empty(rows, width), ops.empty(rows, width)
        self._gate_up, self._inner = ops.empty(rows, 2 * ff), ops.empty(rows, ff)
        self.last, self.logits = ops.empty(1, width), ops.empty(1, config.vocabulary_size)
        self.best = ops.ints(1)

    def limit(self, vocab: DraftVocab, tensors: TensorFile) -> None:
        """Choose among `vocab` only, before anything is recorded. `tensors` are the target's."""
        target, bias = self._target, self._target.head_bias
        rows = None if bias is None else self._ops.constant(np.asarray(bias)[vocab.ids])
        self._target = replace(target, head=packed_head(tensors, vocab, self._ops), head_bias=rows)
        self.vocab, self.logits = vocab, self._ops.empty(1, len(vocab))

    def keys(self, batch: Batch, kv: KVCache) -> Program:
        """Rows of `batch` and `previous` -> their keys and values, in `kv`. They depend on each row's own
        token and previous hidden state alone."""
        return self._ops.record(lambda: self._write(batch, kv))

    def draft(self, batch: Batch, kv: KVCache) -> Program:
        """The same, and of the rows `hidden`, of the one that is wanted `last`, `logits` and `best`."""
        return self._ops.record(lambda: self._draft(batch, kv))

    def _normed_rows(self, batch: Batch) -> Buffer:
        """The layer's input, into `_x`, and normed as its attention reads it."""
        ops, eps, rows, x = self._ops, self.config.norm_eps, batch.rows, self._x
        ops.embed(batch, self._target.embedding, x)
        ops.rms_norm(rows, x, self._embedding_norm, eps, self._normed)
        ops.linear(rows, self._normed, self._from_embedding, x)
        ops.rms_norm(rows, self.previous, self._hidden_norm, eps, self._normed)
        ops.linear(rows, self._normed, self._from_hidden, x, residual=x)
        ops.rms_norm(rows, x, self._mix_norm, eps, self._normed)
        return self._normed

    def _write(self, batch: Batch, kv: KVCache) -> None:
        normed = self._normed_rows(batch)
        write_keys(self._ops, self.config, batch, kv, self._attention, normed, self._attention_rows)

    def _draft(self, batch: Batch, kv: KVCache) -> None:
        ops, eps, rows, x = self._ops, self.config.norm_eps, batch.rows, self._x
        normed = self._normed_rows(batch)
        mixed = attend(ops, self.config, batch, kv, self._attention, normed, self._attention_rows)
        ops.linear(rows, mixed, self._output, x, residual=x)
        ops.rms_norm(rows, x, self._feed_forward_norm, eps, self._normed)
        ops.linear(rows, self._normed, self._gate_up_weight, self._gate_up)
        ops.swiglu(rows, self._gate_up, self._inner)
        ops.linear(rows, self._inner, self._down, x, residual=x)
        ops.rms_norm(rows, x, self._norm, eps, self.hidden)
        ops.gather_rows(batch, self.hidden, self.last)
        target, wanted = self._target, batch.wanted
        ops.linear(wanted, self.last, target.head, self.logits, bias=target.head_bias)
        ops.argmax(wanted, self.logits, self.best)

    def _load(self, inventory: Inventory) -> None:
        config, ops, form = self.config, self._ops, self._form
        width, ff, queries = config.width, config.feed_forward, config.heads * config.head_dim

        def norm(name: str) -> Buffer:
            return ops.constant(shifted(inventory, f"{name}.weight", width, form.norm_offset))

        def matrix(name: str, outputs: int, inputs: int) -> Weight:
            return inventory.matrix(f"{_LAYER}{name}.weight", outputs, inputs)

        def attention_name(part: str) -> str:
            return f"{_LAYER}self_attn.{part if part.endswith('norm') else part + '_proj'}.weight"

        joint = inventory.matrix(f"{MTP}fc.weight", width, 2 * width)
        self._from_embedding = ops.pack(take_columns(joint, 0, width))
        self._from_hidden = ops.pack(take_columns(joint, width, 2 * width))
        self._embedding_norm = norm(f"{MTP}pre_fc_norm_embedding")
        self._hidden_norm = norm(f"{MTP}pre_fc_norm_hidden")
        self._norm = norm(f"{MTP}norm")
        self._mix_norm = norm(f"{_LAYER}input_layernorm")
        self._feed_forward_norm = norm(f"{_LAYER}post_attention_layernorm")
        self._attention = load_attention(
            config, inventory, ops, config.kv_layers, attention_name,
            gate=form.gate, head_norm=form.head_norm, norm_offset=form.norm_offset,
        )  # fmt: skip
        self._output = ops.pack(matrix("self_attn.o_proj", width, queries))
        gate_up = [matrix(f"mlp.{part}_proj", ff, width) for part in ("gate", "up")]
        self._gate_up_weight = ops.pack(concat_rows(gate_up))
        self._down = ops.pack(matrix("mlp.down_proj", width, ff))
        inventory.leave(f"{MTP}draft_lm_head.")  # a head over some tokens: the target's serves
