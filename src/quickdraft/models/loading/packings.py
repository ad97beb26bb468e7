"""Unpackers of quantised linears: the words of GPTQ, AWQ and compressed-tensors files -> ops.weights values.

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
_AWQ_OUTPUTS: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # of 8 outputs, the one whose code is in each place of a word
_SMALLEST_SCALE: Final = 2.0**-100  # products with smaller ones would leave fp32's normal numbers
_INPUT_UNIT: Final = 32  # groups are cut in runs of so many inputs


def _bytes(words: Words) -> NDArray[np.uint8]:
    """[R, W] words -> [R, 4 W]: a code of 8 bits each, or a pair of codes of 4 bits."""
    return np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)


def unpacked(words: Words, bits: int) -> NDArray[np.uint8]:
    """[R, W] words of 4- or 8-bit codes -> [R, W * 32 / bits]."""
    return _bytes(words) if bits == 8 else _PAIRS[_bytes(words)].view(np.uint8)


def _turned(words: Words) -> Words:
    """The transpose, its rows one after the other."""
    turned = np.empty(words.shape[::-1], words.dtype)
    step = 16  # words of a cache line, which is written once then
    for first in range(0, len(words), step):
        turned[:, first : first + step] = words[first : first + step].T
    return turned


def gptq(
    qweight: Words, qzeros: Words, scales: NDArray[Any], order: Order | None, bits: int, offset: int,
    group_size: int,
) -> Grouped:  # fmt: skip
    """qweight [I * bits / 32, O], qzeros [G, O * bits / 32] without `offset`, scales [G, O]."""
    outputs = scales.shape[1]
    zeros = unpacked(qzeros, bits)[:, :outputs].T.astype(np.int16) + np.int16(offset)
    return _grouped(_bytes(_turned(qweight)), scales.T, zeros, order, bits, group_size)


def awq(qweight: Words, qzeros: Words, scales: NDArray[Any], group_size: int) -> Grouped:
    """Four bits: qweight [I, O / 8], qzeros [G, O / 8], scales [G, O]."""
    groups, outputs = scales.shape
    padded = qweight.shape[1] * 8
    pairs = np.empty((padded, len(qweight) // 2), np.uint8)
    zeros = np.empty((padded, groups), np.int16)
    for place, output in enumerate(_AWQ_OUTPUTS):
        codes = (qweight >> 4 * place).astype(np.uint8) & 15
        pairs[output::8] = (codes[::2] | codes[1::2] << 4).T
        zeros[output::8] = (qzeros >> 4 * place & 15).T
    return _grouped(pairs[:outputs], scales.T, zeros[:outputs], None, 4, group_size)


def pack_quantized(
    packed: Words, scales: NDArray[Any], zero_points: Words | None, order: Order | None, bits: int,
    group_size: int,
) -> Grouped:  # fmt: skip
    """compressed-tensors: packed [O, ceil(I * bits / 32)], scales [O, G], zero points packed over the
    outputs, [ceil(O * bits / 32), G] (None: symmetric)."""
    zeros = None
    if zero_points is not None:
        zeros = unpacked(zero_points.T, bits)[:, : len(packed)].T.astype(np.int16)
    return _grouped(_bytes(packed), scales, zeros, order, bits, group_size)


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
    """Codes [O, I], in pairs of 4 bits, and zeros [O, G], both from 0 on."""
    inputs, middle = codes.shape[1] * 8 // bits, 1 << bits - 1
    if zeros is not None and (zeros == middle).all():
        zeros = None
    paired = bits == 4 and order is None
    if order is not None:
        codes = (_PAIRS[codes].view(np.uint8) if bits == 4 else codes)[:, order]
    numbers: NDArray[Any] = scales
    if zeros is None and numbers.dtype != np.float16:
        zeros = np.full(numbers.shape, middle, np.int16)
    if inputs % group_size:  # the last group is not full
        numbers, zeros = (_for_units(each, group_size, inputs) for each in (numbers, zeros))
        group_size = _INPUT_UNIT
    numbers = np.ascontiguousarray(numbers)
    zeros = None if zeros is None else np.ascontiguousarray(zeros)
    if bits == 4:
        return Int4Groups(np.ascontiguousarray(codes), numbers, None, group_size, zeros, order, paired)
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
