"""linear on the card: the sum over inputs is cut by the weight's shape alone, pieces are added in
order.

Activations meet quantised and float16 weights as float16, bfloat16 weights as bfloat16, float32 weights as
float32; sums are float32, scales are applied to the float32 sum of a group, so codes and scales lose no
bit. Each row of a tile is summed in the same order whatever the tile's height, so its value does not
depend on the number of rows. Owns the kernels and how they are started.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quickdraft.ops.cuda.buffers import Buffer
from quickdraft.ops.cuda.launch import INTERPRETED, Launcher, ceil_divide
from quickdraft.ops.cuda.numbers import as_factor, as_stored
from quickdraft.ops.cuda.weights import (
    BLOCK_N,
    DENSE_BLOCK_K,
    Packed,
    PackedDense,
    PackedGroups,
    shared_subs,
)

CAST_WIDTH = 1024
TILE_ROWS = 64  # with more rows the pieces of a sum are added inside one program


@triton.jit
def cast_rows(x, order, out, width, padded, WIDTH: tl.constexpr):
    """out[t, i] = x[t, order[i]] in out's type, zeros behind the last input. x, out: [T, width], [T,
    padded]."""
    row = tl.program_id(0)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    source = i
    if order is not None:
        source = tl.load(order + i, mask=i < width, other=0)
    values = tl.load(x + row * width + source, mask=i < width, other=0.0)
    tl.store(out + row * padded + i, as_stored(values, out.dtype.element_ty), mask=i < padded)


@triton.jit
def finish(values, bias, residual, out, m, n, rows, outputs, residual_stride, out_stride):
    """Bias, then residual, then store."""
    inside = (m[:, None] < rows) & (n[None, :] < outputs)
    if bias is not None:
        values += tl.load(bias + n, mask=n < outputs, other=0.0)[None, :]
    if residual is not None:
        at = residual + m[:, None] * residual_stride + n[None, :]
        values += tl.load(at, mask=inside, other=0.0)
    tl.store(out + m[:, None] * out_stride + n[None, :], values, mask=inside)


@triton.jit
def group_numbers(scales, offsets, minimums, group, outputs, n, offset):
    """Scales, offsets [1, N] and minimums of a group; `offset` and the scales where there are none."""
    at = group * outputs + n
    scale = tl.load(scales + at)
    zero, least = offset, scale
    if offsets is not None:
        zero = tl.load(offsets + at)[None, :]
    if minimums is not None:
        least = tl.load(minimums + at)
    return scale, zero, least


@triton.jit
def grouped_piece(
    x, words, scales, offsets, minimums, m, n, first, last, outputs, padded, offset,
    M: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, SUB: tl.constexpr, GROUP: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """float32 [M, N]: the sum over blocks first..last-1. x has whole tiles of rows, n stays below
    `outputs`."""
    acc = tl.zeros([M, N], tl.float32)
    s = tl.arange(0, SUB)
    count: tl.constexpr = 16 // BITS
    last_group = (last * count * SUB - 1) // GROUP
    # loaded while the group before is computed, as two bytes a thread cannot be copied ahead
    group = tl.minimum(first * count * SUB // GROUP, last_group)  # a split may have no block
    scale, zero, least = group_numbers(scales, offsets, minimums, group, outputs, n, offset)
    for block in range(first, last):
        word = tl.load(words + (block * outputs + n)[None, :] * SUB + s[:, None])
        part = tl.zeros([M, N], tl.float32)
        below = tl.zeros([M], tl.float32)
        for i in tl.static_range(count):
            start = (block * count + i) * SUB
            if i % SHARED == 0:
                group = tl.minimum((start + SHARED * SUB) // GROUP, last_group)
                scale2, zero2, least2 = group_numbers(scales, offsets, minimums, group, outputs, n, offset)
            activations = tl.load(x + m[:, None] * padded + (start + s)[None, :])
            code = ((word >> (i * BITS)) & ((1 << BITS) - 1)) | 0x6400  # the bits of 1024 + code
            part = tl.dot(activations, code.to(tl.float16, bitcast=True) - zero, part)
            if minimums is not None:
                below += tl.sum(activations.to(tl.float32), axis=1)
            if (i + 1) % SHARED == 0:
                # in so many words, so that every tile fuses alike
                acc = tl.fma(part, scale.to(tl.float32)[None, :], acc)
                part = tl.zeros([M, N], tl.float32)
                if minimums is not None:
                    acc = tl.fma(below[:, None], least.to(tl.float32)[None, :], acc)
                    below = tl.zeros([M], tl.float32)
                scale, zero, least = scale2, zero2, least2
    return acc


@triton.jit(do_not_specialize=["rows", "blocks", "splits", "residual_stride"])
def grouped_linear(
    x, words, scales, offsets, minimums, bias, residual, out, partial,
    rows, outputs, padded, blocks, splits, residual_stride, out_stride,
    OFFSET: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, SUB: tl.constexpr,
    GROUP: tl.constexpr, SHARED: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """One tile [M, N] of x times a quantised weight: one piece of its sum into `partial`, or all of it."""
    m = tl.program_id(2) * M + tl.arange(0, M)
    n = tl.program_id(0) * N + tl.arange(0, N)
    near = tl.minimum(n, outputs - 1)  # what is computed beyond the last output is not stored
    offset = tl.full([1, 1], OFFSET, tl.float16)
    per_split = tl.cdiv(blocks, splits)
    if INSIDE:
        total = tl.zeros([M, N], tl.float32)
        for split in range(splits):
            total += grouped_piece(
                x, words, scales, offsets, minimums, m, near, split * per_split,
                tl.minimum((split + 1) * per_split, blocks), outputs, padded, offset,
                M, N, BITS, SUB, GROUP, SHARED,
            )  # fmt: skip
        finish(total, bias, residual, out, m, n, rows, outputs, residual_stride, out_stride)
    else:
        split = tl.program_id(1)
        piece = grouped_piece(
            x, words, scales, offsets, minimums, m, near, split * per_split,
            tl.minimum((split + 1) * per_split, blocks), outputs, padded, offset,
            M, N, BITS, SUB, GROUP, SHARED,
        )  # fmt: skip
        at = partial + (split * rows + m)[:, None] * outputs + n[None, :]
        tl.store(at, piece, mask=(m[:, None] < rows) & (n[None, :] < outputs))


@triton.jit
def dense_piece(
    x, values, m, n, first, last, rows, outputs, inputs, padded,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """float32 [M, N]: the sum over blocks of K inputs first..last-1."""
    acc = tl.zeros([M, N], tl.float32)
    for block in range(first, last):
        k = block * K + tl.arange(0, K)
        inside = (m[:, None] < rows) & (k[None, :] < padded)
        activations = tl.load(x + m[:, None] * padded + k[None, :], mask=inside, other=0.0)
        inside = (k[:, None] < inputs) & (n[None, :] < outputs)
        at = values + n[None, :].to(tl.int64) * inputs + k[:, None]
        weights = tl.load(at, mask=inside, other=0.0)
        activations = as_factor(activations, values.dtype.element_ty, WIDE)
        weights = as_factor(weights, values.dtype.element_ty, WIDE)
        acc = tl.dot(activations, weights, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["rows", "blocks", "splits", "residual_stride"])
def dense_linear(
    x, values, bias, residual, out, partial,
    rows, outputs, inputs, padded, blocks, splits, residual_stride, out_stride,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, INSIDE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The same for a dense weight. WIDE: products in float32, as the interpreter has no bfloat16 ones."""
    m = tl.program_id(2) * M + tl.arange(0, M)
    n = tl.program_id(0) * N + tl.arange(0, N)
    per_split = tl.cdiv(blocks, splits)
    if INSIDE:
        total = tl.zeros([M, N], tl.float32)
        for split in range(splits):
            first = split * per_split
            last = tl.minimum(first + per_split, blocks)
            total += dense_piece(x, values, m, n, first, last, rows, outputs, inputs, padded, M, N, K, WIDE)
        finish(total, bias, residual, out, m, n, rows, outputs, residual_stride, out_stride)
    else:
        split = tl.program_id(1)
        first = split * per_split
        last = tl.minimum(first + per_split, blocks)
        piece = dense_piece(x, values, m, n, first, last, rows, outputs, inputs, padded, M, N, K, WIDE)
        at = partial + (split * rows + m)[:, None] * outputs + n[None, :]
        tl.store(at, piece, mask=(m[:, None] < rows) & (n[None, :] < outputs))


