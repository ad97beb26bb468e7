"""attention on the card: all rows and query heads of a kv head in one tile, spans merged in
order.

A program holds a tile of (row, query head) pairs of one sequence and kv head and walks one span of positions,
aligned to position 0; a second kernel merges the spans of each row in ascending order. So a row's bits depend
on its own position and on what its sequence holds, never on its neighbours or on how many rows a step has.
Both are started once for all sequences, by counts that a captured shape has: programs find their sequence and
its context in the batch's tensors, and those behind the last tile or span end at once. Keys
that a row does not see are selected away; values it does not see are weighted by 0, and kv_write lets none be
anything but finite. Queries and weights of keys take the cache's type (float16 for int8).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quickdraft.ops.cuda.batch import CudaBatch
from quickdraft.ops.cuda.buffers import CudaKV
from quickdraft.ops.cuda.launch import (
    INTERPRETED,
    TILE_ROWS,
    Launcher,
    ceil_divide,
    power_of_two,
    tallest_tile,
)
from quickdraft.ops.cuda.numbers import as_factor

SPAN = 1024  # positions reduced by one program
POSITIONS = {False: 16, True: 32}  # of a tile, by whether they are int8
PART_BYTES = 64 << 20  # of spans waiting to be merged; more rows go in several starts


@triton.jit
def low_byte(word):
    """Of two signed bytes in an int16."""
    return (word << 8) >> 8


@triton.jit
def tile_of(
    tile, row_starts, first_row, last_row, sequences, M: tl.constexpr, GROUP: tl.constexpr,
    SEQUENCES: tl.constexpr,
):  # fmt: skip
    """The sequence of a tile and which of that sequence's it is: the tiles of one sequence follow those of
    another. Behind the last one: a tile of the last sequence that has no rows."""
    i = tl.arange(0, SEQUENCES)
    inside = i < sequences
    start = tl.maximum(tl.load(row_starts + i, mask=inside, other=0), first_row)
    end = tl.minimum(tl.load(row_starts + i + 1, mask=inside, other=0), last_row)
    tiles = (tl.maximum(end - start, 0) * GROUP + M - 1) // M
    passed = inside & (tl.cumsum(tiles, axis=0) <= tile)
    sequence = tl.minimum(tl.sum(passed.to(tl.int32), axis=0), sequences - 1)
    return sequence, tile - tl.sum(tl.where(i < sequence, tiles, 0), axis=0)


@triton.jit
def first_span_of(sequence, positions, row_starts, seen_from, window, SPAN: tl.constexpr):
    """The first span that any row of the sequence sees."""
    low = tl.load(seen_from + sequence)
    if window > 0:
        low = tl.maximum(low, tl.load(positions + tl.load(row_starts + sequence)) - window + 1)
    return low // SPAN


@triton.jit(do_not_specialize=["first_row", "last_row", "sequences", "spans", "window"])
def attend_span(
    qkv, keys, values, key_scales, value_scales, positions, row_starts, tables, seen_from,
    highs, totals, sums,
    first_row, last_row, sequences, spans, table_width, kv_heads, stride, scale, window,
    M: tl.constexpr, P: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr, WIDE: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """A tile of row-and-head pairs over one span: maximum, total and weighted sum of each pair.

    Rows first_row..last_row-1 of the step; scale is in powers of two; window 0: none. With scales keys and
    values are int8, two neighbours (of a key's dimensions, of a value's positions) in an int16."""
    head, span = tl.program_id(1), tl.program_id(2)
    sequence, tile = tile_of(
        tl.program_id(0), row_starts, first_row, last_row, sequences, M, GROUP, SEQUENCES
    )
    end_row = tl.load(row_starts + sequence + 1)
    pair = tile * M + tl.arange(0, M)
    row = tl.maximum(tl.load(row_starts + sequence), first_row) + pair // GROUP
    real = row < tl.minimum(end_row, last_row)
    position = tl.load(positions + row, mask=real, other=0)
    low = tl.zeros([M], tl.int32) + tl.load(seen_from + sequence)
    low = tl.maximum(low, tl.where(window > 0, position - window + 1, 0))
    high = position
    if BLOCK:
        high = tl.zeros([M], tl.int32) + tl.load(positions + end_row - 1)
    high = tl.where(real, high, -1)
    low = tl.where(real, low, 2147483647)
    base = (first_span_of(sequence, positions, row_starts, seen_from, window, SPAN) + span) * SPAN
    first = tl.maximum(tl.min(low, axis=0), base)
    last = tl.minimum(tl.max(high, axis=0) + 1, base + SPAN)
    if first >= last:
        return
    d = tl.arange(0, D)
    query_head = head * GROUP + pair % GROUP
    at = qkv + row[:, None] * stride + query_head[:, None] * DIM
    if key_scales is None:
        q = tl.load(at + d[None, :], mask=real[:, None] & (d[None, :] < DIM), other=0.0)
        q = as_factor(q, TYPE, WIDE)
    else:
        d2 = tl.arange(0, D // 2)
        inside = real[:, None] & (2 * d2[None, :] < DIM)
        q = tl.load(at + 2 * d2[None, :], mask=inside, other=0.0).to(TYPE)
        q_odd = tl.load(at + 2 * d2[None, :] + 1, mask=inside, other=0.0).to(TYPE)
    top = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for start in range(first // P * P, last, P):
        p = start + tl.arange(0, P)
        slot = p % 16
        # slots of a block that no row sees are read, but not looked at: they may hold anything
        if key_scales is None:  # a tile is one block
            block = tl.load(tables + sequence * table_width + start // 16).to(tl.int64)
            at_key = keys + (block * kv_heads + head) * DIM * 16
            at_key += tl.arange(0, P)[None, :] + d[:, None] * 16
            if DIM == D:
                k = tl.load(at_key)
            else:
                k = tl.load(at_key, mask=d[:, None] < DIM, other=0.0)
            scores = tl.dot(q, as_factor(k, TYPE, WIDE), input_precision="ieee") * scale
        else:
            near = tl.minimum(tl.maximum(p // 16, first // 16), (last - 1) // 16)
            block = tl.load(tables + sequence * table_width + near).to(tl.int64)
            place = (block * kv_heads + head) * (DIM + 4) * 8
            floats = (block * kv_heads + head) * (DIM + 4) * 4 + DIM * 4 + slot
            at_key = keys + (place + slot)[None, :] + d2[:, None] * 16
            if DIM == D:
                word = tl.load(at_key)
            else:
                word = tl.load(at_key, mask=2 * d2[:, None] < DIM, other=0)
            scores = tl.dot(q, low_byte(word).to(TYPE))
            scores = (
                tl.dot(q_odd, (word >> 8).to(TYPE), scores) * (scale * tl.load(key_scales + floats))[None, :]
            )
        seen = (p[None, :] >= low[:, None]) & (p[None, :] <= high[:, None]) & (p[None, :] < last)
        scores = tl.where(seen, scores, float("-inf"))
        reached = tl.maximum(top, tl.max(scores, axis=1))
        around = tl.where(reached == float("-inf"), 0.0, reached)  # nothing seen yet
        weights = tl.exp2(scores - around[:, None])
        old = tl.exp2(top - around)
        total = total * old + tl.sum(weights, axis=1)
        top = reached
        acc *= old[:, None]
        if key_scales is None:
            at_value = values + (block * kv_heads + head) * DIM * 16
            at_value += tl.arange(0, P)[:, None] * DIM + d[None, :]
            there = (p[:, None] >= first) & (p[:, None] < last)
            if DIM == D:
                v = tl.load(at_value, mask=there, other=0.0)
            else:
                v = tl.load(at_value, mask=there & (d[None, :] < DIM), other=0.0)
            weights, v = as_factor(weights, TYPE, WIDE), as_factor(v, TYPE, WIDE)
            acc = tl.dot(weights, v, acc, input_precision="ieee")
        else:
            there = (p >= first) & (p < last)
            weights *= tl.where(there, tl.load(value_scales + floats), 0.0)[None, :]
            even, odd = tl.split(tl.reshape(weights.to(TYPE), [M, P // 2, 2]))
            p2 = start // 2 + tl.arange(0, P // 2)  # pairs of positions
            near = tl.minimum(tl.maximum(p2 // 8, first // 16), (last - 1) // 16)
            block2 = tl.load(tables + sequence * table_width + near).to(tl.int64)
            place2 = (block2 * kv_heads + head) * (DIM + 4) * 8 + p2 % 8 * DIM
            at_value = values + place2[:, None] + d[None, :]
            if DIM == D:
                word = tl.load(at_value)
            else:
                word = tl.load(at_value, mask=d[None, :] < DIM, other=0)
            acc = tl.dot(even, low_byte(word).to(TYPE), acc)
            acc = tl.dot(odd, (word >> 8).to(TYPE), acc)
    out_pair = ((row - first_row) * kv_heads * GROUP + query_head) * spans + span
    tl.store(highs + out_pair, top, mask=real)
    tl.store(totals + out_pair, total, mask=real)
    at_sum = sums + out_pair[:, None].to(tl.int64) * DIM + d[None, :]
    tl.store(at_sum, acc, mask=real[:, None] & (d[None, :] < DIM))


@triton.jit(do_not_specialize=["first_row", "sequences", "spans", "window"])
def merge_spans(
    positions, row_starts, sequence_of, seen_from, highs, totals, sums, out,
    first_row, sequences, spans, heads, dim, window, out_stride,
    D: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The spans of one row and head that it sees, in ascending order."""
    row, head = first_row + tl.program_id(0), tl.program_id(1)
    if row >= tl.load(row_starts + sequences):
        return
    sequence = tl.load(sequence_of + row)
    first_span = first_span_of(sequence, positions, row_starts, seen_from, window, SPAN)
    position = tl.load(positions + row)
    low = tl.load(seen_from + sequence)
    if window > 0:
        low = tl.maximum(low, position - window + 1)
    if BLOCK:
        position = tl.load(positions + tl.load(row_starts + sequence + 1) - 1)
    d = tl.arange(0, D)
    acc = tl.zeros([D], tl.float32)
    total, high = 0.0, float("-inf")
    for span in range(low // SPAN - first_span, position // SPAN + 1 - first_span):
        at = (tl.program_id(0) * heads + head) * spans + span
        reached = tl.load(highs + at)
        merged = tl.maximum(high, reached)
        old, new = tl.exp2(high - merged), tl.exp2(reached - merged)
        total = total * old + tl.load(totals + at) * new
        acc = acc * old + tl.load(sums + at.to(tl.int64) * dim + d, mask=d < dim, other=0.0) * new
        high = merged
    tl.store(out + row * out_stride + head * dim + d, acc / total, mask=d < dim)


def start_attention(
    launcher: Launcher, batch: CudaBatch, qkv: torch.Tensor, query_heads: int, kv: CudaKV, layer: int,
    scale: float, out: torch.Tensor, window: int, block: bool, workspace: Any,
) -> None:  # fmt: skip
    """See Ops.attention. Two starts for all sequences, or more where rows leave many spans to be merged."""
    for rows, sequences, spans in batch.parts():
        if window:
            spans = min(spans, ceil_divide(window + len(rows) - 2, batch.span) + 1)
        chunk = max(PART_BYTES // (query_heads * kv.head_dim * 4 * spans), 1)
        for start in rows[::chunk]:
            _attend_rows(
                launcher, batch, qkv, query_heads, kv, layer, scale, out, window, block, workspace,
                (start, min(start + chunk, rows.stop)), sequences, spans,
            )  # fmt: skip


def tile_heights(kind: str, width: int, tallest: int = TILE_ROWS) -> tuple[int, int]:
    """The fewest and the most (row, query head) pairs of a tile, for keys of type `kind` and heads `width`
    wide in a tile. All heights between lay the weights of a row out alike, so that their sum has one order:
    Triton decides by whether a tile of a matrix product is higher than wide, of float32 by its size, and 64
    pairs of float32 beside heads of 256 take more shared memory than there is."""
    if kind == "float32":
        return 32, 32
    return (width, tallest) if width < 64 else (16, tallest if width > 64 else min(tallest, 32))


def tile_pairs(pairs: int, least: int, most: int) -> int:
    """Pairs of a tile: one tile where it holds them all, so that keys are read once; beyond that those tiles
    that leave the fewest places empty, as arithmetic then takes longer than reading."""
    if pairs <= most:
        return max(power_of_two(pairs), least)
    return min(most, max(most // 2, least), key=lambda height: ceil_divide(pairs, height) * height)


def _attend_rows(
    launcher: Launcher, batch: CudaBatch, qkv: torch.Tensor, query_heads: int, kv: CudaKV, layer: int,
    scale: float, out: torch.Tensor, window: int, block: bool, workspace: Any, rows: tuple[int, int],
    shared: int, spans: int,
) -> None:  # fmt: skip
    """`rows` first and behind the last, of `shared` sequences."""
    dim, group, count = kv.head_dim, query_heads // kv.kv_heads, rows[1] - rows[0]
    sequences, most, span = batch.sequences, power_of_two(batch.limits[1]), batch.span
    # a factor of a product is at least 16 wide, and of int8 every other dimension is one
    block_d = max(power_of_two(dim), 32 if kv.dtype == "int8" else 16)
    heights = tile_heights(kv.dtype, block_d, tallest_tile(out.device))
    height = tile_pairs(ceil_divide(count, shared) * group, *heights)
    # The most there are, however the rows are divided.
    tiles = (count * group + shared * (height - 1)) // height
    highs = workspace("highs", count * query_heads * spans, torch.float32)
    totals = workspace("totals", count * query_heads * spans, torch.float32)
    sums = workspace("sums", count * query_heads * spans * dim, torch.float32)
    keys, values = kv.key_tensor[layer], kv.value_tensor[layer]
    scales: tuple[Any, Any] = None, None
    if kv.dtype == "int8":
        scales = keys.view(torch.float32), values.view(torch.float32)
        keys, values = keys.view(torch.int16), values.view(torch.int16)
    kind = {"float32": tl.float32, "bfloat16": tl.bfloat16}.get(kv.dtype, tl.float16)
    log2_scale = scale * 1.4426950408889634
    launcher.start(
        attend_span, (tiles, kv.kv_heads, spans), qkv, keys, values, *scales, batch.positions,
        batch.row_starts, batch.block_tables, batch.seen_from, highs, totals, sums, *rows, sequences, spans,
        batch.limits[2], kv.kv_heads, qkv.stride(0), log2_scale, window, M=height,
        P=POSITIONS[kv.dtype == "int8"], D=block_d, DIM=dim, GROUP=group, SPAN=span, BLOCK=block, TYPE=kind,
        WIDE=INTERPRETED and kind == tl.bfloat16, SEQUENCES=most,
        warps=4 if height < TILE_ROWS or dim <= 128 else 8, stages=3,
    )  # fmt: skip
    launcher.start(
        merge_spans, (count, query_heads), batch.positions, batch.row_starts, batch.sequence_of,
        batch.seen_from, highs, totals, sums, out, rows[0], sequences, spans, query_heads, dim, window,
        out.stride(0), D=block_d, SPAN=span, BLOCK=block, warps=1,
    )  # fmt: skip
