"""CpuOps: the Ops protocol over the compiled module `_cpu`.

Owns KV arrays and recording; the kernels, their threads and the
rules of bit-exactness live in csrc. An op is made once, with its shapes checked, and either runs at
once or joins the program being recorded. Row counts are read from the Batch when an op runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.ops.cpu import _cpu  # type: ignore[attr-defined]
from quickdraft.ops.cpu.buffers import Buffers
from quickdraft.ops.cpu.formats import GROUP_FORMATS, as_bits, group_format, paired, plain_format
from quickdraft.ops.cpu.recurrent import CpuRecurrent, raw_state
from quickdraft.ops.host_kv import HostKV
from quickdraft.ops.interface import (
    KVCache,
    KVDtype,
    Noise,
    RecurrentShape,
    RopeStyle,
    Sixteen,
    kv_shapes,
)
from quickdraft.ops.recurrent import L2_EPS
from quickdraft.ops.weights import (
    Blocks,
    Dense,
    Grouped,
    Int8Groups,
    Stacked,
    Weight,
)

KV_TYPES: dict[str, tuple[Any, Any]] = {  # name -> (numpy type, the type the compiled module takes)
    "float32": (np.float32, np.float32),
    "float16": (np.float16, np.uint16),
    "bfloat16": (ml_dtypes.bfloat16, np.uint16),
    "int8": (np.uint8, np.uint8),  # bytes: codes and float scales
}


class CpuKV(HostKV):
    """See ops.interface.KVCache; `raw_keys` and `raw_values` are the same memory as the module reads it."""

    def __init__(
        self, buffers: Buffers, layers: int, blocks: int, kv_heads: int, head_dim: int, dtype: KVDtype
    ) -> None:
        kind, raw = KV_TYPES[dtype]
        self.blocks, self.dtype = blocks, dtype
        keys, values = kv_shapes(kv_heads, head_dim, dtype)
        self.raw_keys = buffers.zeros((layers, blocks, *keys), raw)
        self.raw_values = buffers.zeros((layers, blocks, *values), raw)
        self.keys = self.raw_keys.view(kind)
        self.values = self.raw_values.view(kind)


class CpuOps:
    """The CPU backend: `threads` threads, and the best kernels of this CPU (or those named, for tests)."""

    name = "cpu"

    def __init__(self, threads: int, instructions: str = "auto") -> None:
        self._engine = _cpu.Engine(threads, instructions)
        self._buffers = Buffers()
        self._recording: list[Any] | None = None

    def explain(self) -> str:
        kernels, threads = self._engine.instructions, self._engine.threads
        why = {
            "avx512": "the CPU has AVX-512 with VNNI",
            "avx2": "the CPU has AVX2, FMA and F16C",
            "scalar": "plain C++, far slower: no AVX2, FMA and F16C here, or they were turned off",
        }[kernels]
        return f"cpu: {kernels} kernels ({why}), {threads} thread{'s' if threads > 1 else ''}"

    # -- allocation ---------------------------------------------------------------------------
    def empty(self, rows: int, width: int) -> NDArray[np.float32]:
        return self._buffers.zeros((rows, width), np.float32)

    def ints(self, rows: int) -> NDArray[np.int32]:
        return self._buffers.zeros((rows,), np.int32)

    def constant(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        copy = self._buffers.zeros(np.shape(values), np.float32)
        copy[...] = values
        return copy

    def pack(self, weight: Weight | Stacked) -> Any:
        # one part after the other: what a part is read into is dropped before the next is read
        packed = [one for part in _parts(weight) for one in self._pack_part(part)]
        return packed[0] if len(packed) == 1 else _PackedStack(packed)

    def _pack_part(self, weight: Weight) -> list[Any]:
        if isinstance(weight, Dense):
            return [self._pack_dense(weight.values)]
        if not isinstance(weight, Blocks):
            return [self._pack_groups(weight)]
        if weight.type_name is not None:
            return [self._pack_blocks(weight)]
        return [one for part in _parts(weight.value()) for one in self._pack_part(part)]

    def _pack_groups(self, weight: Grouped) -> Any:
        if plain := plain_format(weight):
            return self._pack_plain(weight, plain)
        form = group_format(weight)
        if form not in GROUP_FORMATS or weight.order is not None:
            bits, group, scales_of, minimums_of = form
            raise UnsupportedError(
                "the CPU backend has no kernels for this quantised weight",
                got=f"{bits} bits, groups of {group}, scales of {scales_of}, minimums of {minimums_of}",
                expected="the formats of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or Q6_K, "
                "or 4 or 8 bits in groups of a multiple of 32",
                hint="requantise the file to one of these",
            )
        codes = np.ascontiguousarray(weight.codes).view(np.uint8)
        if isinstance(weight, Int8Groups) and weight.bits < 8 and weight.minimums is None:
            codes = codes + np.uint8(1 << weight.bits - 1)  # the module stores them from 0 on
        scales, minimums = as_bits(weight.scales), as_bits(weight.minimums)
        return _cpu.pack_groups(
            self._engine, GROUP_FORMATS[form], codes, *scales, *minimums, None, paired(weight)
        )

    def _pack_plain(self, weight: Grouped, form: str) -> Any:
        """4 or 8 bits with one level of scales; the module repeats the numbers for every 32 inputs."""
        codes = np.ascontiguousarray(weight.codes).view(np.uint8)
        minimums: tuple[Any, Any] = None, None
        if weight.zeros is not None:
            # -128..128 for 8 bits, which a byte does not hold
            wide, below = isinstance(weight, Int8Groups), -weight.zeros
            minimums = as_bits(below.astype(np.float16)) if wide else (None, below.astype(np.int8))
        order = None if weight.order is None else np.ascontiguousarray(weight.order, np.int32)
        return _cpu.pack_groups(
            self._engine, form, codes, *as_bits(weight.scales), *minimums, order, paired(weight)
        )

    @property
    def activations(self) -> str:
        return "int8"

    def set_activations(self, kind: Sixteen) -> None:
        pass

    def sketch(self, weight: Any) -> Any | None:
        return None if isinstance(weight, _PackedStack) else _cpu.sketch(self._engine, weight)

    def _pack_blocks(self, weight: Blocks) -> Any:
        parts = [(part.file.fileno(), part.offset, part.rows) for part in weight.parts]
        packed = _cpu.pack_blocks(self._engine, weight.type_name, parts, weight.inputs)
        if packed is None:
            weight.value()
            raise ModelFormatError("a model file changed while it was read", hint="try again")
        return packed

    def _pack_dense(self, values: NDArray[Any]) -> Any:
        values = np.ascontiguousarray(values)
        if values.dtype == np.float32:
            return _cpu.pack_float32(self._engine, values)
        if values.dtype in (np.float16, ml_dtypes.bfloat16):
            return _cpu.pack_sixteen_bit(self._engine, values.view(np.uint16), values.dtype != np.float16)
        raise UnsupportedError(
            "the CPU backend has no kernels for this dense weight",
            got=values.dtype,
            expected="float32, float16 or bfloat16",
        )

    def batch(
        self, max_rows: int, max_sequences: int, table_width: int, pool_blocks: int, vocabulary: int
    ) -> Any:
        return _cpu.Batch(max_rows, max_sequences, table_width, pool_blocks, vocabulary)

    def kv_cache(self, layers: int, blocks: int, kv_heads: int, head_dim: int, dtype: KVDtype) -> CpuKV:
        return CpuKV(self._buffers, layers, blocks, kv_heads, head_dim, dtype)

    def recurrent_cache(
        self, layers: int, slots: int, sequences: int, shape: RecurrentShape, max_pending: int
    ) -> CpuRecurrent:
        def zeros(size: tuple[int, ...]) -> NDArray[np.float32]:
            return self._buffers.zeros(size, np.float32)

        return CpuRecurrent(self._engine, zeros, layers, slots, sequences, shape, max_pending)

    def contexts(self, longest: int) -> list[int]:
        return [longest]

    def take_memory(self) -> None:
        self._buffers.take()

    def free_memory_bytes(self) -> None:
        return None

    def rows(self, buffer: NDArray[np.float32], first: int, last: int) -> NDArray[np.float32]:
        return buffer[first:last]

    def join(self, parts: Sequence[NDArray[np.float32]], axis: int = 0) -> NDArray[np.float32]:
        return np.concatenate(parts, axis)

    def record(self, function: Callable[[], None]) -> Any:
        if self._recording is not None:
            raise RuntimeError("record inside record: a program is one flat list of ops")
        ops: list[Any] = []
        self._recording = ops
        try:
            function()
        finally:
            self._recording = None
        return _cpu.Program(self._engine, ops)

    def _do(self, op: Any) -> None:
        if self._recording is None:
            _cpu.Program(self._engine, [op]).run()
        else:
            self._recording.append(op)

    # -- ops over rows ------------------------------------------------------------------------
    def embed(
        self, batch: Any, table: Any, out: Any, *, scale: float = 1.0, instead: tuple[int, Any] | None = None
    ) -> None:
        self._do(_cpu.embed(self._engine, batch, table, out, scale, *(instead or (-1, None))))

    def linear(
        self, rows: Any, x: Any, weight: Any, out: Any, *, bias: Any = None, residual: Any = None
    ) -> None:
        parts = weight.parts if isinstance(weight, _PackedStack) else [weight]
        width, first = sum(part.shape[0] for part in parts), 0
        for part in parts:
            self._do(_cpu.linear(self._engine, rows, x, part, out, bias, residual, first, width))
            first += part.shape[0]

    def rms_norm(self, rows: Any, x: Any, weight: Any, eps: float, out: Any) -> None:
        self._do(_cpu.rms_norm(self._engine, rows, x, weight, eps, out))

    def head_norm(
        self, rows: Any, x: Any, first_head: int, heads: int, head_dim: int, weight: Any, eps: float
    ) -> None:
        self._do(_cpu.head_norm(self._engine, rows, x, first_head, heads, head_dim, weight, eps))

    def rope(self, batch: Any, x: Any, heads: int, head_dim: int, table: Any, style: RopeStyle) -> None:
        self._do(_cpu.rope(self._engine, batch, x, heads, head_dim, table, style))

    def kv_write(self, batch: Any, qkv: Any, query_heads: int, kv: KVCache, layer: int) -> None:
        self._do(_cpu.kv_write(self._engine, batch, qkv, query_heads, *_layer(kv, layer)))

    def attention(
        self,
        batch: Any,
        qkv: Any,
        query_heads: int,
        kv: KVCache,
        layer: int,
        scale: float,
        out: Any,
        *,
        window: int | None = None,
        block: bool = False,
    ) -> None:
        cache = _layer(kv, layer)
        self._do(
            _cpu.attention(self._engine, batch, qkv, query_heads, *cache, scale, out, window or 0, block)
        )

    def grouped_conv(
        self, batch: Any, x: Any, base: Any, deltas: Any, first: int, out: Any, *, residual: Any = None
    ) -> None:
        self._do(_cpu.grouped_conv(self._engine, batch, x, base, deltas, first, residual, out))

    def causal_conv(self, batch: Any, x: Any, weight: Any, state: Any, layer: int, out: Any) -> None:
        self._do(_cpu.causal_conv(self._engine, batch, x, weight, raw_state(state), layer, out))

    def gated_delta(
        self, batch: Any, qkv: Any, gates: Any, rate: Any, bias: Any, state: Any, layer: int, out: Any
    ) -> None:
        inputs = (batch, qkv, gates, rate, bias, L2_EPS, raw_state(state))
        self._do(_cpu.gated_delta(self._engine, *inputs, layer, out))

    def gated_norm(self, rows: Any, x: Any, gate: Any, weight: Any, eps: float, out: Any) -> None:
        self._do(_cpu.gated_norm(self._engine, rows, x, gate, weight, eps, out))

    def sigmoid_gate(self, rows: Any, x: Any, gate: Any, out: Any) -> None:
        self._do(_cpu.sigmoid_gate(self._engine, rows, x, gate, out))

    def swiglu(self, rows: Any, gate_up: Any, out: Any) -> None:
        self._do(_cpu.swiglu(self._engine, rows, gate_up, out))

    def gather_rows(self, batch: Any, x: Any, out: Any) -> None:
        self._do(_cpu.gather_rows(batch, x, out))

    def argmax(self, rows: Any, x: Any, ids: Any) -> None:
        self._do(_cpu.argmax(self._engine, rows, x, ids))

    def top_rows(self, rows: Any, x: Any, k: int, ids: Any, values: Any) -> None:
        self._do(_cpu.top_rows(self._engine, rows, x, k, ids, values))

    def best_output(self, rows: Any, x: Any, weight: Any, sketch: Any, out: Any, ids: Any) -> None:
        self._do(_cpu.best_output(self._engine, rows, x, weight, sketch, out))
        self.argmax(rows, out, ids)

    # -- ops on one row -----------------------------------------------------------------------
    def top(self, row: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        ids, values = _cpu.top(self._engine, row, k)
        return ids, values

    def gumbel_choice(
        self,
        row: NDArray[np.float32],
        temperature: float,
        seed: int,
        position: int,
        ids: Sequence[int] | NDArray[np.int64] | None = None,
    ) -> int:
        names = None if ids is None else np.ascontiguousarray(ids, np.int64)
        bits = seed & (2**64 - 1)
        return int(_cpu.gumbel_choice(self._engine, row, temperature, bits, position, names))

    def top_together(self, x: Any, rows: int, k: int) -> None:
        return None

    def gumbel_rows(self, x: Any, best: Any, noises: Sequence[Noise | None]) -> None:
        return None


class _PackedStack:
    """Packed parts of a stacked weight, whose outputs lie side by side."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts


def _parts(weight: Weight | Stacked) -> Sequence[Weight]:
    return weight.parts if isinstance(weight, Stacked) else (weight,)


def _layer(kv: KVCache, layer: int) -> tuple[NDArray[Any], NDArray[Any], str]:
    """Keys and values of one layer as the module reads them, and the name of their type."""
    if not isinstance(kv, CpuKV):
        raise TypeError(f"a KV cache of another backend: {type(kv).__name__}")
    return kv.raw_keys[layer], kv.raw_values[layer], kv.dtype