@triton.jit(do_not_specialize=["rows", "splits", "residual_stride"])
def add_pieces(
    partial, bias, residual, out, rows, outputs, splits, residual_stride, out_stride,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """out = the pieces [splits, rows, outputs] added in ascending order, with bias and residual."""
    m = tl.program_id(1) * M + tl.arange(0, M)
    n = tl.program_id(0) * N + tl.arange(0, N)
    inside = (m[:, None] < rows) & (n[None, :] < outputs)
    total = tl.zeros([M, N], tl.float32)
    for split in range(splits):
        at = partial + (split * rows + m)[:, None] * outputs + n[None, :]
        total += tl.load(at, mask=inside, other=0.0)
    finish(total, bias, residual, out, m, n, rows, outputs, residual_stride, out_stride)


def tile_rows(rows: int) -> int:
    """Rows of a tile: as few as hold them all, so that a weight is read once by up to 64 rows."""
    return 16 if rows <= 16 else 32 if rows <= 32 else TILE_ROWS


def start_linear(
    launcher: Launcher,
    rows: int,
    x: Buffer,
    weight: Packed,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    workspace: Any,
) -> None:
    """x [.., I] times `weight` into out [.., N], views of columns allowed; `workspace(name, count, type)`
    gives
    memory."""
    inside = rows > TILE_ROWS or weight.splits == 1
    height = tile_rows(rows)
    partial = None if inside else workspace("pieces", weight.splits * rows * weight.outputs, torch.float32)
    strides = (0 if residual is None else residual.stride(0)), out.stride(0)
    added = (bias, residual) if inside else (None, None)  # else when the pieces are added
    width = BLOCK_N // 2 if height == TILE_ROWS else BLOCK_N  # so that no register spills
    tiles = ceil_divide(weight.outputs, width), 1 if inside else weight.splits, ceil_divide(rows, height)
    numbers: dict[str, Any] = {"M": height, "N": width, "INSIDE": inside, "warps": 4}
    if isinstance(weight, PackedGroups):
        padded = int(weight.words.shape[0]) * weight.block_inputs
        cast = cast_activations(launcher, rows, x, padded, torch.float16, weight.order, workspace)
        launcher.start(
            grouped_linear, tiles, cast, weight.words, weight.scales, weight.offsets, weight.minimums, *added,
            out, partial, rows, weight.outputs, padded, int(weight.words.shape[0]), weight.splits,
            *strides, OFFSET=weight.offset, BITS=weight.bits, SUB=weight.sub, GROUP=weight.group,
            SHARED=shared_subs(weight), stages=4 if height == 16 else 3, **numbers,
        )  # fmt: skip
    else:
        start_dense(launcher, tiles, rows, x, weight, out, *added, partial, strides, numbers, workspace)
    if not inside:
        launcher.start(
            add_pieces, (ceil_divide(weight.outputs, BLOCK_N), ceil_divide(rows, 16)), partial, bias,
            residual, out, rows, weight.outputs, weight.splits, *strides, M=16, N=BLOCK_N,
        )  # fmt: skip


def start_dense(
    launcher: Launcher, tiles: tuple[int, ...], rows: int, x: Buffer, weight: PackedDense,
    out: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
    partial: torch.Tensor | None, strides: tuple[int, int], numbers: dict[str, Any], workspace: Any,
) -> None:  # fmt: skip
    kind, padded, factors = weight.values.dtype, weight.inputs, x.tensor
    if kind != torch.float32:
        padded = ceil_divide(weight.inputs, DENSE_BLOCK_K) * DENSE_BLOCK_K
        factors = cast_activations(launcher, rows, x, padded, kind, None, workspace)
    launcher.start(
        dense_linear, tiles, factors, weight.values, bias, residual, out, partial, rows, weight.outputs,
        weight.inputs, padded, ceil_divide(weight.inputs, DENSE_BLOCK_K), weight.splits, *strides,
        K=DENSE_BLOCK_K, WIDE=INTERPRETED and kind == torch.bfloat16, stages=3, **numbers,
    )  # fmt: skip


def cast_activations(
    launcher: Launcher, rows: int, x: Buffer, padded: int, kind: torch.dtype, order: torch.Tensor | None,
    workspace: Any,
) -> torch.Tensor:  # fmt: skip
    """x in another type and order, rows filled up with zeros to `padded`: the copy that what wrote x made,
    or one made now."""
    height = tile_rows(rows)  # rows behind the last are read, and their results dropped
    if order is None:
        cast, made = x.copy_of(kind, padded, rows)
        if made:
            return cast
    else:
        cast = workspace("cast", ceil_divide(rows, height) * height * padded, kind)
    launcher.start(
        cast_rows, (rows, ceil_divide(padded, CAST_WIDTH)), x.tensor, order, cast, x.shape[1], padded,
        WIDTH=CAST_WIDTH,
    )  # fmt: skip
    return cast
