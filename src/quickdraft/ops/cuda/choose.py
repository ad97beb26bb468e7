"""Choosing among logits on the card, without a sort: argmax, the largest k, and the Gumbel choice.

A number and its id become one 64-bit key whose order is "larger number, then lower id", so a maximum over
keys settles ties. Each program looks at one piece of a row, a second kernel at the pieces' winners. The
Gumbel noise repeats ops/reference/gumbel.py operation by operation in float64 (products and sums are not
fused), so its bits are equal.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quickdraft.ops.cuda.launch import Launcher, ceil_divide, power_of_two

PIECE = 4096
TOP_PIECE = 2048
NOISE_PIECE = 1024
LOWEST_KEY = tl.constexpr(-(2**63) + 1)
NAN_KEY = tl.constexpr(2**63 - 1)


@triton.jit
def keys_of(values, ids):
    """int64: float32 numbers in their order in the high half, lower ids first in the low half. NaN:
    NAN_KEY."""
    values = tl.where(values == 0.0, 0.0, values)
    bits = values.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = ordered * 4294967296 + (4294967295 - ids.to(tl.int64))
    return tl.where(values != values, NAN_KEY, key)


@triton.jit
def id_of(key):
    return (4294967295 - (key & 4294967295)).to(tl.int32)


@triton.jit
def value_of(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def best_of_piece(x, keys, width, pieces, PIECE: tl.constexpr):
    """The largest key of one piece of a row."""
    i = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    values = tl.load(x + tl.program_id(0).to(tl.int64) * width + i, mask=i < width, other=float("-inf"))
    key = tl.where(i < width, keys_of(values, i), LOWEST_KEY)
    tl.store(keys + tl.program_id(0) * pieces + tl.program_id(1), tl.max(key, axis=0))


@triton.jit
def best_of_pieces(keys, ids, pieces, PIECES: tl.constexpr):
    """The id of the largest key of a row; -1 where a NaN was met."""
    i = tl.arange(0, PIECES)
    key = tl.max(tl.load(keys + tl.program_id(0) * pieces + i, mask=i < pieces, other=LOWEST_KEY), axis=0)
    tl.store(ids + tl.program_id(0), tl.where(key == NAN_KEY, -1, id_of(key)))


@triton.jit
def top_of_piece(x, keys, width, pieces, k, PIECE: tl.constexpr):
    """The k largest keys of one piece, best first; LOWEST_KEY where there are fewer, or NaN."""
    i = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    values = tl.load(x + tl.program_id(0).to(tl.int64) * width + i, mask=i < width, other=float("-inf"))
    key = tl.where((i < width) & (values == values), keys_of(values, i), LOWEST_KEY)
    at = keys + (tl.program_id(0) * pieces + tl.program_id(1)) * k
    for place in range(k):
        best = tl.max(key, axis=0)
        tl.store(at + place, best)
        key = tl.where(key == best, LOWEST_KEY, key)


@triton.jit
def top_of_pieces(keys, ids, values, count, k, COUNT: tl.constexpr):
    """The k largest of `count` keys of a row: ids and values; -1 and -inf where there are fewer."""
    i = tl.arange(0, COUNT)
    row = tl.program_id(0)
    key = tl.load(keys + row * count + i, mask=i < count, other=LOWEST_KEY)
    for place in range(k):
        best = tl.max(key, axis=0)
        none = best == LOWEST_KEY
        tl.store(ids + row * k + place, tl.where(none, -1, id_of(best)))
        tl.store(values + row * k + place, tl.where(none, float("-inf"), value_of(best)))
        key = tl.where(key == best, LOWEST_KEY, key)


@triton.jit
def stated_log(x):
    """See ops/reference/gumbel.py; x is a normal float64 above 0."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 2047) - 1022
    mantissa = ((bits & 4503599627370495) | 4602678819172646912).to(tl.float64, bitcast=True)
    low = mantissa < 0.7071067811865476
    mantissa = tl.where(low, mantissa * 2.0, mantissa)
    exponent = tl.where(low, exponent - 1, exponent).to(tl.float64)
    z = (mantissa - 1.0) / (mantissa + 1.0)
    square = z * z
    series = tl.full(z.shape, 0.04, tl.float64)  # 1 / 25
    for place in tl.static_range(12):
        series = series * square + 1.0 / (23 - 2 * place)
    return exponent * 0.6931471805599453 + 2.0 * z * series


