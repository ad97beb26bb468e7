"""What the parity tests of a backend share: random weights of every format, steps, and one scenario
that calls every op and returns what each wrote, so that two backends (or two thread counts) can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.ops.weights import Dense, Int4Groups, Int8Groups, TwoLevel, Weight

DENSE = ("float32", "float16", "bfloat16")
# of quantised folders: zero points, scales of both types, groups of the whole row, inputs in another order
FOLDER_FORMATS = tuple(
    f"{bits}{more}"
    for bits in ("int8", "int4")
    for more in ("+zero", "+zero+bfloat16", "+zero+row", "+order")
)
FORMATS = (
    *DENSE, "int8", "int4", "int4+minimum", *FOLDER_FORMATS, "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"
)  # fmt: skip
TWO_LEVEL = FORMATS[-3:]  # inputs in multiples of 256
ODD_ROWS = (1, 2, 7, 16, 33, 65)


def random_weight(name: str, outputs: int, inputs: int, seed: int = 0) -> Weight:
    """Codes over their whole range (-128 included), scales of both signs."""
    rng = np.random.default_rng([seed, outputs, inputs, FORMATS.index(name)])
    if name in DENSE:
        values = rng.standard_normal((outputs, inputs)).astype(np.float32)
        return Dense(values.astype({"bfloat16": ml_dtypes.bfloat16}.get(name, name)))
    if name in FOLDER_FORMATS:
        return _folder_weight(name, outputs, inputs, rng)

    def numbers(steps: tuple[int, int], group: int) -> TwoLevel | Any:
        if name not in TWO_LEVEL:
            return (rng.standard_normal((outputs, inputs // 32)) * 0.1).astype(np.float16)
        halves = (rng.standard_normal((outputs, inputs // 256)) * 0.01).astype(np.float16)
        return TwoLevel(halves, rng.integers(*steps, (outputs, inputs // group)).astype(np.int8))

    steps, group = ((-128, 128), 16) if name == "q6_k" else ((0, 64), 32)
    scales = numbers(steps, group)
    minimums = None if name in ("int8", "int4", "q5_0", "q6_k") else numbers(steps, group)
    if name in ("int4", "int4+minimum", "q4_k"):
        return Int4Groups(rng.integers(0, 16, (outputs, inputs)).astype(np.uint8), scales, minimums)
    bits = {"int8": 8, "q6_k": 6}.get(name, 5)
    lowest = 0 if minimums is not None else -(1 << bits - 1)
    codes = rng.integers(lowest, lowest + (1 << bits), (outputs, inputs)).astype(np.int8)
    return Int8Groups(codes, scales, minimums, group, bits)


def _folder_weight(name: str, outputs: int, inputs: int, rng: np.random.Generator) -> Weight:
    group = inputs if "+row" in name else 32
    shape = outputs, inputs // group
    scales = (rng.standard_normal(shape) * 0.1).astype(
        ml_dtypes.bfloat16 if "bfloat16" in name else np.float16
    )
    low, high = (0, 17) if "int4" in name else (-128, 129)
    zeros = rng.integers(low, high, shape).astype(np.int16) if "+zero" in name else None
    order = rng.permutation(inputs).astype(np.int32) if "+order" in name else None
    if "int4" in name:
        paired = "+zero+" in name
        high = 256 if paired else 16
        codes = rng.integers(0, high, (outputs, inputs >> paired)).astype(np.uint8)
        return Int4Groups(codes, scales, None, group, zeros, order, paired)
    codes = rng.integers(-128, 128, (outputs, inputs)).astype(np.int8)
    return Int8Groups(codes, scales, None, group, 8, zeros, order)


def awkward_rows(count: int, width: int, seed: int = 0) -> NDArray[np.float32]:
    """Normal numbers, with zero rows, zero groups, a spike, huge and tiny rows and denormals among them."""
    rng = np.random.default_rng([seed, width])
    x = rng.standard_normal((count, width)).astype(np.float32)
    for row in range(count):
        kind = row % 7
        if kind == 1:
            x[row, : width // 2] = 0
        elif kind == 2:
            x[row, row % width] = 300.0
        elif kind == 3:
            x[row] *= 1e15  # squares of 576 still fit fp32
        elif kind == 4:
            x[row] *= 1e-15
        elif kind == 5:
            x[row] = 0
        elif kind == 6:
            x[row, ::3] = 1e-40  # denormal
    return x


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of some sequences as Batch.set takes them."""

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    row_starts: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    wanted: NDArray[np.int32]

    seen_from: NDArray[np.int32] | None = None

    def set_on(self, batch: Any) -> None:
        arrays = (self.tokens, self.positions, self.row_starts, self.block_tables, self.wanted)
        batch.set(*arrays, seen_from=self.seen_from)


def step_of(
    spans: list[tuple[int, int]],
    table_width: int,
    vocabulary: int = 50,
    seed: int = 0,
    wanted: list[int] | None = None,
    pool_blocks: int | None = None,
) -> Step:
    """Sequence b owns rows at positions spans[b] = (first, count); its blocks are spread over the pool (of
    len(spans) * table_width blocks unless stated). Steps of one pool size share their sequences' blocks."""
    rng = np.random.default_rng(seed)
    counts = [count for _, count in spans]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    blocks = len(spans) * table_width if pool_blocks is None else pool_blocks
    pool = np.random.default_rng(1).permutation(blocks).astype(np.int32)
    tables = np.full((len(spans), table_width), -1, np.int32)
    for sequence, (first, count) in enumerate(spans):
        used = (first + count - 1) // BLOCK_TOKENS + 1
        tables[sequence, :used] = pool[sequence * table_width :][:used]
    return Step(
        rng.integers(0, vocabulary, starts[-1]).astype(np.int32),
        np.concatenate([np.arange(f, f + n) for f, n in spans]).astype(np.int32),
        starts,
        tables,
        np.arange(starts[-1], dtype=np.int32) if wanted is None else np.array(wanted, np.int32),
    )


