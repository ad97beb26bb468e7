"""Ops on rows by themselves: norms, rope, gates, swiglu, gather, the grouped convolution. A row or a
head is reduced by itself, so no row knows of another. Formulas are in ops/interface.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quickdraft.ops.cuda.buffers import Buffer
from quickdraft.ops.cuda.launch import Launcher, ceil_divide, power_of_two
from quickdraft.ops.cuda.numbers import sigmoid_of, store_copies

WIDTH = 1024
PAIRS = 8  # (row, head) pairs of a program


@triton.jit
def norm_rows(
    x, weight, out, half, brain, width, eps, x_stride, out_stride, half_stride, brain_stride,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """out = x / sqrt(mean(x^2) + eps) * weight; the sum goes over the columns in pieces of WIDTH, in
    order."""
    row = tl.program_id(0)
    i = tl.arange(0, WIDTH)
    squares = tl.zeros([WIDTH], tl.float32)
    for first in range(0, width, WIDTH):
        value = tl.load(x + row * x_stride + first + i, mask=first + i < width, other=0.0)
        squares += value * value
    scale = 1.0 / tl.sqrt_rn(tl.sum(squares) / width + eps)
    for first in range(0, width, WIDTH):
        inside = first + i < width
        value = tl.load(x + row * x_stride + first + i, mask=inside, other=0.0)
        factor = tl.load(weight + first + i, mask=inside, other=0.0)
        value = value * scale * factor
        tl.store(out + row * out_stride + first + i, value, mask=inside)
        store_copies(value, half, brain, row, first + i, half_stride, brain_stride, inside)


@triton.jit(do_not_specialize=["pairs"])
def norm_heads(
    x, gate, weight, out, half, brain, pairs, heads, size, eps, x_stride, out_stride, half_stride,
    brain_stride, GATED: tl.constexpr, PAIRS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """norm_rows of some (row, head) pairs; GATED: times silu(gate), which is laid out as out is."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    i = tl.arange(0, SIZE)
    inside = (pair[:, None] < pairs) & (i[None, :] < size)
    column = (pair % heads * size)[:, None] + i[None, :]
    value = tl.load(x + (pair // heads * x_stride)[:, None] + column, mask=inside, other=0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=1) / size + eps)
    value = value * scale[:, None] * tl.load(weight + i, mask=i < size, other=0.0)[None, :]
    at = (pair // heads * out_stride)[:, None] + column
    if GATED:
        opening = tl.load(gate + at, mask=inside, other=0.0)
        value *= opening * sigmoid_of(opening)
    tl.store(out + at, value, mask=inside)
    row = (pair // heads)[:, None]
    store_copies(value, half, brain, row, column, half_stride, brain_stride, inside)


@triton.jit(do_not_specialize=["pairs"])
def turn_heads(
    x, positions, table, pairs, heads, size, half, stride,
    INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """(a, b) -> (a cos - b sin, b cos + a sin) of some (row, head) pairs; table rows are cos, then sin."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    i = tl.arange(0, HALF)
    inside = (pair[:, None] < pairs) & (i[None, :] < half)
    position = tl.load(positions + pair // heads, mask=pair < pairs, other=0).to(tl.int64)
    angles = table + (position * (2 * half))[:, None] + i[None, :]
    cos = tl.load(angles, mask=inside, other=0.0)
    sin = tl.load(angles + half, mask=inside, other=0.0)
    if INTERLEAVED:
        first, second = 2 * i, 2 * i + 1
    else:
        first, second = i, i + half
    at = x + (pair // heads * stride + pair % heads * size)[:, None]
    a = tl.load(at + first[None, :], mask=inside, other=0.0)
    b = tl.load(at + second[None, :], mask=inside, other=0.0)
    tl.store(at + first[None, :], a * cos - b * sin, mask=inside)
    tl.store(at + second[None, :], b * cos + a * sin, mask=inside)


@triton.jit
def gate_rows(
    a, b, out, half, brain, width, a_stride, b_stride, out_stride, half_stride, brain_stride,
    SILU: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """SILU: out = silu(a) * b, else out = a * sigmoid(b)."""
    row = tl.program_id(0)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = i < width
    first = tl.load(a + row * a_stride + i, mask=inside, other=0.0)
    second = tl.load(b + row * b_stride + i, mask=inside, other=0.0)
    if SILU:
        value = first * sigmoid_of(first) * second
    else:
        value = first * sigmoid_of(second)
    tl.store(out + row * out_stride + i, value, mask=inside)
    store_copies(value, half, brain, row, i, half_stride, brain_stride, inside)


@triton.jit
def gather_wanted(
    x, wanted, out, half, brain, width, half_stride, brain_stride, WIDTH: tl.constexpr
):  # fmt: skip
    """out[r] = x[wanted[r]]."""
    row = tl.program_id(0)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = i < width
    value = tl.load(x + tl.load(wanted + row) * width + i, mask=inside, other=0.0)
    tl.store(out + row * width + i, value, mask=inside)
    store_copies(value, half, brain, row, i, half_stride, brain_stride, inside)


@triton.jit
def convolve_groups(
    x, base, deltas, row_starts, sequence_of, residual, out, half, brain, width, groups, delta_stride,
    half_stride, brain_stride, WIDTH: tl.constexpr,
):  # fmt: skip
    """See Ops.grouped_conv; `deltas` starts at the kernel of this convolution."""
    row = tl.program_id(0)
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = c < width
    group = c // (width // groups)
    here = tl.load(base + c, mask=inside, other=0.0)
    here += tl.load(deltas + row * delta_stride + group, mask=inside, other=0.0)
    value = here * tl.load(x + row * width + c, mask=inside, other=0.0)
    if row > tl.load(row_starts + tl.load(sequence_of + row)):
        past = tl.load(base + width + c, mask=inside, other=0.0)
        past += tl.load(deltas + row * delta_stride + groups + group, mask=inside, other=0.0)
        value += past * tl.load(x + (row - 1) * width + c, mask=inside, other=0.0)
    if residual is not None:
        value += tl.load(residual + row * width + c, mask=inside, other=0.0)
    tl.store(out + row * width + c, value, mask=inside)
    store_copies(value, half, brain, row, c, half_stride, brain_stride, inside)


def written_beside(out: Buffer, rows: int) -> tuple[tuple[Any, Any], tuple[int, int]]:
    """Copies of `out` that are written with it, and their strides."""
    half, brain = out.first_copies()
    whole = len(out.copies) == (half is not None) + (brain is not None)
    out.copied = rows if whole else 0
    return (half, brain), (0 if half is None else half.stride(0), 0 if brain is None else brain.stride(0))


def start_rms_norm(
    launcher: Launcher, rows: int, x: torch.Tensor, weight: torch.Tensor, eps: float, out: Buffer
) -> None:
    width = int(weight.shape[0])
    block = min(power_of_two(width), 2 * WIDTH)
    copies, beside = written_beside(out, rows)
    strides = x.stride(0), out.tensor.stride(0), *beside
    tensors = x, weight, out.tensor, *copies
    launcher.start(norm_rows, (rows,), *tensors, width, eps, *strides, WIDTH=block, warps=8)


def start_head_norm(
    launcher: Launcher, rows: int, x: torch.Tensor, heads: int, weight: torch.Tensor, eps: float,
    out: torch.Tensor, gate: torch.Tensor | None = None, copied: Buffer | None = None,
) -> None:  # fmt: skip
    """x and out [.., heads * size], columns of wider rows allowed; `copied`: the buffer that is all of
    out."""
    size = int(weight.shape[0])
    copies, strides = ((None, None), (0, 0)) if copied is None else written_beside(copied, rows)
    launcher.start(
        norm_heads, (ceil_divide(rows * heads, PAIRS),), x, gate, weight, out, *copies, rows * heads, heads,
        size, eps, x.stride(0), out.stride(0), *strides, GATED=gate is not None, PAIRS=PAIRS,
        SIZE=power_of_two(size),
    )  # fmt: skip


def start_rope(
    launcher: Launcher, rows: int, x: torch.Tensor, positions: torch.Tensor, heads: int, head_dim: int,
    table: torch.Tensor, interleaved: bool,
) -> None:  # fmt: skip
    half = int(table.shape[1]) // 2
    launcher.start(
        turn_heads, (ceil_divide(rows * heads, PAIRS),), x, positions, table, rows * heads, heads, head_dim,
        half, x.stride(0), INTERLEAVED=interleaved, PAIRS=PAIRS, HALF=power_of_two(half),
    )  # fmt: skip


def start_gate(
    launcher: Launcher, rows: int, a: torch.Tensor, b: torch.Tensor, out: Buffer, *, silu: bool
) -> None:
    """a, b [.., width], columns of wider rows allowed."""
    width = int(out.shape[1])
    copies, beside = written_beside(out, rows)
    strides = a.stride(0), b.stride(0), out.tensor.stride(0), *beside
    grid, tensors = (rows, ceil_divide(width, WIDTH)), (a, b, out.tensor, *copies)
    launcher.start(gate_rows, grid, *tensors, width, *strides, SILU=silu, WIDTH=WIDTH)


def start_gather(launcher: Launcher, rows: int, x: torch.Tensor, wanted: torch.Tensor, out: Buffer) -> None:
    width, (copies, strides) = int(x.shape[1]), written_beside(out, rows)
    tensors = x, wanted, out.tensor, *copies
    launcher.start(gather_wanted, (rows, ceil_divide(width, WIDTH)), *tensors, width, *strides, WIDTH=WIDTH)


def start_grouped_conv(
    launcher: Launcher, rows: int, x: torch.Tensor, base: torch.Tensor, deltas: torch.Tensor,
    row_starts: torch.Tensor, sequence_of: torch.Tensor, residual: torch.Tensor | None, out: Buffer,
) -> None:  # fmt: skip
    """`deltas` [T, 2 G], columns of a wider row."""
    width, groups = int(x.shape[1]), int(deltas.shape[1]) // 2
    copies, strides = written_beside(out, rows)
    launcher.start(
        convolve_groups, (rows, ceil_divide(width, WIDTH)), x, base, deltas, row_starts, sequence_of,
        residual, out.tensor, *copies, width, groups, deltas.stride(0), *strides, WIDTH=WIDTH,
    )  # fmt: skip
