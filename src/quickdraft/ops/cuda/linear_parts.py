"""What linears of every format share: activations in the type their weight wants, bias and residual, and
pieces of a sum.

Knows no weight format.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quickdraft.ops.cuda.buffers import COPY_ROWS, Buffer
from quickdraft.ops.cuda.launch import Launcher, ceil_divide
from quickdraft.ops.cuda.numbers import as_stored

CAST_WIDTH = 1024


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


def cast_activations(
    launcher: Launcher, rows: int, x: Buffer, padded: int, kind: torch.dtype, order: torch.Tensor | None,
    workspace: Any,
) -> torch.Tensor:  # fmt: skip
    """x in another type and order, rows filled up with zeros to `padded`: the copy that what wrote x made,
    or one made now."""
    # rows behind the last of a tile are read, and their results dropped
    if order is None:
        cast, made = x.copy_of(kind, padded, rows)
        if made:
            return cast
    else:
        cast = workspace("cast", ceil_divide(rows, COPY_ROWS) * COPY_ROWS * padded, kind)
    launcher.start(
        cast_rows, (rows, ceil_divide(padded, CAST_WIDTH)), x.tensor, order, cast, x.shape[1], padded,
        WIDTH=CAST_WIDTH,
    )  # fmt: skip
    return cast
