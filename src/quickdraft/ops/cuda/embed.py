"""embed on the card: rows of a table, exactly the values the table holds. Knows no other op."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quickdraft.ops.cuda.launch import Launcher, ceil_divide
from quickdraft.ops.cuda.numbers import group_number
from quickdraft.ops.cuda.weights import Packed, PackedDense

WIDTH = 1024


@triton.jit
def number_at(numbers, shares, group, above, inside):
    number = tl.load(numbers + group, mask=inside, other=0)
    share = number
    if shares is not None:
        share = tl.load(shares + above, mask=inside, other=0.0)
    return group_number(number, share, shares is not None)


@triton.jit
def embed_groups(
    tokens, words, high, scales, scale_shares, offsets, minimums, minimum_shares, order, instead, out,
    scale, outputs, width, instead_id, OFFSET: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr,
    SUB: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out[t] = value(table[tokens[t]]) * scale of a quantised table, started with exact roundings."""
    row = tl.program_id(0)
    token = tl.load(tokens + row)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = k < width
    count: tl.constexpr = 16 // BITS
    at = ((k // (count * SUB)).to(tl.int64) * outputs + token) * SUB + k % SUB
    shift = (k // SUB % count * BITS).to(tl.int16)
    code = (tl.load(words + at, mask=inside, other=0) >> shift) & ((1 << BITS) - 1)
    if HIGH > 0:
        block = k // (count * SUB)
        byte = tl.load(
            high + ((block * HIGH // 2).to(tl.int64) * outputs + token) * SUB + k % SUB, mask=inside, other=0
        )
        shift = block * HIGH % 2 * 4 + k // SUB % count * HIGH
        code |= (((byte.to(tl.int32) >> shift) & ((1 << HIGH) - 1)) << 4).to(tl.int16)
    number = code.to(tl.float32)
    group = k // GROUP * outputs + token
    if offsets is not None:
        number -= tl.load(offsets + group, mask=inside, other=0.0).to(tl.float32)
    else:
        number -= OFFSET
    above = k // (GROUP * STEPS) * outputs + token
    value = number * number_at(scales, scale_shares, group, above, inside)
    if minimums is not None:
        value += number_at(minimums, minimum_shares, group, above, inside)
    if order is not None:
        k = tl.load(order + k, mask=inside, other=0)
    if instead is not None:
        value = tl.where(token == instead_id, tl.load(instead + k, mask=inside, other=0.0), value)
    tl.store(out + row * width + k, value * scale, mask=inside)


@triton.jit
def embed_dense(tokens, values, instead, out, scale, width, instead_id, WIDTH: tl.constexpr):
    """The same for a dense table."""
    row = tl.program_id(0)
    token = tl.load(tokens + row)
    k = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(values + token.to(tl.int64) * width + k, mask=k < width, other=0.0).to(tl.float32)
    if instead is not None:
        value = tl.where(token == instead_id, tl.load(instead + k, mask=k < width, other=0.0), value)
    tl.store(out + row * width + k, value * scale, mask=k < width)


def start_embed(
    launcher: Launcher, rows: int, tokens: torch.Tensor, table: Packed, out: torch.Tensor, scale: float,
    instead: tuple[int, torch.Tensor] | None,
) -> None:  # fmt: skip
    """See Ops.embed."""
    number, row = instead if instead is not None else (-1, None)
    width = table.inputs
    grid = rows, ceil_divide(width, WIDTH)
    if isinstance(table, PackedDense):
        launcher.start(embed_dense, grid, tokens, table.values, row, out, scale, width, number, WIDTH=WIDTH)
        return
    launcher.start(
        embed_groups, grid, tokens, table.words, table.high, table.scales, table.scale_shares, table.offsets,
        table.minimums, table.minimum_shares, table.order, row, out, scale, table.outputs, width, number,
        OFFSET=table.offset, BITS=table.bits, HIGH=table.high_bits, SUB=table.sub, GROUP=table.group,
        STEPS=table.steps, WIDTH=WIDTH, exact=True,
    )  # fmt: skip
