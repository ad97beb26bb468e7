"""Unpackers of quantised linears: the integers of GPTQ, AWQ and compressed-tensors files -> ops.weights values.

No number is changed: value = scale * (code - zero point), signed scales included, to the last bit.
Words are int32 read as unsigned, a code's lowest bit in the lowest place. O outputs, I inputs, G groups.
Scales come out of `exact_scales`, orders out of `input_order`; these raise ValueError with the cause alone.
Knows arrays, not files or names, and takes it that their shapes fit.
"""

from __future__ import annotations

from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.weights import Grouped, Int4Groups, Int8Groups

Words = NDArray[np.int32]
Order = NDArray[np.int32]  # of the inputs, see ops.weights
# byte -> its two codes of 4 bits, the low one first
_PAIRS: Final = np.array([byte & 15 | (byte >> 4) << 8 for byte in range(256)], "<u2")
_AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # output o of 8 lies in this nibble
_SMALLEST_SCALE: Final = 2.0**-100  # products with smaller ones would leave fp32's normal numbers
_INPUT_UNIT: Final = 32  # groups are cut in runs of so many inputs


def unpacked(words: Words, bits: int) -> NDArray[np.uint8]:
    """[R, W] words of 4- or 8-bit codes -> [R, W * 32 / bits]."""
    raw = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    return raw if bits == 8 else _PAIRS[raw].view(np.uint8)


def gptq(
    qweight: Words, qzeros: Words, scales: NDArray[Any], order: Order | None, bits: int, offset: int,
    group_size: int,
) -> Grouped:  # fmt: skip
    """qweight [I * bits / 32, O], qzeros [G, O * bits / 32] without `offset`, scales [G, O]."""
    outputs = scales.shape[1]
    codes = unpacked(qweight.T, bits)
    zeros = unpacked(qzeros, bits)[:, :outputs].T.astype(np.int16) + np.int16(offset)
    return _grouped(codes, scales.T, zeros, order, bits, group_size)


def awq(qweight: Words, qzeros: Words, scales: NDArray[Any], group_size: int) -> Grouped:
    """Four bits: qweight [I, O / 8], qzeros [G, O / 8], scales [G, O]."""

    def columns(words: Words) -> NDArray[np.uint8]:  # [R, O / 8] -> [O, R]
        eights = unpacked(words, 4).reshape(len(words), -1, 8)
        return eights[:, :, _AWQ_PLACES].reshape(len(words), -1).T

    return _grouped(columns(qweight), scales.T, columns(qzeros).astype(np.int16), None, 4, group_size)


def pack_quantized(
    packed: Words, scales: NDArray[Any], zero_points: Words | None, order: Order | None, bits: int,
    inputs: int, group_size: int,
) -> Grouped:  # fmt: skip
    """compressed-tensors: packed [O, ceil(I * bits / 32)], scales [O, G], zero points packed over the
    outputs, [ceil(O * bits / 32), G] (None: symmetric)."""
    codes, zeros = unpacked(packed, bits)[:, :inputs], None
    if zero_points is not None:
        zeros = unpacked(zero_points.T, bits)[:, : len(packed)].T.astype(np.int16)
    return _grouped(codes, scales, zeros, order, bits, group_size)


def symmetric_offset(qzeros: Words, bits: int, stated: int) -> int:
    """What is to be added to stored zero points: `stated`, unless every word is that of a symmetric file,
    0x7777.. lacking 1 or 0x8888.. as it is."""
    bytes_of = unpacked(qzeros, 8)
    middle = (0x77, 0x88) if bits == 4 else (0x7F, 0x80)
    if (bytes_of == bytes_of.flat[0]).all() and bytes_of.flat[0] in middle:
        return 1 - middle.index(int(bytes_of.flat[0]))
    return stated


def is_symmetric(weight: Grouped) -> bool:
    """Whether every zero point is the middle of the codes."""
    return weight.zeros is None or bool((weight.zeros == (8 if isinstance(weight, Int4Groups) else 0)).all())


def _grouped(
    codes: NDArray[np.uint8], scales: NDArray[Any], zeros: NDArray[np.int16] | None, order: Order | None,
    bits: int, group_size: int,
) -> Grouped:  # fmt: skip
    """Codes [O, I] and zeros [O, G] from 0 on."""
    inputs, middle = codes.shape[1], 1 << bits - 1
    if zeros is not None and (zeros == middle).all():
        zeros = None
    if order is not None:
        codes = codes[:, order]
    numbers: NDArray[Any] = scales
    if zeros is None and numbers.dtype != np.float16:
        zeros = np.full(numbers.shape, middle, np.int16)
    if inputs % group_size:  # the last group is not full
        numbers, zeros = (_for_units(each, group_size, inputs) for each in (numbers, zeros))
        group_size = _INPUT_UNIT
    numbers = np.ascontiguousarray(numbers)
    zeros = None if zeros is None else np.ascontiguousarray(zeros)
    if bits == 4:
        return Int4Groups(np.ascontiguousarray(codes), numbers, None, group_size, zeros, order)
    signed = np.ascontiguousarray(codes ^ np.uint8(128)).view(np.int8)
    moved = None if zeros is None else zeros - np.int16(middle)
    return Int8Groups(signed, numbers, None, group_size, 8, moved, order)


def _for_units(numbers: Any, group_size: int, inputs: int) -> Any:
    """A number for every 32 inputs instead of every `group_size`."""
    if numbers is None:
        return None
    return np.repeat(numbers, group_size // _INPUT_UNIT, axis=1)[:, : inputs // _INPUT_UNIT]


def input_order(group_of: Words, group_size: int, groups: int) -> Order | None:
    """The inputs sorted by their groups, [I]; None where they are already. ValueError unless every group is
    full (the last one may not be)."""
    inputs = len(group_of)
    expected = np.arange(inputs, dtype=np.int32) // group_size
    if np.array_equal(group_of, expected) or (group_of == -1).all():  # -1: written, never filled in
        return None
    if group_of.min() < 0 or group_of.max() >= groups:
        raise ValueError(f"names groups {group_of.min()}..{group_of.max()}; expected 0..{groups - 1}")
    order = np.argsort(group_of, kind="stable").astype(np.int32)
    if not np.array_equal(group_of[order], expected):
        raise ValueError(f"does not give every group {group_size} inputs")
    return order


def exact_scales(scales: NDArray[Any]) -> NDArray[Any]:
    """As float16, or as bfloat16 where only that holds them exactly; ValueError where neither does."""
    if scales.dtype == np.float16:
        return scales
    wide = scales.astype(np.float32)
    with np.errstate(over="ignore"):
        halves = wide.astype(np.float16)
    if (halves.astype(np.float32) == wide).all():
        return halves
    brief = wide.astype(ml_dtypes.bfloat16)
    if not (brief.astype(np.float32) == wide).all():
        raise ValueError("holds scales that neither float16 nor bfloat16 hold exactly")
    smallest = np.abs(wide[wide != 0]).min()
    if smallest < _SMALLEST_SCALE:
        raise ValueError(f"holds a scale as small as {smallest:.1e}; expected 2^-100 or more")
    return brief
