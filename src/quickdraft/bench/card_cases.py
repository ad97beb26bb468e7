"""Every kind of op of the card as a function of its number of rows: what parity and row checks run.

A case makes its inputs from one seed, the same for every backend, and gives the results of as many rows as it
is asked for, of which the first are always of the same inputs. Knows ops by their interface only, and judges
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from quickdraft.bench.workloads import RANDOM_SEED
from quickdraft.ops.interface import BLOCK_TOKENS, KVDtype
from quickdraft.ops.weights import Dense, Int4Groups, Int8Groups, Weight
from quickdraft.state.spec import Recurrent

Rows = Callable[[int], NDArray[np.float32]]
LINEAR_TOLERANCE: Final = 2e-3  # of the largest value; 16-bit factors, sums in another order
ATTENTION_TOLERANCE: Final = 2e-2
CHOICES: Final = 4
NARROW: Final = 64  # heads of the default model: a tile of as many rows is laid out otherwise


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the ops; `context` is what an attention row has before it."""

    inputs: int = 256
    outputs: int = 96
    head_dim: int = 64
    context: int = 40
    state: int = 64
    vocabulary: int = 5000


@dataclass(frozen=True, slots=True)
class Case:
    """`make(ops)` for at most `many` rows; `tolerance`: of the largest value of the reference."""

    name: str
    tolerance: float
    make: Callable[[Any], Rows]


def cases(sizes: Sizes, many: int) -> Iterator[Case]:
    """All of them."""
    for group in (32, 128):
        for bits in (4, 8):
            make = partial(_linear, _grouped(sizes, bits, group), many)
            yield Case(f"linear int{bits} group {group}", LINEAR_TOLERANCE, make)
    values = _random().normal(0, 0.05, (sizes.outputs, sizes.inputs))
    dense = Dense(values.astype(ml_dtypes.bfloat16))
    yield Case("linear bfloat16", LINEAR_TOLERANCE, partial(_linear, dense, many))
    kinds: tuple[KVDtype, ...] = ("bfloat16", "float16", "int8")
    for kind in kinds:
        for dim in sorted({NARROW, sizes.head_dim}):
            make = partial(_attention, kind, replace(sizes, head_dim=dim), many)
            yield Case(f"attention {kind}, heads of {dim}", ATTENTION_TOLERANCE, make)
    yield Case("recurrent layer", LINEAR_TOLERANCE, partial(_recurrent, sizes, many))
    yield Case("norms, rope and gates", LINEAR_TOLERANCE, partial(_row_ops, sizes, many))
    yield Case("choices", 0.0, partial(_choices, sizes, many))


def _random() -> np.random.Generator:
    return np.random.default_rng(RANDOM_SEED)


