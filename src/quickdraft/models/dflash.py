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


class DFlashModule:
    """Weights and buffers. `features` [FEATURE_ROWS, taps * C] is read by `context`: of each row the target's
    taps side by side, in the order of config.target_layers. After a run of `block`, `hidden` [rows, C] is y
    of each row, and `scores` speaks of its wanted rows."""

    def __init__(self, config: DFlashConfig, weights: DFlashWeights, ops: Ops) -> None:
        self.config, self._weights, self._ops = config, weights, ops
        raise NotImplementedError

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
        raise NotImplementedError

    def block(self, batch: Batch, kv: KVCache) -> Program:
        """Blocks of one or more sequences -> candidates of the wanted rows; see `set_block`.

        Keys and values of the block's own rows are written at their positions, P .. P + rows - 1, and are
        worthless after the run: those positions' context must be written before they are context. Context
        is what lies at positions seen_from .. P - 1 (Batch.set)."""
        raise NotImplementedError

    def set_block(
        self,
        batch: Batch,
        anchors: NDArray[np.int32],
        firsts: NDArray[np.int32],
        rows: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        seen_from: NDArray[np.int32] | None = None,
    ) -> None:
        """Set `batch` for a run of `block`: sequence b has its anchor [B] at position firsts[b] and rows[b] - 1
        masks after it (2..config.block rows, FEATURE_ROWS in all).

        All rows but the anchors are wanted, in order: the first sequence's masks are rows 0 .. rows[0] - 2 of
        `scores`. Block tables must reach position firsts[b] + rows[b] - 1. ValueError as Batch.set."""
        raise NotImplementedError

    def scores(self, row: int, previous: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Candidates of wanted row `row` of the last block run, given the token before it (the anchor, then
        what was chosen): (token ids [<= top_k], scores [<= top_k]), in the order of their logits, best
        first, ties by lowest id.

        v1: scores are logits. v2: logit plus the selector's edge from `previous`, so they need not fall; the
        choice is their first largest, or softmax(scores / T). Candidates whose logit is not finite are left
        out; there may be none."""
        raise NotImplementedError
