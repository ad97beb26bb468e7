"""Bytes that the card's kernels touch, metered in the interpreter, are those of the formulas in
ops/cuda/traffic.py, from which `make kernels` and the projection are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quickdraft.ops.cuda.work import Call, DescribedOps
from quickdraft.ops.interface import KVDtype
from quickdraft.state.spec import Recurrent
from tests.support.byte_meter import Metering
from tests.support.ops_cases import random_weight

SPAN = 64
ROWS, FIRST = 16, 100  # of a step, behind so many positions
HEADS, KV_HEADS, DIM = 6, 2, 32


class World:
    """Ops that are metered, and one step of a sequence, of which all rows but the first are drafts."""

    def __init__(self, rows: int = ROWS, replayed: int = 3) -> None:
        self.launcher = Metering()
        self.ops = DescribedOps(None, self.launcher, span=SPAN)
        self.rng = np.random.default_rng(5)
        blocks = (FIRST + rows) // 16 + 1
        self.batch = self.ops.batch(rows, 1, blocks, blocks, 4096)
        arrays = (
            np.arange(rows), np.arange(FIRST, FIRST + rows), [0, rows], np.arange(blocks)[::-1][None],
            np.arange(rows), [0], [replayed], [rows - 1], [0],
        )  # fmt: skip
        self.batch.set(*(np.array(values, np.int32) for values in arrays))
        self.rows, self.blocks = rows, blocks

    def floats(self, *shape: int) -> Any:
        values = self.rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            return self.ops.constant(values)
        buffer = self.ops.empty(*shape)
        buffer[:] = values
        return buffer

    def table(self, *shape: int) -> Any:
        return self.ops.constant(self.rng.standard_normal(shape).astype(np.float32))

    def wanted_in(self, *buffers: Any) -> None:
        """Some linear reads them in 16 bits."""
        for buffer, kind in zip(buffers, ("float16", "bfloat16"), strict=False):
            weight = self.ops.pack(random_weight(kind, 8, buffer.shape[1]))
            self.ops.linear(self.batch.rows, buffer, weight, self.ops.empty(self.rows, 8))


def rms_norm(w: World) -> None:
    x, out = w.floats(ROWS, 700), w.floats(ROWS, 700)
    w.wanted_in(out, out)
    w.ops.rms_norm(w.batch.rows, x, w.floats(700), 1e-6, out)


def head_norm(w: World) -> None:
    w.ops.head_norm(w.batch.rows, w.floats(ROWS, 9 * 40), 2, 6, 40, w.floats(40), 1e-6)


def gated_norm(w: World) -> None:
    x, gate = w.floats(ROWS, 6 * 40), w.floats(ROWS, 6 * 40)
    w.wanted_in(x)
    w.ops.gated_norm(w.batch.rows, x, gate, w.floats(40), 1e-6, x)


def gates(w: World) -> None:
    x, gate, both = w.floats(ROWS, 300), w.floats(ROWS, 300), w.floats(ROWS, 600)
    w.wanted_in(x)
    w.ops.sigmoid_gate(w.batch.rows, x, gate, x)
    w.ops.swiglu(w.batch.rows, both, gate)


def rope(w: World) -> None:
    w.ops.rope(w.batch, w.floats(ROWS, 9 * 40), 7, 40, w.table(FIRST + ROWS, 24), "half")


def gather(w: World) -> None:
    w.ops.gather_rows(w.batch, w.floats(ROWS, 300), w.ops.empty(ROWS, 300))


def choices(w: World) -> None:
    logits = w.floats(ROWS, 5000)
    w.ops.argmax(w.batch.wanted, logits, w.ops.ints(ROWS))
    w.ops.top_rows(w.batch.wanted, logits, 3, w.ops.ints(ROWS * 3), w.ops.empty(ROWS, 3))


def embed(w: World) -> None:
    out = w.ops.empty(ROWS, 160)
    for name in ("int8", "int4", "int4+zero", "bfloat16"):
        w.ops.embed(w.batch, w.ops.pack(random_weight(name, 64, 160)), out)
    w.ops.embed(w.batch, w.ops.pack(random_weight("int8", 64, 160)), out, instead=(3, w.floats(160)))


def grouped_conv(w: World) -> None:
    x, out, deltas = w.floats(ROWS, 64), w.floats(ROWS, 64), w.floats(ROWS, 4 * 16)
    w.ops.grouped_conv(w.batch, x, w.table(2, 64), deltas, 0, out)
    w.ops.grouped_conv(w.batch, x, w.table(2, 64), deltas, 32, out, residual=w.floats(ROWS, 64))


def recurrent(w: World) -> None:
    """Heads are independent and every byte belongs to one, so two of them say what 48 do."""
    shape = Recurrent(4, 16, 40, 2 * 2 * 16 + 4 * 40, 3)
    state = w.ops.recurrent_cache(2, 1, 1, shape, ROWS - 1)
    x, mixed = w.floats(ROWS, shape.channels), w.floats(ROWS, shape.channels)
    w.ops.causal_conv(w.batch, x, w.table(4, shape.channels), state, 1, mixed)
    constants = w.floats(4), w.floats(4)
    w.ops.gated_delta(w.batch, mixed, w.floats(ROWS, 8), *constants, state, 1, w.floats(ROWS, 4 * 40))


def linears(w: World) -> None:
    for name, outputs, inputs, residual in (
        ("int4", 96, 1024, False), ("int8", 96, 2048, True), ("bfloat16", 80, 1024, False),
        ("float32", 64, 160, True), ("int4+minimum", 64, 160, False),
    ):  # fmt: skip
        x, out = w.floats(ROWS, inputs), w.floats(ROWS, outputs)
        weight = w.ops.pack(random_weight(name, outputs, inputs))
        w.ops.linear(w.batch.rows, x, weight, out, bias=w.floats(outputs), residual=out if residual else None)


def attention_of(kind: KVDtype, window: int | None = None, *, block: bool = False) -> Callable[[World], None]:
    def run(w: World) -> None:
        kv = w.ops.kv_cache(1, w.blocks, KV_HEADS, DIM, kind)
        qkv, out = w.floats(ROWS, (HEADS + 2 * KV_HEADS) * DIM), w.floats(ROWS, HEADS * DIM)
        w.ops.kv_write(w.batch, qkv, HEADS, kv, 0)
        w.ops.attention(w.batch, qkv, HEADS, kv, 0, 0.2, out, window=window, block=block)

    return run


# What they move beyond the minimum at the sizes of the model, and why.
EXCEPTIONS = {
    "attention": "spans",
}
CASES = {
    "rms_norm": rms_norm, "head_norm": head_norm, "gated_norm": gated_norm, "gates": gates, "rope": rope,
    "gather": gather, "choices": choices, "embed": embed, "grouped_conv": grouped_conv,
    "recurrent": recurrent, "linears": linears, "bfloat16": attention_of("bfloat16"),
    "int8": attention_of("int8"), "window": attention_of("float16", 50),
    "block": attention_of("float32", 50, block=True),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_formulas_are_what_kernels_touch(name: str) -> None:
    world = World()
    CASES[name](world)
    metered = iter(world.launcher.bytes)
    assert world.ops.calls

    def told(call: Call) -> str:
        return f"{call.name} {call.shape}: {call.traffic}"

    found = [(told(call), sum(next(metered) for _ in call.starts)) for call in world.ops.calls]
    assert found == [(told(call), call.traffic.moved) for call in world.ops.calls]
