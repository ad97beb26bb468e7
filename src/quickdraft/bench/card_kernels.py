"""Kernels of the card, one by one: how far their results are from the reference's, and what they reach.

Parity is checked at small sizes on the same random inputs; rates are taken at the sizes of a model, with the
bytes that an op cannot do without and its multiply-adds counted twice. Knows ops by their interface only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from quickdraft.bench.workloads import RANDOM_SEED
from quickdraft.models.describe_hybrid import HybridSizes
from quickdraft.ops.interface import BLOCK_TOKENS, KVDtype, Ops
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.ops.weights import Int4Groups, Int8Groups

TOLERANCE: Final = 2e-3  # of the largest value; float16 factors, sums in another order
SMALL_INPUTS, SMALL_OUTPUTS, SMALL_ROWS = 256, 96, (1, 17)
REPEATS: Final = 20


@dataclass(frozen=True, slots=True)
class Parity:
    """The largest difference, as a part of the reference's largest value."""

    kernel: str
    difference: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.difference <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


@dataclass(frozen=True, slots=True)
class Rate:
    """One kernel at one size."""

    kernel: str
    rows: int
    context: int
    seconds: float
    bytes: int  # the least it must move
    flops: int

    def to_dict(self) -> dict[str, Any]:
        rates = {
            "gigabytes_per_second": self.bytes / self.seconds / 1e9,
            "teraflops_per_second": self.flops / self.seconds / 1e12,
        }
        return asdict(self) | rates


def parities(ops: Ops) -> Iterator[Parity]:
    """Linears of 4 and 8 bits, attention over each type of cache, and the best id."""
    reference: Any = ReferenceOps("sixteen")
    for rows in SMALL_ROWS:
        for bits in (4, 8):
            yield _compared(f"linear int{bits}, {rows} rows", ops, reference, _linear_of(bits, rows))
    kinds: tuple[KVDtype, ...] = ("bfloat16", "int8")
    for kind in kinds:
        yield _compared(f"attention {kind}", ops, reference, _attention_of(kind), 2e-2)
    yield _compared("argmax", ops, reference, _best_of, 0.0)


def _compared(
    name: str, ops: Ops, reference: Ops, run: Callable[[Ops], Any], tolerance: float = TOLERANCE
) -> Parity:
    found, wanted = (np.asarray(run(each), np.float64) for each in (ops, reference))
    largest = max(float(np.abs(wanted).max()), 1e-30)
    difference = float(np.abs(found - wanted).max()) / largest
    return Parity(name, difference if np.isfinite(difference) else float("inf"), tolerance)


def _linear_of(bits: int, rows: int) -> Callable[[Ops], Any]:
    def run(ops: Ops) -> Any:
        random = np.random.default_rng(RANDOM_SEED)
        shape = SMALL_OUTPUTS, SMALL_INPUTS
        scales = random.uniform(0.001, 0.01, (SMALL_OUTPUTS, SMALL_INPUTS // 32)).astype(np.float16)
        weight = (
            Int4Groups(random.integers(0, 16, shape, np.uint8), scales)
            if bits == 4
            else Int8Groups(random.integers(-127, 128, shape).astype(np.int8), scales)
        )
        batch = _batch(ops, rows, 0)
        x, out = ops.empty(rows, SMALL_INPUTS), ops.empty(rows, SMALL_OUTPUTS)
        x[:rows] = random.normal(0, 1, (rows, SMALL_INPUTS)).astype(np.float32)
        ops.linear(batch.rows, x, ops.pack(weight), out)
        return out[:rows]

    return run


def _attention_of(kind: KVDtype) -> Callable[[Ops], Any]:
    def run(ops: Ops) -> Any:
        random, rows, heads, dim = np.random.default_rng(RANDOM_SEED), 20, 4, 64
        batch = _batch(ops, rows, 0)
        kv = ops.kv_cache(1, 2, 2, dim, kind)
        qkv, out = ops.empty(rows, (heads + 4) * dim), ops.empty(rows, heads * dim)
        qkv[:rows] = random.normal(0, 1, (rows, (heads + 4) * dim)).astype(np.float32)
        ops.kv_write(batch, qkv, heads, kv, 0)
        ops.attention(batch, qkv, heads, kv, 0, dim**-0.5, out)
        return out[:rows]

    return run


def _best_of(ops: Ops) -> Any:
    batch, x, ids = _batch(ops, 2, 0), ops.empty(2, 5000), ops.ints(2)
    x[:2] = np.random.default_rng(RANDOM_SEED).normal(0, 1, (2, 5000)).astype(np.float32)
    ops.argmax(batch.rows, x, ids)
    return ids[:2]


def rates(
    ops: Any, sizes: HybridSizes, rows: tuple[int, ...], contexts: tuple[int, ...], repeats: int = REPEATS
) -> Iterator[Rate]:
    """The kernels that take a step's time, at the sizes of a model whose weights have 4 bits."""
    from quickdraft.ops.cuda.measure import DRAWN_GROUP, drawn, seconds_of

    for count in rows:
        for name, outputs, inputs, bits in (
            ("linear int4, gate and up", 2 * sizes.feed_forward, sizes.width, 4),
            ("linear int4, down", sizes.width, sizes.feed_forward, 4),
            ("linear int8, head", sizes.vocabulary, sizes.width, 8),
        ):
            weight = drawn(ops.device, outputs, inputs, bits, DRAWN_GROUP if bits == 4 else 32)
            batch, x, out = _batch(ops, count, 0), ops.empty(count, inputs), ops.empty(count, outputs)
            program = ops.record(lambda b=batch, x=x, w=weight, o=out: ops.linear(b.rows, x, w, o))
            seconds = seconds_of(ops, program.run, repeats)
            moved = weight.nbytes + 4 * count * (inputs + outputs)
            yield Rate(name, count, 0, seconds, moved, 2 * count * inputs * outputs)
        for context in contexts:
            yield _attention_rate(ops, sizes, count, context, repeats)


def _attention_rate(ops: Any, sizes: HybridSizes, rows: int, context: int, repeats: int) -> Rate:
    from quickdraft.ops.cuda.measure import seconds_of

    heads, kv_heads, dim = sizes.heads, sizes.kv_heads, sizes.head_dim
    batch = _batch(ops, rows, context)
    kv = ops.kv_cache(1, -(-(context + rows) // BLOCK_TOKENS), kv_heads, dim, "bfloat16")
    qkv, out = ops.empty(rows, (heads + 2 * kv_heads) * dim), ops.empty(rows, heads * dim)
    program = ops.record(lambda: ops.attention(batch, qkv, heads, kv, 0, dim**-0.5, out))
    seconds = seconds_of(ops, program.run, repeats)
    moved = kv.blocks * kv.bytes_per_block + 8 * rows * heads * dim
    return Rate(
        "attention bfloat16", rows, context, seconds, moved, 4 * rows * heads * dim * (context + rows)
    )


def _batch(ops: Ops, rows: int, context: int) -> Any:
    blocks = -(-(context + rows) // BLOCK_TOKENS)
    batch = ops.batch(rows, 1, blocks, blocks, 2)
    arrays = (
        np.zeros(rows), np.arange(context, context + rows), [0, rows], np.arange(blocks)[None],
        np.arange(rows),
    )  # fmt: skip
    batch.set(*(np.array(array, np.int32) for array in arrays))
    return batch
