"""Kernel starts beyond those of the target's own step: other weight formats, drafters' layers, choices, other
types.

Each is run on tensors without memory, as in `work`. Knows no arithmetic and no time.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from quickdraft.ops.cuda import choose
from quickdraft.ops.cuda.backend import CudaOps
from quickdraft.ops.cuda.batch import Count, CudaBatch
from quickdraft.ops.cuda.choices import DRAW
from quickdraft.ops.cuda.launch import Started, Watching
from quickdraft.ops.cuda.outline import dense, int4, int8
from quickdraft.ops.cuda.weights import AnyPacked, PackedGroups
from quickdraft.ops.interface import BLOCK_TOKENS

WIDTH, VOCABULARY = 5120, 248_320  # of Qwen3.8-27B
ROWS = (1, 32, 64, 512)  # one for each height of a tile, and a prompt's
OUTPUTS = 2048


def other_starts() -> list[Started]:
    launcher = Watching()
    ops = CudaOps("meta", launcher)
    for rows in ROWS:
        for weight in _weights():
            _linear(ops, rows, weight)
    bias, out = ops.constant(np.zeros(OUTPUTS, np.float32)), ops.empty(512, OUTPUTS)
    for rows in (16, 512):
        ops.linear(_rows(rows), ops.empty(512, WIDTH), int4(OUTPUTS, WIDTH, 32), out, bias=bias)
    _tables(ops)
    _drafter_layers(ops)
    for kind in ("float16", "float32", "int8"):
        _attention(ops, 8, 8, 2, 128, kind, None, block=False)
    _choices(ops)
    return launcher.seen


def _weights() -> list[PackedGroups | AnyPacked]:
    """GGUF formats have groups of 32, quantised folders often 128 with zero points."""
    half = torch.float16
    least = torch.empty((WIDTH // 32, OUTPUTS), dtype=half, device="meta")
    small = int4(OUTPUTS, WIDTH, 32)
    return [
        small,
        replace(small, minimums=least, offset=0.0),
        int4(OUTPUTS, WIDTH, 128, zeros=True),
        int8(OUTPUTS, WIDTH, 32),
        int8(OUTPUTS, WIDTH, 128),
        _two_levels(small, True),
        _plane(small, 1),
        _plane(_two_levels(small, True), 1),
        _plane(_two_levels(int4(OUTPUTS, WIDTH, 16), False), 2),
        replace(small, factor=half),
        replace(int8(OUTPUTS, WIDTH, 32), factor=half),
        dense(OUTPUTS, WIDTH),
        dense(OUTPUTS, WIDTH, half),
        dense(OUTPUTS, WIDTH, torch.float32),
    ]


def _two_levels(weight: PackedGroups, minimums: bool) -> PackedGroups:
    """As K-quants have them: Q4_K, Q5_K and Q6_K."""
    groups, outputs = weight.scales.shape
    steps = 256 // weight.group
    numbers = torch.empty((groups, outputs), dtype=torch.int8, device="meta")
    shares = torch.empty((groups // steps, outputs), dtype=torch.float16, device="meta")
    least = (numbers, shares) if minimums else (None, None)
    return replace(
        weight, scales=numbers, scale_shares=shares, minimums=least[0], minimum_shares=least[1], steps=steps,
        offset=0.0 if minimums else weight.offset,
    )  # fmt: skip


def _plane(weight: PackedGroups, bits: int) -> PackedGroups:
    """The same with codes of 4 + `bits` bits."""
    blocks, outputs, sub = weight.words.shape
    high = torch.empty((blocks * bits // 2, outputs, sub), dtype=torch.uint8, device="meta")
    return replace(weight, high=high, high_bits=bits)


def _rows(count: int) -> Count:
    rows = Count()
    rows.count = count
    return rows


def _linear(ops: CudaOps, rows: int, weight: AnyPacked) -> None:
    x, out = ops.empty(rows, WIDTH), ops.empty(rows, OUTPUTS)
    ops.linear(_rows(rows), x, weight, out, residual=out)


def _tables(ops: CudaOps) -> None:
    batch, out = _batch(ops, 8, 100), ops.empty(8, WIDTH)
    for table in (int4(VOCABULARY, WIDTH, 32), int8(VOCABULARY, WIDTH), dense(VOCABULARY, WIDTH)):
        ops.embed(batch, table, out)
        ops.embed(batch, table, out, instead=(1, ops.constant(np.zeros(WIDTH, np.float32))))


def _drafter_layers(ops: CudaOps) -> None:
    """DFlash2: 32 query heads of 128, 8 kv heads, a window, rows that see one another, convolutions."""
    _attention(ops, 8, 32, 8, 128, "bfloat16", 2048, block=True)
    batch, x, out = _batch(ops, 8, 3000), ops.empty(8, WIDTH), ops.empty(8, WIDTH)
    base = ops.constant(np.zeros((2, WIDTH), np.float32))
    ops.grouped_conv(batch, x, base, ops.empty(8, 4 * WIDTH // 16), 0, out, residual=x)
    ops.grouped_conv(batch, x, base, ops.empty(8, 4 * WIDTH // 16), 0, out)
    ops.rope(batch, x, 8, 128, ops.constant(np.zeros((64, 128), np.float32)), "interleaved")


def _batch(ops: CudaOps, rows: int, context: int) -> CudaBatch:
    blocks = (context + rows) // BLOCK_TOKENS + 1
    batch = ops.batch(rows, 1, blocks, blocks, VOCABULARY)
    positions = np.arange(context, context + rows, dtype=np.int32)
    table, starts = np.arange(blocks, dtype=np.int32)[None], np.array([0, rows], np.int32)
    batch.set(np.zeros(rows, np.int32), positions, starts, table, np.arange(rows, dtype=np.int32))
    return batch


def _attention(
    ops: CudaOps, rows: int, heads: int, kv_heads: int, dim: int, kind: str, window: int | None, *,
    block: bool,
) -> None:  # fmt: skip
    batch = _batch(ops, rows, 3000)
    kv = ops.kv_cache(1, batch.limits[3], kv_heads, dim, kind)  # type: ignore[arg-type]
    qkv, out = ops.empty(rows, (heads + 2 * kv_heads) * dim), ops.empty(rows, heads * dim)
    ops.kv_write(batch, qkv, heads, kv, 0)
    ops.attention(batch, qkv, heads, kv, 0, 0.1, out, window=window, block=block)


def _choices(ops: CudaOps) -> None:
    def empty(count: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=kind, device="meta")

    rows, long = 16, torch.int64
    x, draws, chosen = (
        ops.empty(rows, VOCABULARY).tensor, empty(rows * DRAW, long), empty(2 * rows, long)
    )  # fmt: skip
    for names, greedy in ((None, empty(rows, torch.int32)), (empty(VOCABULARY, long), None)):
        inputs = x, names, draws, greedy, chosen, ops.workspace
        choose.start_gumbel_rows(ops.launcher, rows, *inputs)
