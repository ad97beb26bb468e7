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
    codes, base = _unsigned_codes(value)
    blocks = ceil_divide(inputs, sub * count)
    padded = np.zeros((outputs, blocks * count * sub), np.uint16)
    padded[:, :inputs] = codes
    parts = padded.reshape(outputs, blocks, count, sub)
    words = np.zeros((blocks, outputs, sub), np.uint16)
    for index in range(count):
        part = parts[:, :, index] & np.uint16((1 << bits) - 1)
        words |= (part << np.uint16(bits * index)).transpose(1, 0, 2)
    groups = ceil_divide(blocks * count * sub, value.group_size)
    steps = 1
    if isinstance(value.scales, TwoLevel):
        steps = value.scales.steps.shape[1] // value.scales.shared.shape[1]
    scales, scale_shares = _numbers(value.scales, groups, steps, device)
    assert scales is not None
    minimums, minimum_shares = _numbers(value.minimums, groups, steps, device)
    zeros = None
    if value.zeros is not None:
        zeros = _by_group((value.zeros + base).astype(np.float16), groups, device)
    return PackedGroups(
        to_tensor(words.view(np.int16), device),
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
        _high_bits(parts >> np.uint16(4), high_bits, device) if high_bits else None,
        high_bits,
    )


def _high_bits(codes: NDArray[np.uint16], bits: int, device: torch.device) -> torch.Tensor:
    """What is above the fourth bit of codes [N, blocks, 4, SUB], `bits` of each: bytes of a block, or of two
    (bits 4.. those of the second)."""
    outputs, blocks, count, sub = codes.shape
    each = 2 // bits
    planes = np.zeros((ceil_divide(blocks, each), outputs, sub), np.uint8)
    for index in range(count):
        for which in range(each):
            part = codes[:, which::each, index].transpose(1, 0, 2).astype(np.uint8)
            planes[: len(part)] |= part << np.uint8(4 * which + bits * index)
    return to_tensor(planes, device)


def _unsigned_codes(value: Grouped) -> tuple[NDArray[Any], int]:
    """Codes from 0 on, and what was added to those whose value is scale * code."""
    if isinstance(value, Int4Groups):
        codes = value.codes
        if value.paired:
            codes = np.stack([codes & 15, codes >> 4], axis=2).reshape(value.shape)
        return codes, 8 if value.minimums is None and value.zeros is None else 0
    base = 1 << value.bits - 1
    if value.bits < 8 and value.minimums is not None:
        base = 0
    return (value.codes.astype(np.int16) + base).astype(np.uint16), base


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
