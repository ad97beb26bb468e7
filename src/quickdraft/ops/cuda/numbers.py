"""Small functions that several kernels use: rounding to a stored type, and the sigmoid."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_stored(x, type: tl.constexpr):
    """float32 x rounded to nearest even in `type`; by its bits, as the interpreter cuts bfloat16 off."""
    if type == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x != x, 32704, (bits + 32767 + ((bits >> 16) & 1)) >> 16)
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(type)


@triton.jit
def store_copies(value, half, brain, row, i, half_stride, brain_stride, inside):
    """float32 values of a row into its copies in float16 and bfloat16, as cast_rows would."""
    if half is not None:
        tl.store(half + row * half_stride + i, as_stored(value, tl.float16), mask=inside)
    if brain is not None:
        tl.store(brain + row * brain_stride + i, as_stored(value, tl.bfloat16), mask=inside)


@triton.jit
def as_factor(x, type: tl.constexpr, WIDE: tl.constexpr):
    """x as a factor of tl.dot in `type`; WIDE: rounded to it, but kept in float32 (the interpreter has no
    products of bfloat16)."""
    if WIDE:
        return as_stored(x.to(tl.float32), type).to(tl.float32)
    return x.to(type)


@triton.jit
def group_number(number, share, TWO: tl.constexpr):
    """A group's scale or minimum, float32; TWO: the product of two levels, which float32 holds exactly."""
    wide = number.to(tl.float32)
    if TWO:
        wide = wide * share.to(tl.float32)
    return wide


@triton.jit
def brain_of(bits, WIDE: tl.constexpr):
    """bfloat16 numbers by their bits (int16); WIDE: the same numbers in float32."""
    if WIDE:
        numbers = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        numbers = bits.to(tl.bfloat16, bitcast=True)
    return numbers


@triton.jit
def code_factors(
    word, extra, zero, type: tl.constexpr, INDEX: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr,
    OFFSET: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Code INDEX of each word minus its zero point, 0..256: `zero`, float16, or OFFSET where that is None. In
    `type`, exact and without a conversion: bits that are OR-ed into 1024.0 (float16, 10 bits of fraction) or
    128.0 (bfloat16, 7 bits) add as many. A code of 8 bits has no room there: its halves go into 2048.0, where
    a bit counts 16, and 128.0. All sums on the way are whole numbers that the type holds. HIGH more bits of
    a code of 4 lie in `extra`."""
    bits = (word >> (INDEX * BITS)) & ((1 << BITS) - 1)
    if HIGH > 0:
        bits |= ((extra >> (INDEX * HIGH)) & ((1 << HIGH) - 1)) << 4
    if type == tl.float16:
        code = (bits | 0x6400).to(tl.float16, bitcast=True)
        factors = code - (1024.0 + OFFSET) if zero is None else code - (zero + 1024.0)
    elif BITS == 4:
        code = brain_of(bits | 0x4300, WIDE)
        factors = code - (128.0 + OFFSET) if zero is None else code - (zero + 128.0).to(code.dtype)
    else:
        high = brain_of((bits >> 4) | 0x4500, WIDE)
        high = high - (2048.0 + OFFSET) if zero is None else high - 2048.0 - zero.to(high.dtype)
        factors = high + (brain_of((bits & 15) | 0x4300, WIDE) - 128.0)
    return factors


@triton.jit
def sigmoid_of(x):
    """1 / (1 + exp(-x)) for any x."""
    return 1.0 / (1.0 + tl.exp(-x))
