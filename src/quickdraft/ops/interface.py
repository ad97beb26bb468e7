"""The Ops protocol: closed formulas over packed rows, valid for any T >= 1.

Shape letters (used everywhere): B sequences, T packed rows, R wanted rows (rows whose logits are
needed), H query heads, K kv heads, D head dim, C model dim, F feed-forward dim, V vocabulary,
L layers. "Inputs" of a linear are counted I, outputs N.

A *batch* describes the rows of one step; ops read it when they run, so a recorded program serves
every step. Buffers are [max_rows, width] float32, allocated once through `empty`; an op reads and
writes only the first `count` rows. Nothing here knows prefill from decode: T is data.

The result for one row depends on that row, the weights and its own sequence's cache, never on T,
its neighbours or threads (ARCHITECTURE.md, "Bit-exactness"). The CPU backend promises that in
bits; the numpy oracle (`ops/reference`) within a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.recurrent import RecurrentCache as RecurrentCache
from quickdraft.ops.recurrent import RecurrentShape as RecurrentShape
from quickdraft.ops.weights import Grouped, Stacked, Weight

BLOCK_TOKENS = 16  # KV block; the slot of a position is position % 16
SPAN_TOKENS = 256  # attention reduces spans of this many positions, aligned to position 0
NUMERICS = 3  # raised whenever the bits of any op change: KV blocks kept on disk are then not used again
BEST_OUTPUT_ROWS = 2  # of best_output: with more rows, arithmetic costs what reading less saves
MAX_TOP_ROWS = 32  # of top_rows
ACTIVATION_GROUP = 32  # int8 activations: one scale per row and this many inputs; see activation_group

# Rows of a buffer [n, width], or one of them [width]: numpy, or on a card what has len, slices [a:b] and one
# row [i] as numpy has, copy(), and becomes numpy, a copy on the host, where np.asarray is called on it.
Rows = Any
Buffer = Any  # opaque to models: numpy array on the CPU, torch tensor on CUDA
KVDtype = Literal["float32", "float16", "bfloat16", "int8"]
KV_SCALE_BYTES = 4  # int8: a float32 scale per token and kv head beside the keys' codes, and the values'
Sixteen = Literal["float16", "bfloat16"]
RopeStyle = Literal["interleaved", "half"]  # pairs (2i, 2i+1) | (i, i + D/2)


def activation_group(weight: Grouped) -> int:
    """Inputs of a row that share a scale where it meets this weight: 32, or 16 if its groups are of 16."""
    return min(ACTIVATION_GROUP, weight.group_size)


class RowCount(Protocol):
    """How many leading rows of its buffers an op works on; changes from step to step."""

    @property
    def count(self) -> int: ...


class Batch(Protocol):
    """The rows of one step, T packed rows of B sequences, set before a program runs.

    Rows of one sequence are adjacent and at consecutive positions: sequence b owns rows
    row_starts[b] .. row_starts[b+1]-1, and position p of it lives in block
    block_tables[b, p // 16], slot p % 16.
    """

    @property
    def rows(self) -> RowCount: ...  # T
    @property
    def wanted(self) -> RowCount: ...  # R

    def set(
        self,
        tokens: NDArray[np.int32],  # [T], ids in 0..V-1
        positions: NDArray[np.int32],  # [T]
        row_starts: NDArray[np.int32],  # [B+1], from 0 to T, increasing
        block_tables: NDArray[np.int32],  # [B, M], unused entries -1
        wanted: NDArray[np.int32],  # [R], row indices, increasing; may be empty
        slots: NDArray[np.int32] | None = None,  # [B], different; None: no recurrent layers
        replay: NDArray[np.int32] | None = None,  # [B], pending rows of its last step that are kept
        drafted: NDArray[np.int32] | None = None,  # [B], how many of its last rows are pending now
        seen_from: NDArray[np.int32] | None = None,  # [B], the first position attention sees; None: 0
    ) -> None:
        """Copy the step in; raises ValueError on anything out of range (rows, blocks, order).

        `slots`, `replay` and `drafted` are for a RecurrentCache, which says what they mean; without
        the last two they are 0."""


@dataclass(frozen=True, slots=True)
class Noise:
    """What a row's choice is drawn with: see Ops.gumbel_choice."""

    temperature: float  # above 0
    seed: int
    position: int  # of the token that is chosen


class KVCache(Protocol):
    """Paged keys and values of all layers; blocks are shared by number between layers.

    Layout of a block, per layer and kv head: keys [D, 16] (positions are lanes), values [16, D].
    int8: 16 (D + 4) bytes each, shaped [D + 4, 16]: codes, of keys [D/2][16 slots][2 dims], of values
    [8 pairs of slots][D][2 slots]; then 16 float32 scales, one per slot.
    """

    @property
    def blocks(self) -> int: ...
    @property
    def bytes_per_block(self) -> int: ...  # all layers, keys and values
    # Host memory, so not for the engine: on a card they raise UnsupportedError.
    @property
    def keys(self) -> NDArray[Any]: ...  # [L, blocks, K, D, 16]; int8: uint8 [L, blocks, K, D + 4, 16]
    @property
    def values(self) -> NDArray[Any]: ...  # [L, blocks, K, 16, D]; int8: as the keys
    @property
    def layout(self) -> tuple[int, ...]:
        """Layers, then the shape of the keys of one block."""

    def views(self, block: int) -> list[memoryview]:
        """The bytes of a block, to read, in an order that never depends on `block`: its memory, or a copy
        where the host cannot reach that."""

    def room(self, block: int) -> list[memoryview]:
        """Where to write what a block is to hold, in the same order: its memory, or memory that `filled`
        moves there. Only one block at a time."""

    def filled(self, block: int) -> None:
        """What was written to `room(block)` is there."""

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block of all layers."""

    def take(self, blocks: int) -> None:
        """Zeros in the first `blocks` blocks, so that their memory is real."""


def kv_shapes(kv_heads: int, head_dim: int, dtype: KVDtype) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of one block of one layer: of KVCache.keys and of KVCache.values."""
    if dtype == "int8":
        shape = (kv_heads, head_dim + KV_SCALE_BYTES, BLOCK_TOKENS)
        return shape, shape
    return (kv_heads, head_dim, BLOCK_TOKENS), (kv_heads, BLOCK_TOKENS, head_dim)


def block_views(keys: NDArray[Any], values: NDArray[Any], block: int) -> list[memoryview]:
    """KVCache.views over these arrays: layer by layer, keys, then values."""
    rows = [part.view(np.uint8).reshape(*part.shape[:2], -1)[:, block] for part in (keys, values)]
    return [row.data for pair in zip(*rows, strict=True) for row in pair]


class Program(Protocol):
    """A recorded sequence of ops. Recording keeps every buffer it names alive."""

    def run(self) -> None: ...


class Ops(Protocol):
    """One backend. Ops run at once, or are recorded inside `record`."""

    @property
    def name(self) -> str: ...
    def explain(self) -> str:
        """Which kernels run, and why (instruction set, threads)."""

    # -- allocation ---------------------------------------------------------------------------
    def empty(self, rows: int, width: int) -> Buffer:
        """float32 [rows, width], 64-byte aligned, zero-filled."""

    def ints(self, rows: int) -> Buffer:
        """int32 [rows], zero-filled."""

    def constant(self, values: NDArray[np.float32]) -> Buffer: ...
    @property
    def activations(self) -> str:
        """How activations meet quantised weights (linear): a part of what the bits of a result depend on."""

    def set_activations(self, kind: Sixteen) -> None:
        """The type of the model whose weights are packed next: where activations meet quantised weights in 16
        bits, they do in this type. float16 has more digits, bfloat16 holds the largest activations of models
        that were trained in it. Nothing to a backend with int8 activations."""

    def pack(self, weight: Weight | Stacked) -> Any:
        """A weight in this backend's own layout; the value itself may be dropped afterwards."""

    def sketch(self, weight: Any) -> Any | None:
        """What `best_output` reads of a packed weight in place of most of it; None: nothing to gain."""

    def batch(
        self, max_rows: int, max_sequences: int, table_width: int, pool_blocks: int, vocabulary: int
    ) -> Batch: ...
    def kv_cache(self, layers: int, blocks: int, kv_heads: int, head_dim: int, dtype: KVDtype) -> KVCache: ...
    def recurrent_cache(
        self, layers: int, slots: int, sequences: int, shape: RecurrentShape, max_pending: int
    ) -> RecurrentCache: ...
    def rows(self, buffer: Buffer, first: int, last: int) -> Rows:
        """Rows first..last-1 of a buffer where they lie: a view, which holds until the buffer is written."""

    def join(self, parts: Sequence[Rows], axis: int = 0) -> Rows:
        """A copy of several, one behind the other (axis 0) or side by side (axis 1)."""

    def record(self, function: Callable[[], None]) -> Program:
        """Call `function` once; the ops it calls become the program instead of running."""

    def free_memory_bytes(self) -> int | None:
        """What can still be allocated here; None: here is the host's memory."""

    def take_memory(self) -> None:
        """Make the system hand out all memory that was allocated here so far and is still in use, instead of
        when it is first written; contents stay. No program may run meanwhile."""

    def contexts(self, longest: int) -> Sequence[int]:
        """Contexts in tokens, the longest first, such that steps that end there prepare all steps up to
        `longest`: what is prepared for a step (a captured graph) serves those of shorter contexts too, down
        to the next. A step of some rows is prepared by running it twice, the first one three times."""

    # -- ops over rows (recordable) -----------------------------------------------------------
    def embed(
        self,
        batch: Batch,
        table: Any,
        out: Buffer,
        *,
        scale: float = 1.0,
        instead: tuple[int, Buffer] | None = None,
    ) -> None:
        """out[t] = value(table[tokens[t]]) * scale; exact dequantised values. Writes out[:T].

        `instead` (id, row [C]): the row of that token. A table is one weight, not a stacked one."""

    def linear(
        self,
        rows: RowCount,
        x: Buffer,
        weight: Any,
        out: Buffer,
        *,
        bias: Buffer | None = None,
        residual: Buffer | None = None,
    ) -> None:
        """out[t, n] = sum_i x[t, i] value[n, i] (+ bias[n]) (+ residual[t, n]); out may be residual.

        Dense weights use float32 activations. Quantised weights use int8 activations: per row and 32 inputs
        (16 where the weight's groups are of 16), s = amax / 127, q = clamp(rint(x / s), -127, 127), s = 0
        gives q = 0. Per output one fp32 chain over groups g in ascending order, with dot_g = sum of code * q
        (int4 without minimums: of (code - 8) * q): acc = fma(scale_g * s_g, f32(dot_g), acc), then, where
        there are minimums, acc = fma(min_g, s_g * f32(sum q_g), acc) scale_g and min_g are f32(half), or
        f32(shared) * f32(step) with two levels; both exact. With zero points the groups have minimums: min_g
        = scale_g * f32(-zero_g), exact too, and so with scales of bfloat16. Groups of more than 32 inputs are
        a chain of groups of 32 that have the same numbers. A weight with an order of its inputs takes
        x[order], put in that order before it is quantised. A stacked weight is its parts side by side, each
        by its own formula. Dense: acc = fma(x_i, f32(value_i), acc) over i ascending. Bias, then residual,
        are added once at the end. Every object (scalar, AVX2, ...) gives these bits.

        The CUDA backend has a numerics mode of its own: activations meet quantised weights rounded to the
        type of set_activations, float16 and bfloat16 weights rounded to theirs; products are exact, sums are
        float32."""

    def rms_norm(self, rows: RowCount, x: Buffer, weight: Buffer, eps: float, out: Buffer) -> None:
        """out = x / sqrt(mean(x^2) + eps) * weight; out may be x. The sum has 16 lanes and a fixed tree."""

    def head_norm(
        self,
        rows: RowCount,
        x: Buffer,
        first_head: int,
        heads: int,
        head_dim: int,
        weight: Buffer,
        eps: float,
    ) -> None:
        """rms_norm of each head by itself, in place: heads first_head .. first_head + heads - 1 of each
        row, every one with the same `weight` [head_dim]; the rest of the row stays."""

    def rope(
        self, batch: Batch, x: Buffer, heads: int, head_dim: int, table: Buffer, style: RopeStyle
    ) -> None:
        """Rotate the first `heads` heads of each row in place by its position.

        table float32 [max_positions, rotary_dim]: cos then sin, each rotary_dim/2; the first
        rotary_dim elements of a head turn, the rest pass. (a, b) -> (a cos - b sin, b cos + a sin).
        """

    def kv_write(self, batch: Batch, qkv: Buffer, query_heads: int, kv: KVCache, layer: int) -> None:
        """Round K and V of each row to the cache's type (nearest even) and store them.

        qkv rows are [H*D queries | K*D keys | K*D values]; H may be 0. int8: per row and kv head, of keys
        and of values, s = amax / 127, code = clamp(rint(x / s), -127, 127); s = 0 gives codes 0.
        """

    def attention(
        self,
        batch: Batch,
        qkv: Buffer,
        query_heads: int,
        kv: KVCache,
        layer: int,
        scale: float,
        out: Buffer,
        *,
        window: int | None = None,
        block: bool = False,
    ) -> None:
        """Attention of each row over its own sequence's positions seen_from..p, from the cache.

        With a window, no position below p - window + 1 is seen or read. `block`: the row sees all rows of its
        sequence in the batch, up to the position of the last one instead of p.

        Per row and head: s_j = scale * sum_d q_d k_jd (d ascending, one fma chain per position);
        per span of 256 positions m, l = sum exp(s - m), o = sum exp(s - m) v (positions
        ascending); spans merge in ascending order. Masked positions are never read as numbers
        (their memory may be NaN). Query head h reads kv head h // (H / K). out [T, H*D].

        int8, another numerics mode: per row and head int16 codes a of the query, S = amax / 32767,
        a = rint(q * (1 / S)); s_j = f32(sum_d a_d code_jd) * ((S * scale) * key scale_j), an exact
        integer sum. Per span w_j = exp(s_j - m), l = sum w_j, and int16 codes b of u_j = w_j * value
        scale_j, U = max u / 32767, b = rint(u * (1 / U)); o = f32(sum_j b_j code_jd) * U.
        """

    def grouped_conv(
        self,
        batch: Batch,
        x: Buffer,
        base: Buffer,
        deltas: Buffer,
        first: int,
        out: Buffer,
        *,
        residual: Buffer | None = None,
    ) -> None:
        """A convolution of two taps over the rows of each sequence in the batch, with a kernel per row.

        out[t, c] = fma(base[1, c] + d[t, 1, c // g], x[t - 1, c], (base[0, c] + d[t, 0, c // g]) * x[t, c])
        (+ residual[t, c]); the first row of a sequence has no row before it and takes the last product alone.
        d[t] is deltas[t, first : first + 2 G] as [2, G], G groups of g = C / G channels, where deltas is
        [T, 4 G]: both kernels of a sublayer. base [2, C]; x, out [T, C]; out is not x, and may be residual.
        """

    def causal_conv(
        self, batch: Batch, x: Buffer, weight: Buffer, state: RecurrentCache, layer: int, out: Buffer
    ) -> None:
        """Depthwise convolution over time: out[t, c] = silu(sum_j weight[j, c] X[t + j - 3, c]), j = 0..3.

        X[t] = x[t] for the sequence's rows, before them the window of its slot; weight [4, channels],
        one fma chain, j ascending. The window then holds the last 3 certain rows. x, out [T, channels].
        """

    def gated_delta(
        self,
        batch: Batch,
        qkv: Buffer,
        gates: Buffer,
        rate: Buffer,
        bias: Buffer,
        state: RecurrentCache,
        layer: int,
        out: Buffer,
    ) -> None:
        """The gated delta rule (Yang et al., "Gated Delta Networks", 2024), row by row.

        qkv [T, channels] is causal_conv's output: queries, keys [Hk, Dk] each, values [Hv, Dv]; gates
        [T, 2 Hv]: b, a; rate (-exp(A_log)) and bias [Hv]; out [T, Hv Dv]. Per value head, with the q and
        k of key head h // (Hv / Hk):
          q = q Dk^-0.5 / sqrt(sum q^2 + 1e-6), k = k / sqrt(sum k^2 + 1e-6)
          beta = sigmoid(b), keep = exp(rate softplus(a + bias))
          u = beta (v - keep S^T k), S = keep S + k u^T, o = S^T q
        S^T k has two fma chains, over even and odd inputs; S^T q has one.
        """

    def gated_norm(
        self, rows: RowCount, x: Buffer, gate: Buffer, weight: Buffer, eps: float, out: Buffer
    ) -> None:
        """rms_norm of each head (weight [head size]), times silu(gate); out may be x."""

    def sigmoid_gate(self, rows: RowCount, x: Buffer, gate: Buffer, out: Buffer) -> None:
        """out = x * sigmoid(gate), each [T, width]; out may be x."""

    def swiglu(self, rows: RowCount, gate_up: Buffer, out: Buffer) -> None:
        """out[t, f] = silu(gate_up[t, f]) * gate_up[t, F + f]."""

    def gather_rows(self, batch: Batch, x: Buffer, out: Buffer) -> None:
        """out[r] = x[wanted[r]]."""

    def argmax(self, rows: RowCount, x: Buffer, ids: Buffer) -> None:
        """ids[r] = index of the largest x[r, :]; ties go to the lowest id; a row that holds any
        NaN gives -1."""

    def top_rows(self, rows: RowCount, x: Buffer, k: int, ids: Buffer, values: Buffer) -> None:
        """Of each row of x [T, N] the k <= MAX_TOP_ROWS largest, best first, ties by lowest id: ids
        [T * k] (of row t from t * k on) and values [T, k]. NaN is never among them; places that are left
        over are id -1 and value -inf."""

    def best_output(
        self, rows: RowCount, x: Buffer, weight: Any, sketch: Any, out: Buffer, ids: Buffer
    ) -> None:
        """ids[r] as `linear` into out and then `argmax` give it, for at most BEST_OUTPUT_ROWS rows. What
        out[r] holds beside out[r, ids[r]], which is exact, is not said."""

    # -- ops on one row (run at once) ---------------------------------------------------------
    def top(self, row: Rows, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The k largest of row [V], or all it has, best first, ties by lowest id. NaN is never selected."""

    def gumbel_choice(
        self,
        row: Rows,
        temperature: float,
        seed: int,
        position: int,
        ids: Sequence[int] | NDArray[np.int64] | None = None,
    ) -> int:
        """argmax over tokens of f64(row[i]) / temperature + gumbel(seed, position, id_i).

        `ids` names the tokens of a survivors' row; None means row[i] is token i. -inf never wins.
        The noise is defined in ops/reference/gumbel.py. Returns the token id.
        """

    # -- ops on the first rows of a buffer (run at once, or None: rows are better asked one by one) ---------
    def top_together(
        self, x: Buffer, rows: int, k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
        """`top_rows` of x [.., V] on the host: ids and values [rows, k]."""

    def gumbel_rows(
        self, x: Buffer, best: Buffer, noises: Sequence[Noise | None]
    ) -> NDArray[np.int64] | None:
        """Of as many rows of x [.., V] as there are noises, [n, 2]: the id in `best`, and what gumbel_choice
        gives for the row under its noise; without one, the first id again."""
