"""Kernels of the card, one by one, and what they reach: at the sizes of a model, with the bytes that an op
cannot do without and its multiply-adds counted twice. Knows ops by their interface only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from quickdraft.models.describe_hybrid import HybridSizes
from quickdraft.ops.interface import BLOCK_TOKENS, Ops

REPEATS: Final = 20


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
