"""ReferenceOps: the Ops protocol over numpy. A recorded program simply calls its function again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.batch import check_batch, check_states
from quickdraft.ops.host_kv import HostKV
from quickdraft.ops.interface import (
    KVDtype,
    Noise,
    RecurrentShape,
    RopeStyle,
    Sixteen,
    kv_shapes,
)
from quickdraft.ops.reference import attention, gumbel, linear, recurrent
from quickdraft.ops.reference import rows as row_ops
from quickdraft.ops.reference.recurrent import ReferenceRecurrent
from quickdraft.ops.weights import Stacked, Weight, values_of

KV_TYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.uint8,
}
SIXTEEN = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class _Count:
    def __init__(self) -> None:
        self.count = 0


class ReferenceBatch:
    """See ops.interface.Batch."""

    def __init__(
        self, max_rows: int, max_sequences: int, table_width: int, pool_blocks: int, vocabulary: int
    ) -> None:
        self.limits = (max_rows, max_sequences, table_width, pool_blocks, vocabulary)
        self.rows, self.wanted = _Count(), _Count()
        self.tokens = self.positions = self.row_starts = self.wanted_rows = np.zeros(0, np.int32)
        self.block_tables = np.zeros((0, 0), np.int32)
        self.slots: NDArray[np.int32] | None = None
        self.replay = self.drafted = self.seen_from = np.zeros(0, np.int32)

    def set(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        row_starts: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        wanted: NDArray[np.int32],
        slots: NDArray[np.int32] | None = None,
        replay: NDArray[np.int32] | None = None,
        drafted: NDArray[np.int32] | None = None,
        seen_from: NDArray[np.int32] | None = None,
    ) -> None:
        check_batch(tokens, positions, row_starts, block_tables, wanted, self.limits)
        check_states(row_starts, slots, replay, drafted, seen_from, positions)
        none = np.zeros(len(row_starts) - 1, np.int32)
        self.slots = slots
        self.replay = none if replay is None else replay
        self.drafted = none if drafted is None else drafted
        self.seen_from = none if seen_from is None else seen_from
        self.tokens, self.positions, self.row_starts = tokens, positions, row_starts
        self.block_tables, self.wanted_rows = block_tables, wanted
        self.rows.count, self.wanted.count = len(tokens), len(wanted)


class ReferenceKV(HostKV):
    """See ops.interface.KVCache."""

    def __init__(self, layers: int, blocks: int, kv_heads: int, head_dim: int, dtype: KVDtype) -> None:
        self.blocks = blocks
        keys, values = kv_shapes(kv_heads, head_dim, dtype)
        self.keys = np.zeros((layers, blocks, *keys), KV_TYPES[dtype])
        self.values = np.zeros((layers, blocks, *values), KV_TYPES[dtype])


class _Replay:
    def __init__(self, function: Callable[[], None]) -> None:
        self.run = function


class ReferenceOps:
    """The oracle backend; buffers are numpy arrays, packed weights are the values themselves. `activations`:
    how they meet quantised and 16-bit weights (Ops.linear): as on the CPU, or "sixteen" bits as on a card."""

    name = "reference"

    def __init__(self, activations: Literal["int8", "sixteen"] = "int8") -> None:
        self.activations: str = "int8" if activations == "int8" else "float16"

    def explain(self) -> str:
        return "reference: numpy, float64 inside, for tests only"

    def empty(self, rows: int, width: int) -> NDArray[np.float32]:
        return np.zeros((rows, width), np.float32)

    def ints(self, rows: int) -> NDArray[np.int32]:
        return np.zeros(rows, np.int32)

    def constant(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.ascontiguousarray(values, np.float32)

    def set_activations(self, kind: Sixteen) -> None:
        if self.activations != "int8":
            self.activations = kind

    def pack(self, weight: Weight | Stacked) -> Weight | Stacked:
        return values_of(weight)

    def sketch(self, weight: Weight | Stacked) -> Weight | Stacked:
        return weight

    def batch(
        self, max_rows: int, max_sequences: int, table_width: int, pool_blocks: int, vocabulary: int
    ) -> ReferenceBatch:
        return ReferenceBatch(max_rows, max_sequences, table_width, pool_blocks, vocabulary)

    def kv_cache(self, layers: int, blocks: int, kv_heads: int, head_dim: int, dtype: KVDtype) -> ReferenceKV:
        return ReferenceKV(layers, blocks, kv_heads, head_dim, dtype)

    def recurrent_cache(
        self, layers: int, slots: int, sequences: int, shape: RecurrentShape, max_pending: int
    ) -> ReferenceRecurrent:
        return ReferenceRecurrent(layers, slots, sequences, shape, max_pending)

    def contexts(self, longest: int) -> list[int]:
        return [longest]

    def take_memory(self) -> None:
        """Nothing: the oracle is never short of memory."""

    def free_memory_bytes(self) -> None:
        return None

    def rows(self, buffer: NDArray[np.float32], first: int, last: int) -> NDArray[np.float32]:
        return buffer[first:last]

    def join(self, parts: Sequence[NDArray[np.float32]], axis: int = 0) -> NDArray[np.float32]:
        return np.concatenate(parts, axis)

    def record(self, function: Callable[[], None]) -> _Replay:
        return _Replay(function)

    def embed(
        self,
        batch: ReferenceBatch,
        table: Weight,
        out: Any,
        *,
        scale: float = 1.0,
        instead: tuple[int, Any] | None = None,
    ) -> None:
        values = linear.embed(batch.tokens, table)
        if instead is not None:
            values[batch.tokens == instead[0]] = instead[1]
        out[: batch.rows.count] = values * np.float32(scale)

    def linear(
        self,
        rows: _Count,
        x: Any,
        weight: Weight | Stacked,
        out: Any,
        *,
        bias: Any = None,
        residual: Any = None,
    ) -> None:
        sixteen = SIXTEEN.get(self.activations)
        result = linear.linear(x[: rows.count], weight, sixteen)
        if bias is not None:
            result = result + bias
        out[: rows.count] = result if residual is None else result + residual[: rows.count]

    def rms_norm(self, rows: _Count, x: Any, weight: Any, eps: float, out: Any) -> None:
        out[: rows.count] = row_ops.rms_norm(x[: rows.count], weight, eps)

    def head_norm(
        self, rows: _Count, x: Any, first_head: int, heads: int, head_dim: int, weight: Any, eps: float
    ) -> None:
        row_ops.head_norm(x[: rows.count], first_head, heads, head_dim, weight, eps)

    def rope(
        self, batch: ReferenceBatch, x: Any, heads: int, head_dim: int, table: Any, style: RopeStyle
    ) -> None:
        attention.rope(x[: batch.rows.count], batch.positions, heads, head_dim, table, style)

    def kv_write(
        self, batch: ReferenceBatch, qkv: Any, query_heads: int, kv: ReferenceKV, layer: int
    ) -> None:
        attention.kv_write(
            qkv[: batch.rows.count],
            query_heads,
            kv.keys[layer],
            kv.values[layer],
            batch.positions,
            batch.row_starts,
            batch.block_tables,
        )

    def attention(
        self,
        batch: ReferenceBatch,
        qkv: Any,
        query_heads: int,
        kv: ReferenceKV,
        layer: int,
        scale: float,
        out: Any,
        *,
        window: int | None = None,
        block: bool = False,
    ) -> None:
        out[: batch.rows.count] = attention.attention(
            qkv[: batch.rows.count],
            query_heads,
            kv.keys[layer],
            kv.values[layer],
            batch.positions,
            batch.row_starts,
            batch.block_tables,
            batch.seen_from,
            scale,
            window,
            block,
        )

    def grouped_conv(
        self,
        batch: ReferenceBatch,
        x: Any,
        base: Any,
        deltas: Any,
        first: int,
        out: Any,
        *,
        residual: Any = None,
    ) -> None:
        count, half = batch.rows.count, deltas.shape[1] // 2
        result = row_ops.grouped_conv(x[:count], base, deltas[:count, first : first + half], batch.row_starts)
        out[:count] = result if residual is None else result + residual[:count]

    def causal_conv(
        self, batch: ReferenceBatch, x: Any, weight: Any, state: ReferenceRecurrent, layer: int, out: Any
    ) -> None:
        for rows, part in state.parts(batch, layer):
            out[rows] = part.causal_conv(x[rows], weight)

    def gated_delta(
        self,
        batch: ReferenceBatch,
        qkv: Any,
        gates: Any,
        rate: Any,
        bias: Any,
        state: ReferenceRecurrent,
        layer: int,
        out: Any,
    ) -> None:
        for rows, part in state.parts(batch, layer):
            out[rows] = part.gated_delta(qkv[rows], gates[rows], rate, bias)

    def gated_norm(self, rows: _Count, x: Any, gate: Any, weight: Any, eps: float, out: Any) -> None:
        out[: rows.count] = recurrent.gated_norm(x[: rows.count], gate[: rows.count], weight, eps)

    def sigmoid_gate(self, rows: _Count, x: Any, gate: Any, out: Any) -> None:
        out[: rows.count] = x[: rows.count] * recurrent.sigmoid(gate[: rows.count])

    def swiglu(self, rows: _Count, gate_up: Any, out: Any) -> None:
        out[: rows.count] = row_ops.swiglu(gate_up[: rows.count])

    def gather_rows(self, batch: ReferenceBatch, x: Any, out: Any) -> None:
        out[: batch.wanted.count] = x[batch.wanted_rows]

    def argmax(self, rows: _Count, x: Any, ids: Any) -> None:
        ids[: rows.count] = row_ops.argmax(x[: rows.count])

    def top_rows(self, rows: _Count, x: Any, k: int, ids: Any, values: Any) -> None:
        found, best = row_ops.top_rows(x[: rows.count], k)
        ids[: found.size], values[: rows.count] = found.ravel(), best

    def best_output(self, rows: _Count, x: Any, weight: Any, sketch: Any, out: Any, ids: Any) -> None:
        self.linear(rows, x, weight, out)
        self.argmax(rows, out, ids)

    def top(self, row: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return row_ops.top(row, k)

    def gumbel_choice(
        self,
        row: NDArray[np.float32],
        temperature: float,
        seed: int,
        position: int,
        ids: Sequence[int] | NDArray[np.int64] | None = None,
    ) -> int:
        return gumbel.choice(row, temperature, seed, position, ids)

    def top_together(self, x: Any, rows: int, k: int) -> None:
        return None

    def gumbel_rows(self, x: Any, best: Any, noises: Sequence[Noise | None]) -> NDArray[np.int64]:
        found = np.repeat(np.asarray(best[: len(noises)], np.int64)[:, None], 2, axis=1)
        for row, noise in enumerate(noises):
            if noise is not None:
                found[row, 1] = self.gumbel_choice(x[row], noise.temperature, noise.seed, noise.position)
        return found