def _grouped(sizes: Sizes, bits: int, group: int) -> Weight:
    random, shape = _random(), (sizes.outputs, sizes.inputs)
    scales = random.uniform(0.001, 0.01, (sizes.outputs, sizes.inputs // group)).astype(np.float16)
    if bits == 4:
        return Int4Groups(random.integers(0, 16, shape, np.uint8), scales, None, group)
    return Int8Groups(random.integers(-127, 128, shape).astype(np.int8), scales, None, group)


def _linear(weight: Weight, many: int, ops: Any) -> Rows:
    packed, (outputs, inputs) = ops.pack(weight), weight.shape
    x, out = ops.empty(many, inputs), ops.empty(many, outputs)
    x[:many] = _random().normal(0, 1, (many, inputs)).astype(np.float32)

    def run(count: int) -> NDArray[np.float32]:
        ops.linear(_batch(ops, count, 0, many).rows, x, packed, out)
        return _read(out, count)

    return run


def _attention(kind: KVDtype, sizes: Sizes, many: int, ops: Any) -> Rows:
    heads, kv_heads, dim = 6, 1, sizes.head_dim
    width, whole = (heads + 2 * kv_heads) * dim, sizes.context + many
    kv = ops.kv_cache(1, -(-whole // BLOCK_TOKENS), kv_heads, dim, kind)
    values = _random().normal(0, 1, (whole, width)).astype(np.float32)
    before = ops.empty(sizes.context, width)
    before[: sizes.context] = values[: sizes.context]
    ops.kv_write(_batch(ops, sizes.context, 0, whole), before, heads, kv, 0)
    qkv, out = ops.empty(many, width), ops.empty(many, heads * dim)
    qkv[:many] = values[sizes.context :]

    def run(count: int) -> NDArray[np.float32]:
        batch = _batch(ops, count, sizes.context, whole)
        ops.kv_write(batch, qkv, heads, kv, 0)
        ops.attention(batch, qkv, heads, kv, 0, dim**-0.5, out)
        return _read(out, count)

    return run


def _recurrent(sizes: Sizes, many: int, ops: Any) -> Rows:
    """Few rows are two steps: a verify block of which half is kept, and one that replays it."""
    random = _random()
    heads, keys = 3, 1
    channels = (2 * keys + heads) * sizes.state
    shape = Recurrent(heads, sizes.state, sizes.state, channels, 3)
    cache = ops.recurrent_cache(1, 1, 1, shape, many - 1)
    x = random.normal(0, 1, (many, channels)).astype(np.float32)
    gates = random.normal(0, 2, (many, 2 * heads)).astype(np.float32)
    weight = ops.constant(random.normal(0, 0.5, (4, channels)).astype(np.float32))
    rate = ops.constant(-np.exp(random.normal(0, 1, heads)).astype(np.float32))
    bias = ops.constant(random.normal(0, 1, heads).astype(np.float32))
    rows_in, mixed, gates_in = (
        ops.empty(many, channels),
        ops.empty(many, channels),
        ops.empty(many, 2 * heads),
    )
    out = ops.empty(many, heads * sizes.state)

    def step(first: int, count: int, drafted: int, replay: int) -> NDArray[np.float32]:
        rows_in[:count], gates_in[:count] = x[first : first + count], gates[first : first + count]
        batch = _batch(ops, count, first, many, states=(0, replay, drafted))
        ops.causal_conv(batch, rows_in, weight, cache, 0, mixed)
        ops.gated_delta(batch, mixed, gates_in, rate, bias, cache, 0, out)
        return _read(out, count)

    def run(count: int) -> NDArray[np.float32]:
        cache.clear(0)
        if count in (1, many):
            return step(0, count, 0, 0)
        kept = count // 2
        begun = step(0, count, count - 1, 0)[:kept]
        return np.concatenate([begun, step(kept, count - kept, 0, kept - 1)])

    return run


def _row_ops(sizes: Sizes, many: int, ops: Any) -> Rows:
    random = _random()
    dim, width = sizes.head_dim, 4 * sizes.head_dim
    values = random.normal(0, 1, (many, width)).astype(np.float32)
    norm, head_norm = (ops.constant(random.normal(1, 0.1, size).astype(np.float32)) for size in (width, dim))
    table = ops.constant(random.normal(0, 1, (many, dim // 2)).astype(np.float32))
    x, y = ops.empty(many, width), ops.empty(many, width)

    def run(count: int) -> NDArray[np.float32]:
        x[:many] = values
        batch = _batch(ops, count, 0, many)
        ops.rms_norm(batch.rows, x, norm, 1e-6, y)
        ops.head_norm(batch.rows, y, 0, 4, dim, head_norm, 1e-6)
        ops.rope(batch, y, 4, dim, table, "half")
        ops.sigmoid_gate(batch.rows, y, x, y)
        ops.gated_norm(batch.rows, y, x, head_norm, 1e-6, y)
        return _read(y, count)

    return run


def _choices(sizes: Sizes, many: int, ops: Any) -> Rows:
    """Of each row the best id, the best few, and one under noise."""
    x, best = ops.empty(many, sizes.vocabulary), ops.ints(many)
    ids, values = ops.ints(many * CHOICES), ops.empty(many, CHOICES)
    x[:many] = _random().normal(0, 1, (many, sizes.vocabulary)).astype(np.float32).round(1)  # some tie

    def run(count: int) -> NDArray[np.float32]:
        rows = _batch(ops, count, 0, many).rows
        ops.argmax(rows, x, best)
        ops.top_rows(rows, x, CHOICES, ids, values)
        drawn = [ops.gumbel_choice(ops.rows(x, t, t + 1)[0], 0.8, 7, t) for t in range(count)]
        few = np.reshape(ids[: count * CHOICES], (count, CHOICES))
        return np.column_stack([best[:count], drawn, few]).astype(np.float32)

    return run


def _read(out: Any, count: int) -> NDArray[np.float32]:
    return np.array(out[:count], np.float32)


def _batch(
    ops: Any, rows: int, first: int, positions: int, states: tuple[int, int, int] | None = None
) -> Any:
    """Rows of one sequence from position `first` on; `states`: its slot, replayed and drafted rows."""
    blocks = -(-positions // BLOCK_TOKENS)
    batch = ops.batch(rows, 1, blocks, blocks, 2)
    arrays = [
        np.zeros(rows),
        np.arange(first, first + rows),
        [0, rows],
        np.arange(blocks)[None],
        np.arange(rows),
    ]
    arrays += [[number] for number in states or ()]
    batch.set(*(np.array(array, np.int32) for array in arrays))
    return batch
