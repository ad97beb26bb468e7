"""DescribingOps: the CPU backend that writes down what each op it records reads and computes.

One OpWork per recorded op, in the program's order, so that times of a program can be put beside their
roofs. Activations stay in caches and count no bytes, nor do single rows of the embedding: only weights,
recurrent states and cached keys and values do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from quickdraft.bench.roofline import Rates
from quickdraft.ops.cpu.backend import CpuOps
from quickdraft.ops.interface import BLOCK_TOKENS

_MACS_OF: Final = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int8": "Q8_0",
    "int8+zero": "Q8_0",
    "int8+zero, bfloat16 scales": "Q8_0",
}  # else below 8 bits


@dataclass(frozen=True, slots=True)
class OpWork:
    """What one op needs from memory and arithmetic, by rows of the step and tokens before it.

    A row attends to the context and to the rows up to itself: context + (rows + 1) / 2 keys on average.
    """

    name: str  # ops of equal work share it
    weight_bytes: int = 0  # of weights and states, moved once whatever the rows
    key_bytes: int = 0  # keys and values of one position
    row_macs: int = 0
    key_macs: int = 0  # of one row and one position
    weight_type: str = "F32"  # a GGUF type of the same arithmetic
    window: int | None = None  # positions of context that are seen; None: all

    def bytes(self, rows: int, context: int) -> int:
        return self.weight_bytes + self.key_bytes * (self._seen(context) + rows)

    def macs(self, rows: int, context: int) -> float:
        return rows * (self.row_macs + self.key_macs * (self._seen(context) + (rows + 1) / 2))

    def _seen(self, context: int) -> int:
        return context if self.window is None else min(context, self.window)

    def roof_seconds(self, rows: int, context: int, rates: Rates) -> float:
        """max(bytes / bandwidth, MACs / peak); 0 for an op of activations only."""
        return max(
            self.bytes(rows, context) / rates.bytes_per_second,
            self.macs(rows, context) / rates.macs_per_second(self.weight_type),
        )


class DescribingOps(CpuOps):
    """CpuOps whose `works` describes the ops of the program recorded last."""

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.works: list[OpWork] = []
        self._next: list[OpWork] = []

    def record(self, function: Callable[[], None]) -> Any:
        self.works = []
        program = super().record(function)
        assert len(self.works) == len(program), f"{len(self.works)} of {len(program)} ops described"
        return program

    def sketch(self, weight: Any) -> None:
        """Nothing: the program described last is then the one that gives whole rows of logits."""

    def _do(self, op: Any) -> None:
        self.works.append(self._next.pop(0) if self._next else OpWork("other"))
        super()._do(op)

    def embed(self, batch: Any, table: Any, out: Any, **options: Any) -> None:
        self._next = [OpWork("embed")]
        super().embed(batch, table, out, **options)

    def linear(
        self, rows: Any, x: Any, weight: Any, out: Any, *, bias: Any = None, residual: Any = None
    ) -> None:
        self._next = [_linear(part) for part in getattr(weight, "parts", [weight])]
        super().linear(rows, x, weight, out, bias=bias, residual=residual)

    def attention(
        self,
        batch: Any,
        qkv: Any,
        query_heads: int,
        kv: Any,
        layer: int,
        scale: float,
        out: Any,
        *,
        window: int | None = None,
        block: bool = False,
    ) -> None:
        key_bytes = kv.bytes_per_block // len(kv.keys) // BLOCK_TOKENS
        kind = "Q8_0" if kv.dtype == "int8" else "F32"
        macs = 2 * out.shape[1]
        self._next = [
            OpWork("attention", key_bytes=key_bytes, key_macs=macs, weight_type=kind, window=window)
        ]
        super().attention(batch, qkv, query_heads, kv, layer, scale, out, window=window, block=block)

    def rms_norm(self, rows: Any, x: Any, weight: Any, eps: float, out: Any) -> None:
        self._next = [OpWork("rms_norm")]
        super().rms_norm(rows, x, weight, eps, out)

    def head_norm(
        self, rows: Any, x: Any, first_head: int, heads: int, head_dim: int, weight: Any, eps: float
    ) -> None:
        self._next = [OpWork("head_norm")]
        super().head_norm(rows, x, first_head, heads, head_dim, weight, eps)

    def rope(self, batch: Any, x: Any, heads: int, head_dim: int, table: Any, style: Any) -> None:
        self._next = [OpWork("rope")]
        super().rope(batch, x, heads, head_dim, table, style)

    def kv_write(self, batch: Any, qkv: Any, query_heads: int, kv: Any, layer: int) -> None:
        self._next = [OpWork("kv_write")]
        super().kv_write(batch, qkv, query_heads, kv, layer)

    def causal_conv(self, batch: Any, x: Any, weight: Any, state: Any, layer: int, out: Any) -> None:
        self._next = [OpWork("causal_conv")]
        super().causal_conv(batch, x, weight, state, layer, out)

    def gated_delta(
        self, batch: Any, qkv: Any, gates: Any, rate: Any, bias: Any, state: Any, layer: int, out: Any
    ) -> None:
        floats = state.square_floats  # read and written once, whatever the rows; three products per row
        self._next = [OpWork("gated_delta", weight_bytes=2 * 4 * floats, row_macs=3 * floats)]
        super().gated_delta(batch, qkv, gates, rate, bias, state, layer, out)

    def gated_norm(self, rows: Any, x: Any, gate: Any, weight: Any, eps: float, out: Any) -> None:
        self._next = [OpWork("gated_norm")]
        super().gated_norm(rows, x, gate, weight, eps, out)

    def sigmoid_gate(self, rows: Any, x: Any, gate: Any, out: Any) -> None:
        self._next = [OpWork("sigmoid_gate")]
        super().sigmoid_gate(rows, x, gate, out)

    def swiglu(self, rows: Any, gate_up: Any, out: Any) -> None:
        self._next = [OpWork("swiglu")]
        super().swiglu(rows, gate_up, out)

    def gather_rows(self, batch: Any, x: Any, out: Any) -> None:
        self._next = [OpWork("gather_rows")]
        super().gather_rows(batch, x, out)

    def argmax(self, rows: Any, x: Any, ids: Any) -> None:
        self._next = [OpWork("argmax")]
        super().argmax(rows, x, ids)


def _linear(weight: Any) -> OpWork:
    outputs, inputs = weight.shape
    name = f"linear {outputs} x {inputs} {weight.format}"
    kind = _MACS_OF.get(weight.format, "Q4_0")
    return OpWork(name, weight_bytes=weight.nbytes, row_macs=outputs * inputs, weight_type=kind)
