"""linear with a dense weight on the card, cut and added like one with a quantised weight (linear).

Activations meet a float16 or bfloat16 weight rounded to its type, a float32 weight as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quickdraft.ops.cuda.buffers import Buffer
from quickdraft.ops.cuda.launch import INTERPRETED, Launcher, ceil_divide
from quickdraft.ops.cuda.linear_parts import cast_activations, finish
from quickdraft.ops.cuda.numbers import as_factor
from quickdraft.ops.cuda.weights import BLOCK_N, DENSE_BLOCK_K, PackedDense


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


def start_dense(
    launcher: Launcher, rows: int, height: int, x: Buffer, weight: PackedDense,
    out: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
    partial: torch.Tensor | None, strides: tuple[int, int], workspace: Any,
) -> None:  # fmt: skip
    """linear.start_linear of a dense weight, with tiles of `height` rows."""
    kind, padded, factors = weight.values.dtype, weight.inputs, x.tensor
    if kind != torch.float32:
        padded = ceil_divide(weight.inputs, DENSE_BLOCK_K) * DENSE_BLOCK_K
        factors = cast_activations(launcher, rows, x, padded, kind, None, workspace)
    width = BLOCK_N // 2 if height > 32 else BLOCK_N  # so that no register spills
    tiles = ceil_divide(weight.outputs, width), 1 if partial is None else weight.splits
    launcher.start(
        dense_linear, (*tiles, ceil_divide(rows, height)), factors, weight.values, bias, residual, out,
        partial, rows, weight.outputs, weight.inputs, padded, ceil_divide(weight.inputs, DENSE_BLOCK_K),
        weight.splits, *strides, M=height, N=width, K=DENSE_BLOCK_K, INSIDE=partial is None,
        WIDE=INTERPRETED and kind == torch.bfloat16, stages=3,
        registers=None if kind == torch.float32 else 255,  # of 16 bits, ptxas may choose 64 and spill
    )  # fmt: skip
