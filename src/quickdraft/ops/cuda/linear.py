"""linear on the card: the sum over inputs is cut by the weight's shape alone, pieces are added in
order.

Activations meet quantised weights as float16 or bfloat16 (PackedGroups.factor), dense ones in their own
type; sums are float32, scales are applied to the float32 sum of a group, so codes and scales lose no bit.
Each row of a tile is summed in the same order whatever the tile's height, so its value does not depend on
the number of rows. Owns the kernels of quantised weights and how linears are started.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quickdraft.ops.cuda.buffers import Buffer
from quickdraft.ops.cuda.dense import start_dense
from quickdraft.ops.cuda.launch import INTERPRETED, TILE_ROWS, Launcher, ceil_divide, tallest_tile
from quickdraft.ops.cuda.linear_parts import add_pieces, cast_activations, finish
from quickdraft.ops.cuda.numbers import code_factors, group_number
from quickdraft.ops.cuda.weights import BLOCK_N, MULTIPROCESSORS, Packed, PackedGroups, shared_subs

SUMS = 16  # groups whose activations one program adds up
# Of blocks copied ahead; all but one are on their way while one is computed. A block of 64 outputs is 4 KB of
# codes (128 inputs of 4 bits, 64 of 8). A 3090 needs 936 GB/s * 600 ns / 82 = 7 KB on the way to each
# multiprocessor, and one program of 64 outputs and 16 rows holds 4 * 4 KB.
STAGES = {16: 5, 32: 4, 64: 3}
REGISTERS = {16: 128, 32: 168, 64: 255}  # at most, of a thread: left alone, ptxas may choose fewer and spill


@triton.jit
def group_sums(x, sums, padded, groups, stride, GROUP: tl.constexpr, SUB: tl.constexpr, COUNT: tl.constexpr):
    """sums[g, t] = the sum of x[t] over group g, float32; x in 16 bits [T, padded], sums [groups, stride]. In
    a kernel of its own, as the order of a sum inside a tile would follow from how the compiler lays that tile
    out, and so from its height."""
    row = tl.program_id(0)
    group = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    total = tl.zeros([COUNT], tl.float32)
    for i in tl.static_range(GROUP // SUB):
        k = group[:, None] * GROUP + i * SUB + tl.arange(0, SUB)[None, :]
        total += tl.sum(tl.load(x + row * padded + k, mask=k < padded, other=0.0).to(tl.float32), axis=1)
    tl.store(sums + group * stride + row, total, mask=group < groups)


@triton.jit
def group_numbers(
    scales, scale_shares, offsets, minimums, minimum_shares, sums, group, outputs, sum_stride, m, n,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Of a group: scales and their factors, offsets [1, N], minimums and their factors, and
    the sums of activations [M]; scales for those that are None."""
    at = group * outputs + n
    above = group // STEPS * outputs + n
    scale = tl.load(scales + at)
    share, zero, least, least_share, below = scale, scale, scale, scale, scale
    if scale_shares is not None:
        share = tl.load(scale_shares + above)
    if offsets is not None:
        zero = tl.load(offsets + at)[None, :]
    if minimums is not None:
        least = tl.load(minimums + at)
        below = tl.load(sums + group * sum_stride + m)
    if minimum_shares is not None:
        least_share = tl.load(minimum_shares + above)
    return scale, share, zero, least, least_share, below


