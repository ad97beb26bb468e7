"""CudaOps: the Ops protocol over Triton kernels and torch tensors, on a card or, to be tested, in the
interpreter.

Owns allocation, shape checks and recording: a program is the list of its kernel starts, each of which
reads the row counts when it runs. Kernels and their arithmetic live beside this file, one file per kind of
op. Results of a row do not depend on the other rows of a step; they are not the CPU backend's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quickdraft.config import cuda_graphs
from quickdraft.errors import UnsupportedError
from quickdraft.ops.cuda import attention, choose, embed, kv_write, linear
from quickdraft.ops.cuda import rows as row_ops
from quickdraft.ops.cuda.batch import Count, CudaBatch, all_spans
from quickdraft.ops.cuda.buffers import (
    KV_TYPES,
    Buffer,
    CardRows,
    CudaKV,
    card_memory,
    tensor_of,
    to_tensor,
    zeros,
)
from quickdraft.ops.cuda.choices import Choices
from quickdraft.ops.cuda.launch import INTERPRETED, Launcher, ceil_divide
from quickdraft.ops.cuda.program import Capture, CudaGraphs, Program, Start
from quickdraft.ops.cuda.recurrent import CudaRecurrent, raw_state
from quickdraft.ops.cuda.weights import AnyPacked, PackedStack, pack
from quickdraft.ops.interface import (
    MAX_TOP_ROWS,
    KVCache,
    KVDtype,
    Noise,
    RecurrentCache,
    RecurrentShape,
    RopeStyle,
    RowCount,
    Sixteen,
)
from quickdraft.ops.weights import Stacked, Weight


class CudaOps:
    """One card (`device` None: the current one; in the interpreter: the CPU). `span` is for tests:
    positions that attention reduces in one piece."""

    name = "cuda"

    def __init__(
        self, device: str | None = None, launcher: Launcher | None = None, span: int = attention.SPAN
    ) -> None:
        if device is None and not INTERPRETED and not torch.cuda.is_available():
            raise UnsupportedError(
                "the CUDA backend found no card",
                got=f"torch {torch.__version__}, which sees none",
                hint="install a torch built for CUDA and an NVIDIA driver, or use the CPU backend",
            )
        self.device = torch.device(device or ("cpu" if INTERPRETED else "cuda"))
        self.launcher, self._span = launcher or Launcher(), span
        self.activations: Sixteen = "float16"
        self._recording: list[Start] | None = None
        self._memory: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self._choices = Choices(self.launcher, self.device, self.workspace)
        graphs = self.device.type == "cuda" and cuda_graphs()
        self.capture: Capture | None = CudaGraphs(self.workspaces) if graphs else None

    def explain(self) -> str:
        if INTERPRETED:
            return "cuda: Triton kernels in the interpreter, on the CPU, for tests only"
        if self.device.type != "cuda":
            return f"cuda: Triton kernels on {self.device.type}, which cannot run"
        how = "started one by one" if self.capture is None else "each shape of a step a captured graph"
        return f"cuda: Triton kernels on {torch.cuda.get_device_name(self.device)}, {how}"

    # -- allocation ---------------------------------------------------------------------------
    def empty(self, rows: int, width: int) -> Buffer:
        return Buffer(zeros((rows, width), torch.float32, self.device))

    def ints(self, rows: int) -> Buffer:
        return Buffer(zeros((rows,), torch.int32, self.device))

    def constant(self, values: NDArray[np.float32]) -> Buffer:
        return Buffer(to_tensor(np.asarray(values, np.float32), self.device))

    def set_activations(self, kind: Sixteen) -> None:
        self.activations = kind

    def pack(self, weight: Weight | Stacked) -> AnyPacked:
        with card_memory():
            return pack(weight, self.device, KV_TYPES[self.activations][0])

    def sketch(self, weight: Any) -> None:
        return None

    def batch(
        self, max_rows: int, max_sequences: int, table_width: int, pool_blocks: int, vocabulary: int
    ) -> CudaBatch:
        return CudaBatch(
            self.device, max_rows, max_sequences, table_width, pool_blocks, vocabulary, self._span
        )

    def kv_cache(self, layers: int, blocks: int, kv_heads: int, head_dim: int, dtype: KVDtype) -> CudaKV:
        return CudaKV(self.device, layers, blocks, kv_heads, head_dim, dtype)

    def recurrent_cache(
        self, layers: int, slots: int, sequences: int, shape: RecurrentShape, max_pending: int
    ) -> CudaRecurrent:
        return CudaRecurrent(self.device, self.launcher, layers, slots, sequences, shape, max_pending)

    def free_memory_bytes(self) -> int | None:
        if self.device.type != "cuda":
            return None
        torch.cuda.empty_cache()  # the driver needs memory of its own, and cannot use what torch keeps
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(torch.cuda.mem_get_info(self.device)[0]) + cached

    def take_memory(self) -> None:
        """A card's memory is real once it is allocated."""

    def contexts(self, longest: int) -> list[int]:
        if self.capture is None:
            return [longest]
        most = ceil_divide(longest, self._span)
        return [min(spans * self._span, longest) for spans in reversed(all_spans(most))]

    def rows(self, buffer: Buffer, first: int, last: int) -> CardRows:
        return CardRows(buffer.tensor[first:last])

    def join(self, parts: Sequence[Any], axis: int = 0) -> CardRows:
        return CardRows(torch.cat([tensor_of(part, self.device) for part in parts], axis))

    def record(self, function: Callable[[], None]) -> Program:
        if self._recording is not None:
            raise RuntimeError("record inside record: a program is one flat list of ops")
        starts: list[Start] = []
        self._recording = starts
        try:
            function()
        finally:
            self._recording = None
        return Program(starts, self.capture)

    def workspace(self, name: str, count: int, kind: torch.dtype) -> torch.Tensor:
        """`count` numbers that hold nothing once the op is done; the memory behind grows, and is kept."""
        found = self._memory.get((name, kind))
        if found is None or len(found) < count:
            found = self._memory[name, kind] = torch.empty(count, dtype=kind, device=self.device)
        return found if len(found) == count else found[:count]

    def workspaces(self) -> list[torch.Tensor]:
        """All workspaces as they are now."""
        return list(self._memory.values())

    def _do(self, start: Start) -> None:
        if self._recording is not None:
            self._recording.append(start)
            return
        if start.check is not None:
            start.check()
        start.run()

    def _do_rows(self, rows: RowCount, start: Callable[[int], None], *buffers: Any) -> None:
        """Of so many rows, which may be none, of these buffers; what they ask for follows from the count."""
        room = min(len(buffer) for buffer in buffers)
        batch, wanted = (rows.batch, rows.wanted) if isinstance(rows, Count) else (None, False)

        def run() -> None:
            if rows.count:
                start(rows.count)

        self._do(Start(run, batch, *((None, room) if wanted else (room, None))))

    # -- ops over rows ------------------------------------------------------------------------
    def embed(
        self, batch: Any, table: Any, out: Buffer, *, scale: float = 1.0,
        instead: tuple[int, Buffer] | None = None,
    ) -> None:  # fmt: skip
        _expect(not isinstance(table, PackedStack), "a table is one weight, not a stacked one")
        _expect(out.shape[1] == table.inputs, f"out is {out.shape[1]} wide; expected {table.inputs}")
        row = None if instead is None else (instead[0], instead[1].tensor)
        inputs = batch.tokens, table, out.tensor, scale, row
        start = _writes(out, lambda n: embed.start_embed(self.launcher, n, *inputs))
        self._do_rows(batch.rows, start, out)

    def linear(
        self, rows: Any, x: Buffer, weight: AnyPacked, out: Buffer, *, bias: Buffer | None = None,
        residual: Buffer | None = None,
    ) -> None:  # fmt: skip
        parts = weight.parts if isinstance(weight, PackedStack) else (weight,)
        width = sum(part.outputs for part in parts)
        sizes = x.shape[1], out.shape[1]
        _expect(
            sizes == (parts[0].inputs, width),
            f"x and out are {sizes} wide; expected {parts[0].inputs}, {width}",
        )
        _expect(bias is None or bias.shape == (width,), f"expected a bias of {width}")
        _expect(residual is None or residual.shape[1] == width, f"expected a residual {width} wide")
        first = 0
        for part in parts:
            columns = slice(first, first + part.outputs)
            pieces = (
                x, part, out.tensor[:, columns], None if bias is None else bias.tensor[columns],
                None if residual is None else residual.tensor[:, columns], self.workspace,
            )  # fmt: skip
            start = _writes(out, partial(_start_linear, self.launcher, pieces))
            self._do_rows(rows, start, x, out, *(() if residual is None else (residual,)))
            first += part.outputs

    def rms_norm(self, rows: Any, x: Buffer, weight: Buffer, eps: float, out: Buffer) -> None:
        _expect(
            x.shape[1] == out.shape[1] == len(weight),
            f"x, out and weight of {x.shape}, {out.shape}, {weight.shape}",
        )
        tensors = x.tensor, weight.tensor, eps, out
        self._do_rows(rows, lambda n: row_ops.start_rms_norm(self.launcher, n, *tensors), x, out)

    def head_norm(
        self, rows: Any, x: Buffer, first_head: int, heads: int, head_dim: int, weight: Buffer, eps: float
    ) -> None:
        last = (first_head + heads) * head_dim
        _expect(last <= x.shape[1] and len(weight) == head_dim, f"heads up to column {last} of {x.shape}")
        part = x.tensor[:, first_head * head_dim : last]
        inputs = part, heads, weight.tensor, eps, part
        start = _writes(x, lambda n: row_ops.start_head_norm(self.launcher, n, *inputs))
        self._do_rows(rows, start, x)

    def rope(self, batch: Any, x: Buffer, heads: int, head_dim: int, table: Buffer, style: RopeStyle) -> None:
        _expect(table.shape[1] <= head_dim and heads * head_dim <= x.shape[1], f"{heads} heads in {x.shape}")
        inputs = x.tensor, batch.positions, heads, head_dim, table.tensor, style == "interleaved"
        start = _writes(x, lambda n: row_ops.start_rope(self.launcher, n, *inputs))
        self._do_rows(batch.rows, start, x)

    def kv_write(self, batch: Any, qkv: Buffer, query_heads: int, kv: KVCache, layer: int) -> None:
        cache = _cache(kv, batch, qkv, query_heads)
        inputs = qkv.tensor, query_heads, cache, layer
        start = partial(kv_write.start_kv_write, self.launcher, batch, *inputs)
        self._do(Start(start, batch, rows=len(qkv)))

    def attention(
        self, batch: Any, qkv: Buffer, query_heads: int, kv: KVCache, layer: int, scale: float,
        out: Buffer, *, window: int | None = None, block: bool = False,
    ) -> None:  # fmt: skip
        cache = _cache(kv, batch, qkv, query_heads)
        _expect(query_heads % cache.kv_heads == 0, "query heads are a multiple of kv heads")
        _expect(out.shape[1] == query_heads * cache.head_dim, f"out is {out.shape[1]} wide")
        inputs = qkv.tensor, query_heads, cache, layer, scale, out.tensor, window or 0, block, self.workspace
        start = _writes(out, lambda: attention.start_attention(self.launcher, batch, *inputs))
        self._do(Start(start, batch, rows=min(len(qkv), len(out)), spans=True))

    def grouped_conv(
        self, batch: Any, x: Buffer, base: Buffer, deltas: Buffer, first: int, out: Buffer, *,
        residual: Buffer | None = None,
    ) -> None:  # fmt: skip
        part = deltas.tensor[:, first : first + deltas.shape[1] // 2]
        added = None if residual is None else residual.tensor
        inputs = x.tensor, base.tensor, part, batch.row_starts, batch.sequence_of, added, out.tensor
        buffers = x, deltas, out
        start = _writes(out, lambda n: row_ops.start_grouped_conv(self.launcher, n, *inputs))
        self._do_rows(batch.rows, start, *buffers)

    def causal_conv(
        self, batch: Any, x: Buffer, weight: Buffer, state: RecurrentCache, layer: int, out: Buffer
    ) -> None:
        cache = raw_state(state)

        def start() -> None:
            inputs = batch.states(), x.tensor, weight.tensor, layer, out.tensor
            cache.start_conv(*inputs, len(batch.starts) - 1, batch.longest)

        room = min(len(x), len(out))
        self._do(Start(_writes(out, start), batch, rows=room, check=lambda: cache.check_step(batch)))

    def gated_delta(
        self, batch: Any, qkv: Buffer, gates: Buffer, rate: Buffer, bias: Buffer, state: RecurrentCache,
        layer: int, out: Buffer,
    ) -> None:  # fmt: skip
        cache = raw_state(state)

        def start() -> None:
            inputs = batch.states(), qkv.tensor, gates.tensor, rate.tensor, bias.tensor, layer, out.tensor
            pending = min(batch.most_pending, cache.max_pending)
            cache.start_delta(*inputs, len(batch.starts) - 1, pending)

        room = min(len(qkv), len(gates), len(out))
        self._do(Start(_writes(out, start), batch, rows=room, check=lambda: cache.check_step(batch)))

    def gated_norm(self, rows: Any, x: Buffer, gate: Buffer, weight: Buffer, eps: float, out: Buffer) -> None:
        inputs = x.tensor, x.shape[1] // len(weight), weight.tensor, eps, out.tensor, gate.tensor, out
        self._do_rows(rows, lambda n: row_ops.start_head_norm(self.launcher, n, *inputs), x, gate, out)

    def sigmoid_gate(self, rows: Any, x: Buffer, gate: Buffer, out: Buffer) -> None:
        inputs = x.tensor, gate.tensor, out
        self._do_rows(rows, lambda n: row_ops.start_gate(self.launcher, n, *inputs, silu=False), x, gate, out)

    def swiglu(self, rows: Any, gate_up: Buffer, out: Buffer) -> None:
        half = gate_up.shape[1] // 2
        _expect(out.shape[1] == half, f"out is {out.shape[1]} wide; expected {half}")
        tensors = gate_up.tensor[:, :half], gate_up.tensor[:, half:], out
        self._do_rows(rows, lambda n: row_ops.start_gate(self.launcher, n, *tensors, silu=True), gate_up, out)

    def gather_rows(self, batch: Any, x: Buffer, out: Buffer) -> None:
        inputs = x.tensor, batch.wanted_rows, out.tensor
        start = _writes(out, lambda n: row_ops.start_gather(self.launcher, n, *inputs))
        self._do_rows(batch.wanted, start, out)

    def argmax(self, rows: Any, x: Buffer, ids: Buffer) -> None:
        inputs = x.tensor, ids.tensor, self.workspace
        self._do_rows(rows, lambda n: choose.start_argmax(self.launcher, n, *inputs), x, ids)

    def top_rows(self, rows: Any, x: Buffer, k: int, ids: Buffer, values: Buffer) -> None:
        _expect(1 <= k <= MAX_TOP_ROWS, f"k is {k}; expected 1..{MAX_TOP_ROWS}")
        inputs = x.tensor, k, ids.tensor, values.tensor, self.workspace
        self._do_rows(rows, lambda n: choose.start_top_rows(self.launcher, n, *inputs), x, values)

    def best_output(self, rows: Any, x: Buffer, weight: Any, sketch: Any, out: Buffer, ids: Buffer) -> None:
        self.linear(rows, x, weight, out)
        self.argmax(rows, out, ids)

    # -- ops on one row -----------------------------------------------------------------------
    def top(self, row: Any, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return self._choices.top(row, k)

    def gumbel_choice(
        self, row: Any, temperature: float, seed: int, position: int,
        ids: Sequence[int] | NDArray[np.int64] | None = None,
    ) -> int:  # fmt: skip
        return self._choices.gumbel(row, Noise(temperature, seed, position), ids)

    def top_together(
        self, x: Buffer, rows: int, k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
        return self._choices.top_of_rows(x.tensor, rows, k) if k <= MAX_TOP_ROWS else None

    def gumbel_rows(self, x: Buffer, best: Buffer, noises: Sequence[Noise | None]) -> NDArray[np.int64]:
        _expect(len(noises) <= min(len(x), len(best)), f"{len(noises)} rows of {x.shape}")
        return self._choices.gumbel_rows(x.tensor, best.tensor, noises)


def _start_linear(launcher: Launcher, pieces: Any, rows: int) -> None:
    linear.start_linear(launcher, rows, *pieces)


def _writes(out: Buffer, start: Callable[..., None]) -> Callable[..., None]:
    """Copies of `out` in 16 bits are out of date once `start` is run; starts that write them too say so."""

    def run(*rows: int) -> None:
        out.copied = 0
        start(*rows)

    return run


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _cache(kv: KVCache, batch: CudaBatch, qkv: Buffer, query_heads: int) -> CudaKV:
    if not isinstance(kv, CudaKV):
        raise TypeError(f"a KV cache of another backend: {type(kv).__name__}")
    width = (query_heads + 2 * kv.kv_heads) * kv.head_dim
    _expect(qkv.shape[1] == width, f"qkv rows are {qkv.shape[1]} wide; expected {width}")
    _expect(kv.blocks >= batch.limits[3], f"a pool of {kv.blocks} blocks; the batch counts {batch.limits[3]}")
    return kv
