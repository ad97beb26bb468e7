"""Bytes that the card's kernels touch, metered in the interpreter, are those of the formulas in
ops/cuda/traffic.py, from which `make kernels` and the projection are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quickdraft.bench import card_steps
from quickdraft.models.footprint import Footprint
from quickdraft.models.known import QWEN_27B
from quickdraft.ops.cuda.batch import padded_rows
from quickdraft.ops.cuda.work import Call, DescribedOps
from quickdraft.ops.interface import KVDtype
from quickdraft.state.spec import Recurrent
from tests.support.byte_meter import Metering
from tests.support.ops_cases import random_weight

SPAN = 64
FIRST, MOST_PENDING = 100, 15  # positions before the step's rows, rows of it that are drafts
STEPS = {1: 2048, 16: 25_000}  # rows behind tokens, at the sizes of the model
MOST_BEYOND = 1.1  # of the minimum
# and what may move more, as one kernel writes what the next one reads, mostly in the card's cache
EXCEPTIONS = {"attention": 1.2}
HEADS, KV_HEADS, DIM = 6, 2, 32


class World:
    """Ops that are metered, and one step of a sequence, of which all rows but the first are drafts; buffers
    have `room` for the rows of the captured shape."""

    def __init__(self, rows: int, launcher: Any = None) -> None:
        self.launcher = Metering() if launcher is None else launcher
        self.ops = DescribedOps(None, self.launcher, span=SPAN)
        self.rng, self.room = np.random.default_rng(5), padded_rows(rows) or rows
        self.blocks = blocks = (FIRST + rows) // 16 + 1
        self.batch = self.ops.batch(self.room, 1, blocks, blocks, 4096)
        arrays = (
            np.arange(rows), np.arange(FIRST, FIRST + rows), [0, rows], np.arange(blocks)[::-1][None],
            np.arange(rows), [0], [min(rows - 1, 3)], [rows - 1], [0],
        )  # fmt: skip
        self.batch.set(*(np.array(values, np.int32) for values in arrays))

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
            self.ops.linear(self.batch.rows, buffer, weight, self.ops.empty(self.room, 8))


def rms_norm(w: World) -> None:
    x, out = w.floats(w.room, 700), w.floats(w.room, 700)
    w.wanted_in(out, out)
    w.ops.rms_norm(w.batch.rows, x, w.floats(700), 1e-6, out)


def head_norm(w: World) -> None:
    w.ops.head_norm(w.batch.rows, w.floats(w.room, 9 * 40), 2, 6, 40, w.floats(40), 1e-6)


def gated_norm(w: World) -> None:
    x, gate = w.floats(w.room, 6 * 40), w.floats(w.room, 6 * 40)
    w.wanted_in(x)
    w.ops.gated_norm(w.batch.rows, x, gate, w.floats(40), 1e-6, x)


def gates(w: World) -> None:
    x, gate, both = w.floats(w.room, 300), w.floats(w.room, 300), w.floats(w.room, 600)
    w.wanted_in(x)
    w.ops.sigmoid_gate(w.batch.rows, x, gate, x)
    w.ops.swiglu(w.batch.rows, both, gate)


def rope(w: World) -> None:
    w.ops.rope(w.batch, w.floats(w.room, 9 * 40), 7, 40, w.table(FIRST + w.room, 24), "half")


def gather(w: World) -> None:
    out = w.ops.empty(w.room, 300)
    w.wanted_in(out)
    w.ops.gather_rows(w.batch, w.floats(w.room, 300), out)


def choices(w: World) -> None:
    logits = w.floats(w.room, 5000)
    w.ops.argmax(w.batch.wanted, logits, w.ops.ints(w.room))
    w.ops.top_rows(w.batch.wanted, logits, 3, w.ops.ints(w.room * 3), w.ops.empty(w.room, 3))


def embed(w: World) -> None:
    out = w.ops.empty(w.room, 160)
    for name in ("int8", "int4", "int4+zero", "bfloat16"):
        w.ops.embed(w.batch, w.ops.pack(random_weight(name, 64, 160)), out)
    w.ops.embed(w.batch, w.ops.pack(random_weight("int8", 64, 160)), out, instead=(3, w.floats(160)))
    w.ops.embed(w.batch, w.ops.pack(random_weight("q5_k", 64, 256)), w.ops.empty(w.room, 256))


def grouped_conv(w: World) -> None:
    x, out, deltas = w.floats(w.room, 64), w.floats(w.room, 64), w.floats(w.room, 4 * 16)
    w.wanted_in(out, out)
    w.ops.grouped_conv(w.batch, x, w.table(2, 64), deltas, 0, out)
    w.ops.grouped_conv(w.batch, x, w.table(2, 64), deltas, 32, out, residual=w.floats(w.room, 64))


def recurrent(w: World) -> None:
    """Heads are independent and every byte belongs to one, so two of them say what 48 do."""
    shape = Recurrent(4, 16, 40, 2 * 2 * 16 + 4 * 40, 3)
    state = w.ops.recurrent_cache(2, 1, 1, shape, 15)
    x, mixed = w.floats(w.room, shape.channels), w.floats(w.room, shape.channels)
    w.ops.causal_conv(w.batch, x, w.table(4, shape.channels), state, 1, mixed)
    constants = w.floats(4), w.floats(4)
    w.ops.gated_delta(w.batch, mixed, w.floats(w.room, 8), *constants, state, 1, w.floats(w.room, 4 * 40))


def linears(w: World) -> None:
    for name, outputs, inputs, residual in (
        ("int4", 96, 1024, False), ("int8", 96, 2048, True), ("bfloat16", 80, 1024, False),
        ("float32", 64, 160, True), ("int4+minimum", 64, 160, False), ("q6_k", 64, 256, False),
    ):  # fmt: skip
        x, out = w.floats(w.room, inputs), w.floats(w.room, outputs)
        weight = w.ops.pack(random_weight(name, outputs, inputs))
        w.ops.linear(w.batch.rows, x, weight, out, bias=w.floats(outputs), residual=out if residual else None)


def attention_of(kind: KVDtype, window: int | None = None, *, block: bool = False) -> Callable[[World], None]:
    def run(w: World) -> None:
        kv = w.ops.kv_cache(1, w.blocks, KV_HEADS, DIM, kind)
        qkv, out = w.floats(w.room, (HEADS + 2 * KV_HEADS) * DIM), w.floats(w.room, HEADS * DIM)
        w.ops.kv_write(w.batch, qkv, HEADS, kv, 0)
        w.ops.attention(w.batch, qkv, HEADS, kv, 0, 0.2, out, window=window, block=block)

    return run


CASES = {
    "rms_norm": rms_norm, "head_norm": head_norm, "gated_norm": gated_norm, "gates": gates, "rope": rope,
    "gather": gather, "choices": choices, "embed": embed, "grouped_conv": grouped_conv,
    "recurrent": recurrent, "linears": linears, "bfloat16": attention_of("bfloat16"),
    "int8": attention_of("int8"), "window": attention_of("float16", 50),
    "block": attention_of("float32", 50, block=True),
}  # fmt: skip


STEPS_OF = [*((name, 16) for name in CASES), ("linears", 1), ("grouped_conv", 1), ("recurrent", 1),
            ("recurrent", 5), ("bfloat16", 5), ("int8", 5)]  # fmt: skip


@pytest.mark.parametrize(("name", "rows"), STEPS_OF)
def test_formulas_are_what_kernels_touch(name: str, rows: int) -> None:
    """As captured: with rows and spans that fill the shape up."""
    world = World(rows)
    shape = world.batch.shape()
    assert shape is not None
    with world.batch.padded(shape):
        CASES[name](world)
    metered = iter(world.launcher.bytes)
    assert world.ops.calls

    def told(call: Call) -> str:
        return f"{call.name} {call.shape}: {call.traffic}"

    found = [(told(call), sum(next(metered) for _ in call.starts)) for call in world.ops.calls]
    assert found == [(told(call), call.traffic.moved) for call in world.ops.calls]


@pytest.mark.parametrize("rows", STEPS)
def test_a_step_moves_little_beyond_the_minimum(rows: int) -> None:
    """Qwen3.8-27B's own program, every op of it; and its weights are read once."""
    works = card_steps.step_works(rows, STEPS[rows])
    assert {work.call.name for work in works} == {
        "embed", "rms_norm", "linear", "causal_conv", "gated_delta", "gated_norm", "swiglu", "head_norm",
        "rope", "kv_write", "attention", "sigmoid_gate", "gather_rows", "argmax",
    }  # fmt: skip
    for work in works:
        call, most = work.call, EXCEPTIONS.get(work.call.name, MOST_BEYOND)
        assert call.traffic.least <= call.traffic.moved <= most * call.traffic.least, call.name
        if rows == 16:  # a whole tile
            assert call.least_flops <= call.flops <= MOST_BEYOND * call.least_flops, call.name
    moved, least = (
        sum(work.calls * getattr(work.call.traffic, part) for work in works) for part in ("moved", "least")
    )
    weights = Footprint(QWEN_27B).step_bytes(STEPS[rows])
    assert weights < moved <= 1.05 * least and moved < 1.3 * weights
