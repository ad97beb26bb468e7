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
