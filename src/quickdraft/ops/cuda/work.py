"""DescribedOps: a CudaOps that writes down, op by op, what each run started and what that moves.

Every op of every program is described as it runs, so ops, their order, their shapes and their kernel starts
are those of the model that was recorded, whatever it is. The launcher must keep what it is asked for
(launch.Watching, over tensors without memory or with it). Bytes are traffic's formulas; arithmetic is that of
whole tiles. Knows no model and no time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quickdraft.ops.cuda import traffic
from quickdraft.ops.cuda.backend import CudaOps
from quickdraft.ops.cuda.batch import CudaBatch
from quickdraft.ops.cuda.buffers import Buffer
from quickdraft.ops.cuda.launch import Started, Watching, ceil_divide
from quickdraft.ops.cuda.program import Start
from quickdraft.ops.cuda.recurrent import raw_state
from quickdraft.ops.cuda.traffic import StepRows, Traffic
from quickdraft.ops.cuda.weights import PackedGroups, PackedStack
from quickdraft.ops.interface import RopeStyle


@dataclass(frozen=True, slots=True)
class Call:
    """One op as it was run; ops of one name and shape do the same work. `flops` are those of whole tiles,
    `least_flops` those of its rows; 0 where bytes alone take time."""

    name: str
    shape: str
    starts: tuple[Started, ...]
    traffic: Traffic
    flops: int = 0
    least_flops: int = 0


class DescribedBatch(CudaBatch):
    """Also says where its rows lie."""

    first_positions: list[int]  # of each sequence's first row

    def set(self, tokens: Any, positions: Any, row_starts: Any, *rest: Any, **more: Any) -> None:
        super().set(tokens, positions, row_starts, *rest, **more)
        self.first_positions = [int(positions[start]) for start in row_starts[:-1]]

    def step(self) -> StepRows:
        assert self.sequences == 1, "formulas are of one sequence"
        _, replayed, drafted = self.slot_numbers[0]
        return StepRows(self.starts[-1], self.first_positions[0], replayed, drafted)


Describe = Callable[[tuple[Started, ...]], Call]


class DescribedOps(CudaOps):
    """`calls` are those of the programs run since it was cleared."""

    launcher: Watching

    def __init__(self, device: str | None, launcher: Watching, **options: Any) -> None:
        super().__init__(device, launcher, **options)
        self.calls: list[Call] = []
        self._next: list[Describe] = []

    def batch(
        self, max_rows: int, max_sequences: int, table_width: int, pool_blocks: int, vocabulary: int
    ) -> DescribedBatch:
        limits = max_rows, max_sequences, table_width, pool_blocks, vocabulary
        return DescribedBatch(self.device, *limits, span=self._span)

    def _do(self, start: Start) -> None:
        assert self._next, "an op without a description: DescribedOps must know it"
        super()._do(replace(start, run=partial(self._watched, self._next.pop(0), start.run)))

    def _watched(self, describe: Describe, run: Callable[[], None]) -> None:
        before = len(self.launcher.seen)
        run()
        starts = tuple(self.launcher.seen[before:])
        if starts:  # else a step without such rows
            self.calls.append(describe(starts))

    def _rows(self, name: str, shape: str, of: Callable[[], Traffic]) -> None:
        self._next = [lambda starts: Call(name, shape, starts, of())]

    # -- ops: each says what it moves, then is what it was ------------------------------------------
    def embed(self, batch: Any, table: Any, out: Buffer, **options: Any) -> None:
        instead = options.get("instead") is not None
        width = out.shape[1]
        self._rows("embed", f"{width}", lambda: traffic.embedded(batch.rows.count, table, instead))
        super().embed(batch, table, out, **options)

    def linear(
        self, rows: Any, x: Buffer, weight: Any, out: Buffer, *, bias: Any = None, residual: Any = None
    ) -> None:
        parts = weight.parts if isinstance(weight, PackedStack) else (weight,)
        added = bias is not None, residual is not None
        self._next = [partial(_linear, rows, part, *added) for part in parts]
        super().linear(rows, x, weight, out, bias=bias, residual=residual)

    def rms_norm(self, rows: Any, x: Buffer, weight: Buffer, eps: float, out: Buffer) -> None:
        width = len(weight)
        self._rows(
            "rms_norm",
            f"{width}",
            lambda: traffic.rows_of(rows.count, width, 1, _copies(out), once=width),
        )
        super().rms_norm(rows, x, weight, eps, out)

    def head_norm(
        self, rows: Any, x: Buffer, first_head: int, heads: int, head_dim: int, weight: Buffer, eps: float
    ) -> None:
        width = heads * head_dim
        self._rows(
            "head_norm",
            f"{heads} x {head_dim}",
            lambda: traffic.rows_of(rows.count, width, 1, once=head_dim),
        )
        super().head_norm(rows, x, first_head, heads, head_dim, weight, eps)

    def rope(self, batch: Any, x: Buffer, heads: int, head_dim: int, table: Buffer, style: RopeStyle) -> None:
        turned = table.shape[1]
        self._rows("rope", f"{heads} x {turned}", lambda: traffic.rope(batch.rows.count, heads, turned))
        super().rope(batch, x, heads, head_dim, table, style)

    def kv_write(self, batch: Any, qkv: Buffer, query_heads: int, kv: Any, layer: int) -> None:
        shape = f"{kv.kv_heads} x {kv.head_dim}"
        self._rows("kv_write", shape, lambda: traffic.written_keys(batch.step(), kv))
        super().kv_write(batch, qkv, query_heads, kv, layer)

    def attention(
        self, batch: Any, qkv: Buffer, query_heads: int, kv: Any, layer: int, scale: float, out: Buffer, *,
        window: int | None = None, block: bool = False,
    ) -> None:  # fmt: skip
        form = query_heads, kv, window or 0, block, self._span
        self._next = [lambda starts: _attention(batch.step(), form, starts)]
        super().attention(batch, qkv, query_heads, kv, layer, scale, out, window=window, block=block)

    def grouped_conv(
        self, batch: Any, x: Buffer, base: Buffer, deltas: Buffer, first: int, out: Buffer, *,
        residual: Buffer | None = None,
    ) -> None:  # fmt: skip
        width, groups, added = x.shape[1], deltas.shape[1] // 4, residual is not None
        self._rows(
            "grouped_conv",
            f"{width}",
            lambda: traffic.grouped_conv(batch.rows.count, width, groups, added, _copies(out)),
        )
        super().grouped_conv(batch, x, base, deltas, first, out, residual=residual)

    def causal_conv(self, batch: Any, x: Buffer, weight: Buffer, state: Any, layer: int, out: Buffer) -> None:
        channels = x.shape[1]
        shape = f"{channels}"
        self._rows("causal_conv", shape, lambda: traffic.convolved(batch.step(), channels))
        super().causal_conv(batch, x, weight, state, layer, out)

    def gated_delta(
        self, batch: Any, qkv: Buffer, gates: Buffer, rate: Buffer, bias: Buffer, state: Any, layer: int,
        out: Buffer,
    ) -> None:  # fmt: skip
        cache = raw_state(state)
        self._next = [lambda starts: _delta(batch.step(), cache, starts)]
        super().gated_delta(batch, qkv, gates, rate, bias, state, layer, out)

    def gated_norm(self, rows: Any, x: Buffer, gate: Buffer, weight: Buffer, eps: float, out: Buffer) -> None:
        width, dim = x.shape[1], len(weight)
        self._rows(
            "gated_norm",
            f"{width}",
            lambda: traffic.rows_of(rows.count, width, 2, _copies(out), once=dim),
        )
        super().gated_norm(rows, x, gate, weight, eps, out)

    def sigmoid_gate(self, rows: Any, x: Buffer, gate: Buffer, out: Buffer) -> None:
        width = out.shape[1]
        self._rows("sigmoid_gate", f"{width}", lambda: traffic.rows_of(rows.count, width, 2, _copies(out)))
        super().sigmoid_gate(rows, x, gate, out)

    def swiglu(self, rows: Any, gate_up: Buffer, out: Buffer) -> None:
        width = out.shape[1]
        self._rows("swiglu", f"{width}", lambda: traffic.rows_of(rows.count, width, 2, _copies(out)))
        super().swiglu(rows, gate_up, out)

    def gather_rows(self, batch: Any, x: Buffer, out: Buffer) -> None:
        width = out.shape[1]
        self._rows(
            "gather_rows", f"{width}", lambda: traffic.gathered(batch.wanted.count, width, _copies(out))
        )
        super().gather_rows(batch, x, out)

    def argmax(self, rows: Any, x: Buffer, ids: Buffer) -> None:
        width = x.shape[1]
        self._rows("argmax", f"{width}", lambda: traffic.best(rows.count, width))
        super().argmax(rows, x, ids)

    def top_rows(self, rows: Any, x: Buffer, k: int, ids: Buffer, values: Buffer) -> None:
        width = x.shape[1]
        self._rows("top_rows", f"{k} of {width}", lambda: traffic.several_best(rows.count, width, k))
        super().top_rows(rows, x, k, ids, values)


def _copies(out: Buffer) -> int:
    """In 16 bits, written beside it."""
    return sum(copy is not None for copy in out.first_copies())


def _linear(rows: Any, weight: Any, bias: bool, residual: bool, starts: tuple[Started, ...]) -> Call:
    count, main = rows.count, traffic.main_linear(starts)
    each = 2 * weight.inputs * weight.outputs
    flops = main.grid[2] * main.numbers["M"] * each, count * each
    bits = (
        weight.bits + weight.high_bits
        if isinstance(weight, PackedGroups)
        else 8 * weight.values.element_size()
    )
    shape = f"{weight.outputs} x {weight.inputs}, {bits} bits"
    return Call("linear", shape, starts, traffic.linear(count, weight, bias, residual, starts), *flops)


def _attention(step: StepRows, form: tuple[int, Any, int, bool, int], starts: tuple[Started, ...]) -> Call:
    heads, kv, window, block, _ = form
    each, tiles, least = 4 * kv.head_dim, 0, 0
    for start in starts:
        if start.kernel.__name__ == "attend_span":
            given = dict(zip(start.kernel.arg_names, start.arguments, strict=False))
            first, last = given["first_row"], min(given["last_row"], step.count)
            if first >= last:  # rows that fill the shape up
                continue
            height = start.numbers["M"]
            places = ceil_divide((last - first) * heads // kv.kv_heads, height) * height * kv.kv_heads
            reach = [
                min(step.end if block else step.first + row + 1, window or step.end)
                for row in range(first, last)
            ]
            tiles += places * (min(max(reach), window) + last - first if window else max(reach))
            least += heads * sum(reach)
    shape = f"{heads} / {kv.kv_heads} x {kv.head_dim}" + (f", window {window}" if window else "")
    moved = traffic.attention(step, *form, starts)
    return Call("attention", shape, starts, moved, each * tiles, each * least)


def _delta(step: StepRows, cache: Any, starts: tuple[Started, ...]) -> Call:
    shape = cache.shape
    flops = 7 * cache.square * (step.count + step.replayed)
    moved = traffic.delta(step, shape, cache.all_keys, starts)
    sizes = f"{shape.heads} x {shape.key_dim} x {shape.value_dim}"
    return Call("gated_delta", sizes, starts, moved, flops, flops)