@triton.jit
def gumbel_of(ids, seed, position):
    """float64 noise of token ids under a 64-bit seed, at an absolute position."""
    mask = tl.full([1], 4294967295, tl.int64)
    c0 = ids.to(tl.int64) & mask
    c1 = tl.zeros_like(c0)
    c2 = tl.zeros_like(c0) + (position & mask)
    c3 = tl.zeros_like(c0) + ((position >> 32) & mask)
    k0 = seed & mask
    k1 = (seed >> 32) & mask
    for _ in tl.static_range(10):
        # products of 32-bit numbers, the high half without its sign
        p0, p1 = c0 * 3528531795, c2 * 3449720151
        c0, c1, c2, c3 = ((p1 >> 32) & mask) ^ c1 ^ k0, p1 & mask, ((p0 >> 32) & mask) ^ c3 ^ k1, p0 & mask
        k0 = (k0 + 2654435769) & mask
        k1 = (k1 + 3144134277) & mask
    u = ((c0 >> 6).to(tl.float64) * 67108864.0 + (c1 >> 6).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -stated_log(-stated_log(u))


@triton.jit
def gumbel_of_piece(x, names, draws, best, ids, width, PIECE: tl.constexpr):
    """The best score of one piece of a row, and the lowest id that has it. `draws` int64 [rows, 3]:
    temperature (float64 by its bits; of 0, nothing is drawn), seed, position."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    draw = draws + row * 3
    heat = tl.load(draw).to(tl.float64, bitcast=True)
    if heat == 0.0:
        return
    i = piece * PIECE + tl.arange(0, PIECE)
    inside = i < width
    name = i.to(tl.int64)
    if names is not None:
        name = tl.load(names + i, mask=inside, other=0)
    values = tl.load(x + row * width + i, mask=inside, other=float("-inf")).to(tl.float64)
    scores = values / heat + gumbel_of(name, tl.load(draw + 1), tl.load(draw + 2))
    scores = tl.where(inside, scores, float("-inf"))
    high = tl.max(scores, axis=0)
    found = tl.where(inside & (scores == high), name, 9223372036854775807)
    at = row * tl.num_programs(1) + piece
    tl.store(best + at, high)
    tl.store(ids + at, tl.min(found, axis=0))


@triton.jit
def gumbel_of_pieces(best, ids, draws, greedy, chosen, pieces, PIECES: tl.constexpr):
    """chosen int64 [rows, 2]: a row's greedy id, and the one that was drawn, or the greedy one again."""
    row, i = tl.program_id(0), tl.arange(0, PIECES)
    first = tl.full([1], -1, tl.int64)
    if greedy is not None:
        first += tl.load(greedy + row) + 1
    inside = i < tl.where(tl.load(draws + row * 3) == 0, 0, pieces)
    scores = tl.load(best + row * pieces + i, mask=inside, other=float("-inf"))
    names = tl.load(ids + row * pieces + i, mask=inside, other=9223372036854775807)
    drawn = tl.min(tl.where(scores == tl.max(scores, axis=0), names, 9223372036854775807), axis=0)
    at = chosen + row * 2 + tl.arange(0, 1)
    tl.store(at, first)
    tl.store(at + 1, tl.where(drawn == 9223372036854775807, first, drawn))


def start_argmax(launcher: Launcher, rows: int, x: torch.Tensor, ids: torch.Tensor, workspace: Any) -> None:
    """See Ops.argmax; x [.., N] contiguous."""
    width = int(x.shape[1])
    pieces = ceil_divide(width, PIECE)
    keys = workspace("keys", rows * pieces, torch.int64)
    launcher.start(best_of_piece, (rows, pieces), x, keys, width, pieces, PIECE=PIECE)
    launcher.start(best_of_pieces, (rows,), keys, ids, pieces, PIECES=power_of_two(pieces))


def start_top_rows(
    launcher: Launcher, rows: int, x: torch.Tensor, k: int, ids: torch.Tensor, values: torch.Tensor,
    workspace: Any,
) -> None:  # fmt: skip
    """See Ops.top_rows."""
    width = int(x.shape[1])
    pieces = ceil_divide(width, TOP_PIECE)
    keys = workspace("keys", rows * pieces * k, torch.int64)
    launcher.start(top_of_piece, (rows, pieces), x, keys, width, pieces, k, PIECE=TOP_PIECE)
    launcher.start(
        top_of_pieces, (rows,), keys, ids, values, pieces * k, k, COUNT=power_of_two(pieces * k), warps=8
    )


def start_gumbel_rows(
    launcher: Launcher, rows: int, x: torch.Tensor, names: torch.Tensor | None, draws: torch.Tensor,
    greedy: torch.Tensor | None, chosen: torch.Tensor, workspace: Any,
) -> None:  # fmt: skip
    """See Ops.gumbel_rows; x [.., N] contiguous, `names` of its columns."""
    width = int(x.shape[-1])
    pieces = ceil_divide(width, NOISE_PIECE)
    best = workspace("best", rows * pieces, torch.float64)
    ids = workspace("keys", rows * pieces, torch.int64)
    launcher.start(
        gumbel_of_piece, (rows, pieces), x, names, draws, best, ids, width, PIECE=NOISE_PIECE, exact=True
    )
    launcher.start(
        gumbel_of_pieces, (rows,), best, ids, draws, greedy, chosen, pieces, PIECES=power_of_two(pieces)
    )