@triton.jit
def grouped_piece(
    x, words, high, scales, scale_shares, offsets, minimums, minimum_shares, sums, m, n, first, last,
    outputs, padded, sum_stride,
    OFFSET: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr,
    SUB: tl.constexpr,
    GROUP: tl.constexpr, STEPS: tl.constexpr, SHARED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """float32 [M, N]: the sum over blocks first..last-1. x and sums have whole tiles of rows, n stays below
    `outputs`."""
    acc = tl.zeros([M, N], tl.float32)
    s = tl.arange(0, SUB)
    count: tl.constexpr = 16 // BITS
    last_group = (last * count * SUB - 1) // GROUP
    # loaded while the group before is computed, as two bytes a thread cannot be copied ahead
    group = tl.minimum(first * count * SUB // GROUP, last_group)  # a split may have no block
    scale, share, zero, least, least_share, below = group_numbers(
        scales, scale_shares, offsets, minimums, minimum_shares, sums, group, outputs, sum_stride, m, n, STEPS
    )
    for block in range(first, last):
        word = tl.load(words + (block * outputs + n)[None, :] * SUB + s[:, None])
        extra = word
        if HIGH > 0:  # a byte holds the bits of one block or of two
            byte = tl.load(high + (block * HIGH // 2 * outputs + n)[None, :] * SUB + s[:, None])
            extra = (byte >> (block * HIGH % 2 * 4)).to(tl.int16)
        part = tl.zeros([M, N], tl.float32)
        for i in tl.static_range(count):
            start = (block * count + i) * SUB
            if i % SHARED == 0:
                group = tl.minimum((start + SHARED * SUB) // GROUP, last_group)
                scale2, share2, zero2, least2, least_share2, below2 = group_numbers(
                    scales, scale_shares, offsets, minimums, minimum_shares, sums, group, outputs, sum_stride,
                    m, n, STEPS,
                )  # fmt: skip
            activations = tl.load(x + m[:, None] * padded + (start + s)[None, :])
            if WIDE:
                activations = activations.to(tl.float32)
            minus = None if offsets is None else zero
            codes = code_factors(word, extra, minus, x.dtype.element_ty, i, BITS, HIGH, OFFSET, WIDE)
            part = tl.dot(activations, codes, part, input_precision="ieee")
            if (i + 1) % SHARED == 0:
                # in so many words, so that every tile fuses alike
                acc = tl.fma(part, group_number(scale, share, scale_shares is not None)[None, :], acc)
                part = tl.zeros([M, N], tl.float32)
                if minimums is not None:
                    minimum = group_number(least, least_share, minimum_shares is not None)
                    acc = tl.fma(below[:, None], minimum[None, :], acc)
                scale, share, zero = scale2, share2, zero2
                least, least_share, below = least2, least_share2, below2
    return acc


@triton.jit(do_not_specialize=["rows", "blocks", "splits", "residual_stride", "sum_stride"])
def grouped_linear(
    x, words, high, scales, scale_shares, offsets, minimums, minimum_shares, sums, bias, residual, out,
    partial,
    rows, outputs, padded, blocks, splits, residual_stride, out_stride, sum_stride,
    OFFSET: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr,
    SUB: tl.constexpr,
    GROUP: tl.constexpr, STEPS: tl.constexpr, SHARED: tl.constexpr, INSIDE: tl.constexpr, WHOLE: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile [M, N] of x times a quantised weight: WHOLE, as it is one piece; INSIDE, its pieces added
    here; else one piece into `partial`. EVEN: outputs are whole tiles. WIDE: see dense_linear."""
    m = tl.program_id(2) * M + tl.arange(0, M)
    n = tl.program_id(0) * N + tl.arange(0, N)
    near = n
    if not EVEN:
        near = tl.minimum(n, outputs - 1)  # what is computed beyond the last output is not stored
    per_split = tl.cdiv(blocks, splits)
    if WHOLE:
        total = grouped_piece(
            x, words, high, scales, scale_shares, offsets, minimums, minimum_shares, sums, m, near, 0,
            blocks, outputs, padded, sum_stride, OFFSET, M, N, BITS, HIGH, SUB, GROUP, STEPS, SHARED, WIDE,
        )  # fmt: skip
        finish(total, bias, residual, out, m, n, rows, outputs, residual_stride, out_stride)
    elif INSIDE:
        total = tl.zeros([M, N], tl.float32)
        for split in range(splits):
            total += grouped_piece(
                x, words, high, scales, scale_shares, offsets, minimums, minimum_shares, sums, m, near,
                split * per_split,
                tl.minimum((split + 1) * per_split, blocks), outputs, padded, sum_stride,
                OFFSET, M, N, BITS, HIGH, SUB, GROUP, STEPS, SHARED, WIDE,
            )  # fmt: skip
        finish(total, bias, residual, out, m, n, rows, outputs, residual_stride, out_stride)
    else:
        split = tl.program_id(1)
        piece = grouped_piece(
            x, words, high, scales, scale_shares, offsets, minimums, minimum_shares, sums, m, near,
            split * per_split,
            tl.minimum((split + 1) * per_split, blocks), outputs, padded, sum_stride,
            OFFSET, M, N, BITS, HIGH, SUB, GROUP, STEPS, SHARED, WIDE,
        )  # fmt: skip
        at = partial + (split * rows + m)[:, None] * outputs + n[None, :]
        tl.store(at, piece, mask=(m[:, None] < rows) & (n[None, :] < outputs))


def tile_rows(rows: int, tallest: int = TILE_ROWS) -> int:
    """Rows of a tile: as few as hold them all, so that a weight is read once by up to 64 rows."""
    return 16 if rows <= 16 else 32 if rows <= 32 else tallest


def tile_of(rows: int, weight: PackedGroups, tallest: int = TILE_ROWS) -> tuple[int, int]:
    """Rows and outputs of a program of eight warps. A wide tile reads the activations less often (from the
    L2 cache: 16 rows cost as much as the codes of 64 outputs), but there must be one for every
    multiprocessor. 64 rows by 64 outputs is no choice: Triton would have every warp decode all codes. Nor are
    wide tiles for outputs that are no whole tiles, for sums in pieces, or for few rows and codes of 5 or 6
    bits: registers would spill."""
    height, wide = tile_rows(rows, tallest), 2 * BLOCK_N
    fits = weight.outputs % wide == 0 and weight.splits == 1 and (height > 32 or not weight.high_bits)
    programs = ceil_divide(rows, height) * (weight.outputs // wide) if fits else 0
    if programs >= MULTIPROCESSORS * (2 if height == 16 else 1):
        return height, wide
    return min(height, 32), BLOCK_N


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
    gives memory."""
    # with more rows than a tile the pieces of a sum are added inside one program
    inside = rows > TILE_ROWS or weight.splits == 1
    partial = None if inside else workspace("pieces", weight.splits * rows * weight.outputs, torch.float32)
    strides = (0 if residual is None else residual.stride(0)), out.stride(0)
    added = (bias, residual) if inside else (None, None)  # else when the pieces are added
    tallest = tallest_tile(out.device)
    if isinstance(weight, PackedGroups):
        tile = tile_of(rows, weight, tallest)
        start_grouped(launcher, rows, tile, x, weight, out, *added, partial, strides, workspace)
    else:
        height = tile_rows(rows, tallest)
        start_dense(launcher, rows, height, x, weight, out, *added, partial, strides, workspace)
    if not inside:
        launcher.start(
            add_pieces, (ceil_divide(weight.outputs, BLOCK_N), ceil_divide(rows, 16)), partial, bias,
            residual, out, rows, weight.outputs, weight.splits, *strides, M=16, N=BLOCK_N,
        )  # fmt: skip


def start_grouped(
    launcher: Launcher, rows: int, tile: tuple[int, int], x: Buffer, weight: PackedGroups,
    out: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
    partial: torch.Tensor | None, strides: tuple[int, int], workspace: Any,
) -> None:  # fmt: skip
    blocks = int(weight.words.shape[0])
    padded = blocks * weight.block_inputs
    cast = cast_activations(launcher, rows, x, padded, weight.factor, weight.order, workspace)
    height, width = tile
    sums, stride, groups = None, ceil_divide(rows, TILE_ROWS) * TILE_ROWS, len(weight.scales)
    if weight.minimums is not None:
        sums = workspace("sums", groups * stride, torch.float32)
        launcher.start(
            group_sums, (rows, ceil_divide(groups, SUMS)), cast, sums, padded, groups, stride,
            GROUP=weight.group, SUB=weight.sub, COUNT=SUMS,
        )  # fmt: skip
    tiles = ceil_divide(weight.outputs, width), 1 if partial is None else weight.splits
    launcher.start(
        grouped_linear, (*tiles, ceil_divide(rows, height)), cast, weight.words, weight.high, weight.scales,
        weight.scale_shares, weight.offsets, weight.minimums, weight.minimum_shares, sums, bias, residual,
        out, partial, rows, weight.outputs, padded, blocks, weight.splits, *strides, stride,
        OFFSET=weight.offset, M=height, N=width, BITS=weight.bits, HIGH=weight.high_bits, SUB=weight.sub,
        GROUP=weight.group, STEPS=weight.steps, SHARED=shared_subs(weight), INSIDE=partial is None,
        WHOLE=weight.splits == 1, EVEN=weight.outputs % width == 0,
        WIDE=INTERPRETED and weight.factor == torch.bfloat16, warps=8, stages=STAGES[height],
        registers=REGISTERS[height],
    )  # fmt: skip
