"""DFlash and DFlash2: a drafter that fills a block of masked rows in one pass over the target's features.

Of a known token it keeps keys and values only, made from the target's residual stream after some layers
(`features`): they depend on the text up to that token and on nothing drafted. A block is the anchor (the
known token that the target has not read) and masks; its rows see all that context and one another, and
row i proposes the token at its own position. DFlash2 adds two-tap convolutions over the rows of a block
and a selector that scores a row's candidates by the token chosen before them.
Embedding and head are the target's; the rope table is its own. Knows no request and no draft.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quickdraft.models.codebook import Codebook
from quickdraft.models.dflash_config import DFlashConfig
from quickdraft.ops.interface import Batch, Buffer, KVCache, KVDtype, Ops, Program

FEATURE_ROWS: Final = 64  # rows of one run at most, of a context and of blocks; more come in pieces


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """A sublayer's convolutions (v2): before it and after it, from one projection of its input."""

    before: Buffer  # [2 taps, C]
    after: Buffer
    projection: Any  # [2 * 2 * C / group, C]: before then after, tap, group


@dataclass(frozen=True, slots=True)
class DFlashLayer:
    """Packed weights of a layer. `kv` is the key and value rows of `qkv` again, for context rows."""

    mix_norm: Buffer
    qkv: Any
    kv: Any
    query_norm: Buffer
    key_norm: Buffer
    output: Any
    feed_forward_norm: Buffer
    gate_up: Any
    down: Any
    mix_conv: ConvWeights | None
    feed_forward_conv: ConvWeights | None


@dataclass(frozen=True, slots=True)
class Selector:
    """DFlash2's codebooks: the edge of (previous token, candidate) at a row y is
    sum_r predecessor[previous, r] g_r successor[candidate, r], g = projection y."""

    predecessor: Codebook  # by token id
    successor: Codebook  # by token id, or by row of the head where it has as many rows
    projection: Any  # [rank, C]
    by_head_row: bool


@dataclass(frozen=True, slots=True)
class DFlashWeights:
    """Everything a module runs with, packed; the first three are the target's."""

    embedding: Any
    head: Any  # [N, C]: all tokens, or those of a draft vocabulary
    head_bias: Buffer | None
    token_ids: NDArray[np.int64] | None  # the token of each head row; None: row n is token n
    mask_row: Buffer | None  # [C], in place of the embedding's row
    mix: Any  # fc [C, taps * C]
    context_norm: Buffer
    layers: tuple[DFlashLayer, ...]
    norm: Buffer
    rope: Buffer  # [positions, D]
    selector: Selector | None


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best tokens of rows of a block [n, top_k], each row's in increasing order, and what scores them:
    logits, and for v2 the edge from the token before."""

    ids: NDArray[np.int64]
    logits: NDArray[np.float32]
    finite: NDArray[np.bool_]
    successors: NDArray[np.float32] | None  # [n, top_k, rank]
    guides: NDArray[np.float32] | None  # [n, rank]
    predecessor: Codebook | None

    def scores(self, row: int, previous: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(token ids [<= top_k], scores) of a row, given the token before it: the anchor, then what was
        chosen. The choice is the largest, the lowest id of equal ones, or one of softmax(scores / T).

        v1: scores are logits. v2: logit plus the selector's edge from `previous`. Candidates whose logit is
        not finite are left out; there may be none."""
        ids, scores, finite = self.ids[row], self.logits[row], self.finite[row]
        if self.predecessor is not None and self.successors is not None and self.guides is not None:
            toward = self.predecessor.rows(np.array([previous]))[0] * self.guides[row]
            scores = scores + self.successors[row] @ toward
        return (ids, scores) if finite.all() else (ids[finite], scores[finite])