def one_row(step: Step, row: int) -> Step:
    """The step that holds only this row of `step`."""
    sequence = int(np.searchsorted(step.row_starts, row, side="right")) - 1
    return Step(
        step.tokens[row : row + 1],
        step.positions[row : row + 1],
        np.array([0, 1], np.int32),
        step.block_tables[sequence : sequence + 1],
        np.array([0], np.int32),
        None if step.seen_from is None else step.seen_from[sequence : sequence + 1],
    )


def fill_kv(kv: Any, number: float) -> None:
    """Every element of a cache; of an int8 cache every four bytes, be they a scale or codes."""
    for part in (kv.keys, kv.values):
        (part.view(np.float32) if part.dtype == np.uint8 else part)[...] = number


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the scenario; odd where the formulas allow it."""

    query_heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    model_dim: int = 192
    feed_forward: int = 100
    vocabulary: int = 101
    table_width: int = 40


def scenario(
    ops: Any,
    steps: list[Step],
    shape: Shape,
    *,
    kv_dtype: str = "float16",
    max_rows: int = 80,
    poison: float = 0.0,
    run: Callable[[Any, Callable[[], None]], None] | None = None,
) -> list[dict[str, NDArray[Any]]]:
    """Calls every row op for each step in turn (one cache) and returns what each step wrote.

    `poison` fills the cache first. `run(ops, function)` runs the recorded or eager ops of a step.
    """
    s = shape
    sequences = max(len(step.row_starts) - 1 for step in steps)
    pool = 4 * s.table_width
    batch = ops.batch(max_rows, max(sequences, 4), s.table_width, pool, s.vocabulary)
    kv = ops.kv_cache(1, pool, s.kv_heads, s.head_dim, kv_dtype)
    fill_kv(kv, poison)
    queries, width = s.query_heads * s.head_dim, (s.query_heads + 2 * s.kv_heads) * s.head_dim
    x, qkv, out = ops.empty(max_rows, s.model_dim), ops.empty(max_rows, width), ops.empty(max_rows, queries)
    normed, gate_up = ops.empty(max_rows, s.model_dim), ops.empty(max_rows, 2 * s.feed_forward)
    act, dense_out = ops.empty(max_rows, s.feed_forward), ops.empty(max_rows, s.model_dim)
    picked, logits = ops.empty(max_rows, s.model_dim), ops.empty(max_rows, s.vocabulary)
    ids = ops.ints(max_rows)
    rng = np.random.default_rng(5)
    norm = ops.constant(rng.standard_normal(s.model_dim).astype(np.float32))
    bias = ops.constant(rng.standard_normal(width).astype(np.float32))
    key_norm = ops.constant(np.linspace(0.5, 1.5, s.head_dim, dtype=np.float32))
    angles = np.outer(np.arange(s.table_width * BLOCK_TOKENS), 0.9 ** np.arange(s.head_dim // 2))
    table = ops.constant(np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))
    embedding = ops.pack(random_weight("int8", s.vocabulary, s.model_dim))
    to_qkv = ops.pack(random_weight("int4+minimum", width, s.model_dim))
    to_gate_up = ops.pack(random_weight("int4", 2 * s.feed_forward, s.model_dim))
    down = ops.pack(random_weight("float16", s.model_dim, s.feed_forward))

    def forward() -> None:
        ops.embed(batch, embedding, x)
        ops.rms_norm(batch.rows, x, norm, 1e-5, normed)
        ops.linear(batch.rows, normed, to_qkv, qkv, bias=bias)
        ops.head_norm(batch.rows, qkv, s.query_heads, s.kv_heads, s.head_dim, key_norm, 1e-6)
        ops.rope(batch, qkv, s.query_heads + s.kv_heads, s.head_dim, table, "interleaved")
        ops.kv_write(batch, qkv, s.query_heads, kv, 0)
        ops.attention(batch, qkv, s.query_heads, kv, 0, s.head_dim**-0.5, out)
        ops.linear(batch.rows, normed, to_gate_up, gate_up)
        ops.swiglu(batch.rows, gate_up, act)
        ops.linear(batch.rows, act, down, dense_out, residual=x)
        ops.gather_rows(batch, dense_out, picked)
        ops.linear(batch.wanted, picked, embedding, logits)
        ops.argmax(batch.wanted, logits, ids)

    written = []
    for step in steps:
        step.set_on(batch)
        if run is None:
            forward()
        else:
            run(ops, forward)
        rows, chosen = batch.rows.count, batch.wanted.count
        buffers = {
            "x": x,
            "normed": normed,
            "qkv": qkv,
            "out": out,
            "gate_up": gate_up,
            "act": act,
            "dense_out": dense_out,
        }
        result = {name: np.array(buffer[:rows]) for name, buffer in buffers.items()}
        result |= {
            "picked": picked[:chosen].copy(),
            "logits": logits[:chosen].copy(),
            "ids": ids[:chosen].copy(),
        }
        written.append(result)
    return written


def assert_same_bits(got: dict[str, NDArray[Any]], expected: dict[str, NDArray[Any]]) -> None:
    for name, values in expected.items():
        same = got[name].tobytes() == values.tobytes()
        assert same, f"{name}: {int((got[name] != values).sum())} of {values.size} elements differ"
