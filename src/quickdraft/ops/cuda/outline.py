"""Tensors without memory: weights of a shape and format, and a CudaOps whose programs only say what a card
would start.

A weight is described by its shape and format and is never read, so a model of any size can be recorded. Knows
no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from quickdraft.ops.cuda.buffers import KV_TYPES
from quickdraft.ops.cuda.launch import Watching, ceil_divide
from quickdraft.ops.cuda.weights import (
    AnyPacked,
    Packed,
    PackedDense,
    PackedGroups,
    PackedStack,
    splits_of,
)
from quickdraft.ops.cuda.work import DescribedOps
from quickdraft.ops.weights import Blocks, Dense, Int4Groups, Stacked, Weight

FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
NUMPY_FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
BODY, HEAD = (4, 128), (8, 32)  # bits and group of what is quantised when it is read


def int4(outputs: int, inputs: int, group: int = 128, *, zeros: bool = False) -> PackedGroups:
    """A 4-bit weight without memory, as a quantised folder has it; it meets bfloat16 activations."""
    return _groups(outputs, inputs, 4, group, zeros=zeros)


def int8(outputs: int, inputs: int, group: int = 32) -> PackedGroups:
    return _groups(outputs, inputs, 8, group)


def dense(outputs: int, inputs: int, kind: torch.dtype = torch.bfloat16) -> PackedDense:
    values = torch.empty((outputs, inputs), dtype=kind, device="meta")
    return PackedDense(values, splits_of(outputs, ceil_divide(inputs, 128)))


def _groups(
    outputs: int, inputs: int, bits: int, group: int, factor: torch.dtype = torch.bfloat16, *,
    zeros: bool = False,
) -> PackedGroups:  # fmt: skip
    def empty(*shape: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    group, count = min(group, inputs), 16 // bits
    sub = 32 if group % 32 == 0 else 16
    words = empty(ceil_divide(inputs, sub * count), outputs, sub, kind=torch.int16)
    scales = empty(ceil_divide(inputs, group), outputs, kind=torch.float16)
    offsets = torch.empty_like(scales) if zeros else None
    splits = splits_of(outputs, ceil_divide(inputs, 128))
    offset = 2.0 ** (bits - 1)
    return PackedGroups(words, scales, offsets, None, offset, bits, group, inputs, None, splits, factor)


class EachTime:
    """A program.Capture that captures nothing: what is recorded is run, so that a program runs as on a card,
    in padded shapes."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return _nothing

    def keep(self) -> None:
        return None

    def room(self) -> bool:
        return True


def _nothing() -> None:
    """There is no memory to change."""


class OutlineOps(DescribedOps):
    """A card without memory, on which the first two runs of a program in a shape start kernels. Of weights
    that are quantised as they are read only the shape is known: those of `vocabulary` outputs get 8 bits, the
    others 4."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__("meta", Watching())
        self.capture = EachTime()
        self._vocabulary = vocabulary

    def pack(self, weight: Weight | Stacked) -> AnyPacked:
        parts = weight.parts if isinstance(weight, Stacked) else (weight,)
        joined: list[tuple[Any, int]] = []  # neighbours of one format become one weight, as in weights.pack
        for part in parts:
            outputs, form = part.shape[0], self._form(part)
            if joined and joined[-1][0] == form:
                outputs += joined.pop()[1]
            joined.append((form, outputs))
        factor = KV_TYPES[self.activations][0]
        packed = tuple(_empty(form, outputs, weight.shape[1], factor) for form, outputs in joined)
        return packed[0] if len(packed) == 1 else PackedStack(packed)

    def _form(self, part: Weight) -> Any:
        """A type of floats, or bits and group."""
        if isinstance(part, Blocks):
            if part.type_name is not None:
                return FLOATS[part.type_name]
            return HEAD if part.shape[0] == self._vocabulary else BODY
        if isinstance(part, Dense):
            return FLOATS[NUMPY_FLOATS[str(part.values.dtype)]]
        return (4 if isinstance(part, Int4Groups) else 8), part.group_size


def _empty(form: Any, outputs: int, inputs: int, factor: torch.dtype) -> Packed:
    if isinstance(form, torch.dtype):
        return dense(outputs, inputs, form)
    bits, group = form
    return _groups(outputs, inputs, bits, group, factor)
