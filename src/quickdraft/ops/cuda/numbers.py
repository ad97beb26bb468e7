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
def sigmoid_of(x):
    """1 / (1 + exp(-x)) for any x."""
    return 1.0 / (1.0 + tl.exp(-x))
