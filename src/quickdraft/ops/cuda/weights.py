"""Packed weights of the card: codes side by side in 16-bit words, numbers per group beside each other by
output.

A word of block b, output n, place s holds the codes of inputs b * C * SUB + i * SUB + s, code i at bits i
* 16 / C: C codes of 4 or 8 bits. So one load of a block gives C tiles of SUB inputs, each whole inside a
group, without moving a code between lanes. Codes of 5 and 6 bits have their lower four in words and the rest
in a plane of bytes that is laid out alike. Knows no kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quickdraft.errors import UnsupportedError
from quickdraft.ops.cuda.buffers import to_tensor
from quickdraft.ops.cuda.launch import ceil_divide
from quickdraft.ops.weights import (
    Blocks,
    Dense,
    Grouped,
    GroupNumbers,
    Int4Groups,
    Int8Groups,
    Stacked,
    TwoLevel,
    Weight,
    concat_rows,
    float32_numbers,
    values_of,
)

BLOCK_N = 64  # outputs of a program, at least
DENSE_BLOCK_K = 64
MULTIPROCESSORS = 82  # of a 3090
# Of one linear. From 61 tiles of outputs on a sum is not cut: a program that has a multiprocessor for itself
# asks for enough bytes at once (linear.STAGES), and pieces cost a second kernel and their bytes.
WANTED_PROGRAMS = 120
LEAST_BLOCKS = 8  # of 128 inputs in a split
PACKED_AT_ONCE = 1 << 24  # codes


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """An Int4Groups or Int8Groups weight; value = scale * (code - offset) + minimum, codes from 0 on."""

    words: torch.Tensor  # int16 [blocks, N, SUB]
    scales: torch.Tensor  # [G, N]; int8 steps where there are shares
    offsets: torch.Tensor | None  # float16 [G, N]; None: one for all
    minimums: torch.Tensor | None  # [G, N]; int8 steps where there are shares
    offset: float  # where there are no offsets
    bits: int  # 4 or 8
    group: int  # inputs of a group
    inputs: int
    order: torch.Tensor | None  # int32 [K]
    splits: int
    factor: torch.dtype = torch.float16  # in which activations meet it; or bfloat16
    scale_shares: torch.Tensor | None = None  # float16 [G / steps, N], shared by so many groups (TwoLevel)
    minimum_shares: torch.Tensor | None = None
    steps: int = 1
    high: torch.Tensor | None = None  # uint8 [blocks * high_bits / 2, N, SUB]: the bits above the fourth
    high_bits: int = 0  # 1 or 2, of codes of 5 or 6 bits

    @property
    def outputs(self) -> int:
        return int(self.words.shape[1])

    @property
    def sub(self) -> int:
        return int(self.words.shape[2])

    @property
    def block_inputs(self) -> int:
        return self.sub * 16 // self.bits

    @property
    def nbytes(self) -> int:
        parts = (
            self.words, self.scales, self.offsets, self.minimums, self.order, self.scale_shares,
            self.minimum_shares, self.high,
        )  # fmt: skip
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class PackedDense:
    """[N, K] in float32, float16 or bfloat16."""

    values: torch.Tensor
    splits: int

    @property
    def outputs(self) -> int:
        return int(self.values.shape[0])

    @property
    def inputs(self) -> int:
        return int(self.values.shape[1])

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)


@dataclass(frozen=True, slots=True)
class PackedStack:
    """Weights whose outputs lie side by side."""

    parts: tuple[PackedGroups | PackedDense, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


Packed = PackedGroups | PackedDense
AnyPacked = Packed | PackedStack


def splits_of(outputs: int, blocks: int) -> int:
    """Into how many pieces a sum over inputs is cut, from the weight's shape alone, so that no row's bits
    depend on what else is in a call."""
    tiles = ceil_divide(outputs, BLOCK_N)
    return max(1, min(WANTED_PROGRAMS // tiles, blocks // LEAST_BLOCKS, 16))


def pack(weight: Weight | Stacked, device: torch.device, factor: torch.dtype) -> AnyPacked:
    """Any weight of ops/weights.py on the device, quantised ones to meet activations in type `factor`;
    UnsupportedError for groups these kernels cannot cut."""
    value = values_of(weight)
    if isinstance(value, Stacked):  # parts that were in blocks may have their neighbours' format
        joined = concat_rows(value.parts)
        if isinstance(joined, Stacked):
            return PackedStack(tuple(_pack_part(part, device, factor) for part in joined.parts))
        return _pack_part(joined, device, factor)
    return _pack_part(value, device, factor)


def _pack_part(value: Weight, device: torch.device, factor: torch.dtype) -> Packed:
    assert not isinstance(value, Blocks)
    if isinstance(value, Dense):
        blocks = ceil_divide(value.shape[1], 2 * DENSE_BLOCK_K)
        return PackedDense(to_tensor(value.values, device), splits_of(value.shape[0], blocks))
    if value.group_size % 16:
        raise UnsupportedError(
            "the CUDA backend has no kernels for this quantised weight",
            got=f"groups of {value.group_size}",
            expected="groups of a multiple of 16 inputs",
        )
    return _pack_groups(value, device, factor)


def _pack_groups(value: Grouped, device: torch.device, factor: torch.dtype) -> PackedGroups:
    outputs, inputs = value.shape
    bits, high_bits = 4, 0
    if isinstance(value, Int8Groups):
        bits, high_bits = (8, 0) if value.bits > 6 else (4, max(value.bits - 4, 0))
    sub, count = (32 if value.group_size % 32 == 0 else 16), 16 // bits
    blocks = ceil_divide(inputs, sub * count)
    groups = ceil_divide(blocks * count * sub, value.group_size)
    steps = 1
    if isinstance(value.scales, TwoLevel):
        steps = value.scales.steps.shape[1] // value.scales.shared.shape[1]
    base = _base(value)
    words, high = _packed_codes(value, (blocks, count, sub), high_bits, device)
    scales, scale_shares = _numbers(value.scales, groups, steps, device)
    assert scales is not None
    minimums, minimum_shares = _numbers(value.minimums, groups, steps, device)
    zeros = None
    if value.zeros is not None:
        zeros = _by_group((value.zeros + base).astype(np.float16), groups, device)
    return PackedGroups(
        words,
        scales,
        zeros,
        minimums,
        float(base),
        bits,
        value.group_size,
        inputs,
        None if value.order is None else to_tensor(value.order.astype(np.int32), device),
        splits_of(outputs, ceil_divide(inputs, 128)),
        factor,
        scale_shares,
        minimum_shares,
        steps,
        high,
        high_bits,
    )


def _base(value: Grouped) -> int:
    """What makes codes start at 0, and is taken off again where there are no zeros or minimums."""
    if isinstance(value, Int4Groups):
        return 8 if value.minimums is None and value.zeros is None else 0
    return 0 if value.bits < 8 and value.minimums is not None else 1 << value.bits - 1


def _packed_codes(
    value: Grouped, cut: tuple[int, int, int], high_bits: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Words [blocks, N, SUB], `cut` as (blocks, codes of a word, SUB), and the plane of what is above the
    fourth bit; made on the device, some outputs at a time, as a large model would take a host minutes."""
    (outputs, inputs), (blocks, count, sub) = value.shape, cut
    bits, base = 16 // count, _base(value)
    words = torch.empty((blocks, outputs, sub), dtype=torch.int16, device=device)
    planes = None
    if high_bits:
        shape = ceil_divide(blocks * high_bits, 2), outputs, sub
        planes = torch.empty(shape, dtype=torch.uint8, device=device)
    step = max(1, PACKED_AT_ONCE // inputs)
    for first in range(0, outputs, step):
        codes = to_tensor(value.codes[first : first + step], device)
        if isinstance(value, Int8Groups):
            codes = codes.to(torch.int16) + base
        elif value.paired:
            codes = torch.stack((codes & 15, codes >> 4), dim=2).view(len(codes), inputs)
        padded = torch.nn.functional.pad(codes, (0, blocks * count * sub - inputs)).to(torch.int16)
        parts = padded.view(len(codes), blocks, count, sub).transpose(0, 1)
        low = parts & (1 << bits) - 1
        word = low[:, :, 0]
        for index in range(1, count):
            word = word | low[:, :, index] << bits * index
        words[:, first : first + step] = word
        if planes is not None:
            planes[:, first : first + step] = _high_plane(parts >> 4, high_bits)
    return words, planes


def _high_plane(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes of a block of codes [blocks, N, 4, SUB], `bits` of each, or of two blocks (bits 4.. those of the
    second)."""
    each = 2 // bits
    plane = codes.new_zeros((ceil_divide(len(codes), each), codes.shape[1], codes.shape[3]))
    for which in range(each):
        for index in range(codes.shape[2]):
            part = codes[which::each, :, index]
            plane[: len(part)] |= part << 4 * which + bits * index
    return plane.to(torch.uint8)


def _numbers(
    numbers: GroupNumbers | None, groups: int, steps: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """By group, and what `steps` neighbouring groups share; two levels that another number of groups
    shares become the float32 number they are together."""
    if numbers is None:
        return None, None
    if not isinstance(numbers, TwoLevel):
        return _by_group(numbers, groups, device), None
    if numbers.steps.shape[1] != steps * numbers.shared.shape[1]:
        return _by_group(float32_numbers(numbers), groups, device), None
    shares = _by_group(numbers.shared, ceil_divide(groups, steps), device)
    return _by_group(numbers.steps, groups, device), shares


def _by_group(numbers: NDArray[Any], groups: int, device: torch.device) -> torch.Tensor:
    padded = np.zeros((groups, len(numbers)), numbers.dtype)
    padded[: numbers.shape[1]] = numbers.T
    return to_tensor(padded, device)


def shared_subs(weight: PackedGroups) -> int:
    """How many neighbouring tiles of a block always lie in one group."""
    return math.gcd(weight.group // weight.sub, 16 // weight.bits)