class DFlashModule:
    """Weights and buffers. `features` [FEATURE_ROWS, taps * C] is read by `context`: of each row the target's
    taps side by side, in the order of config.target_layers. After a run of `block`, `hidden`
    [FEATURE_ROWS, C] is y of each row, and `candidates` speaks of its wanted rows."""

    def __init__(self, config: DFlashConfig, weights: DFlashWeights, ops: Ops) -> None:
        self.config, self._weights, self._ops = config, weights, ops
        rows, width, dim = FEATURE_ROWS, config.width, config.head_dim
        self.features = ops.empty(rows, len(config.target_layers) * width)
        self.hidden = ops.empty(rows, width)
        self._context = ops.empty(rows, width)
        self._context_kv = ops.empty(rows, 2 * config.kv_heads * dim)
        self._x, self._normed = ops.empty(rows, width), ops.empty(rows, width)
        self._convolved, self._mixed = ops.empty(rows, width), ops.empty(rows, width)
        self._deltas = ops.empty(rows, max(1, 2 * config.conv_kernel_width))
        self._qkv = ops.empty(rows, (config.heads + 2 * config.kv_heads) * dim)
        self._attended = ops.empty(rows, config.heads * dim)
        self._gate_up = ops.empty(rows, 2 * config.feed_forward)
        self._inner = ops.empty(rows, config.feed_forward)
        self._last = ops.empty(rows, width)
        self._logits = ops.empty(
            rows, config.vocabulary_size if weights.token_ids is None else len(weights.token_ids)
        )
        self._best = ops.empty(rows, config.top_k)
        self._best_rows = ops.ints(rows * config.top_k)
        self._guides = ops.empty(rows, max(1, config.rank))

    @property
    def positions(self) -> int:
        """Positions a row may have: 0 .. positions - 1."""
        return int(self._weights.rope.shape[0])

    def kv_cache(self, blocks: int, dtype: KVDtype) -> KVCache:
        """Keys and values of all layers, of the drafter's own dimensions. Give it as many blocks as the
        target's cache, and name them by the same ids."""
        config = self.config
        return self._ops.kv_cache(config.layers, blocks, config.kv_heads, config.head_dim, dtype)

    def context(self, batch: Batch, kv: KVCache) -> Program:
        """`features` of the batch's rows -> their keys and values, in all layers, at the rows' positions.

        Tokens are not read. Only rows of committed tokens: what is written stays."""
        return self._ops.record(lambda: self._write_context(batch, kv))

    def block(self, batch: Batch, kv: KVCache) -> Program:
        """Blocks of one or more sequences -> `hidden`, and candidates of the wanted rows; see `set_block`.

        Context is what lies at positions seen_from .. P - 1 (Batch.set), P being the anchor's. Keys and
        values of the block's own rows are written at their positions and are worthless after the run:
        `context` must have written a position before it is context."""
        return self._ops.record(lambda: self._fill(batch, kv))

    def set_block(
        self,
        batch: Batch,
        anchors: NDArray[np.int32],
        firsts: NDArray[np.int32],
        rows: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        seen_from: NDArray[np.int32] | None = None,
    ) -> None:
        """Set `batch` for a run of `block`: sequence b has its anchor at position firsts[b], and after it
        rows[b] - 1 masks (2..config.block rows each, FEATURE_ROWS together).

        All rows but the anchors are wanted, in order: the first sequence's masks are rows 0 .. rows[0] - 2 of
        `candidates`. Block tables must reach position firsts[b] + rows[b] - 1. ValueError as Batch.set."""
        if len(rows) == 0 or rows.min() < 2 or rows.max() > self.config.block:
            raise ValueError(f"blocks of {rows.tolist()} rows; expected 2..{self.config.block}")
        starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
        tokens = np.full(starts[-1], self.config.mask_id, np.int32)
        tokens[starts[:-1]] = anchors
        within = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], rows)
        positions = (np.repeat(firsts, rows) + within).astype(np.int32)
        wanted = np.flatnonzero(within).astype(np.int32)
        batch.set(tokens, positions, starts, block_tables, wanted, seen_from=seen_from)

    def candidates(self, count: int) -> Candidates:
        """What the first `count` wanted rows of the last block run propose."""
        config, weights, top_k = self.config, self._weights, self.config.top_k
        logits: NDArray[np.float32] = np.array(self._best[:count], np.float32)
        finite = np.isfinite(logits)
        numbers = self._best_rows[: count * top_k].reshape(count, top_k).astype(np.int64)
        numbers[~finite] = 0
        ids = numbers if weights.token_ids is None else weights.token_ids[numbers]
        logits *= np.float32(config.output_multiplier)
        if config.softcap is not None:
            logits = np.tanh(logits / np.float32(config.softcap)) * np.float32(config.softcap)
        order = np.argsort(ids, axis=1)
        ids, logits, finite = (np.take_along_axis(each, order, axis=1) for each in (ids, logits, finite))
        selector = weights.selector
        if selector is None:
            return Candidates(ids, logits, finite, None, None, None)
        chosen = np.take_along_axis(numbers, order, axis=1) if selector.by_head_row else ids
        successors = selector.successor.rows(chosen.ravel()).reshape(count, top_k, -1)
        return Candidates(
            ids, logits, finite, successors, np.array(self._guides[:count], np.float32), selector.predecessor
        )

    def _write_context(self, batch: Batch, kv: KVCache) -> None:
        ops, config, weights, rows = self._ops, self.config, self._weights, batch.rows
        heads, dim, to = config.kv_heads, config.head_dim, self._context_kv
        ops.linear(rows, self.features, weights.mix, self._context)
        ops.rms_norm(rows, self._context, weights.context_norm, config.eps, self._context)
        for index, layer in enumerate(weights.layers):
            ops.linear(rows, self._context, layer.kv, to)
            ops.head_norm(rows, to, 0, heads, dim, layer.key_norm, config.eps)
            ops.rope(batch, to, heads, dim, weights.rope, "half")
            ops.kv_write(batch, to, 0, kv, index)

    def _fill(self, batch: Batch, kv: KVCache) -> None:
        ops, config, weights, x = self._ops, self.config, self._weights, self._x
        masks = None if weights.mask_row is None else (config.mask_id, weights.mask_row)
        ops.embed(batch, weights.embedding, x, scale=config.embedding_scale, instead=masks)
        for index, layer in enumerate(weights.layers):
            ops.rms_norm(batch.rows, x, layer.mix_norm, config.eps, self._normed)
            normed = self._before(batch, layer.mix_conv)
            attended = self._attend(batch, kv, index, normed)
            self._add(batch, attended, layer.output, layer.mix_conv)
            ops.rms_norm(batch.rows, x, layer.feed_forward_norm, config.eps, self._normed)
            normed = self._before(batch, layer.feed_forward_conv)
            ops.linear(batch.rows, normed, layer.gate_up, self._gate_up)
            ops.swiglu(batch.rows, self._gate_up, self._inner)
            self._add(batch, self._inner, layer.down, layer.feed_forward_conv)
        ops.rms_norm(batch.rows, x, weights.norm, config.eps, self.hidden)
        ops.gather_rows(batch, self.hidden, self._last)
        ops.linear(batch.wanted, self._last, weights.head, self._logits, bias=weights.head_bias)
        ops.top_rows(batch.wanted, self._logits, config.top_k, self._best_rows, self._best)
        if weights.selector is not None:
            ops.linear(batch.wanted, self._last, weights.selector.projection, self._guides)

    def _attend(self, batch: Batch, kv: KVCache, index: int, x: Buffer) -> Buffer:
        ops, config, layer = self._ops, self.config, self._weights.layers[index]
        heads, kv_heads, dim, rows = config.heads, config.kv_heads, config.head_dim, batch.rows
        ops.linear(rows, x, layer.qkv, self._qkv)
        ops.head_norm(rows, self._qkv, 0, heads, dim, layer.query_norm, config.eps)
        ops.head_norm(rows, self._qkv, heads, kv_heads, dim, layer.key_norm, config.eps)
        ops.rope(batch, self._qkv, heads + kv_heads, dim, self._weights.rope, "half")
        ops.kv_write(batch, self._qkv, heads, kv, index)
        ops.attention(
            batch, self._qkv, heads, kv, index, 1.0 / math.sqrt(dim), self._attended,
            window=config.window[index], block=not config.causal[index],
        )  # fmt: skip
        return self._attended

    def _before(self, batch: Batch, conv: ConvWeights | None) -> Buffer:
        """The normed rows as a sublayer takes them; its convolutions' deltas are kept for `_add`."""
        if conv is None:
            return self._normed
        self._ops.linear(batch.rows, self._normed, conv.projection, self._deltas)
        self._ops.grouped_conv(batch, self._normed, conv.before, self._deltas, 0, self._convolved)
        return self._convolved

    def _add(self, batch: Batch, inner: Buffer, weight: Any, conv: ConvWeights | None) -> None:
        """What a sublayer gives, onto the residual stream."""
        ops, x = self._ops, self._x
        if conv is None:
            ops.linear(batch.rows, inner, weight, x, residual=x)
            return
        ops.linear(batch.rows, inner, weight, self._mixed)
        first = self.config.conv_kernel_width
        ops.grouped_conv(batch, self._mixed, conv.after, self._deltas, first, x, residual=x)
