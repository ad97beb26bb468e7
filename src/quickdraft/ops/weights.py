"""Weight formats as values: what a tensor *is*, before a backend packs it for its kernels.

A value holds exactly what the file holds (scales are not rounded, codes are not changed); the
value of element [n, k] is stated in each class. Packing is the backend's business (`Ops.pack`).
N outputs, K inputs, G = K / group_size groups along K. Where a value has an `order` (a permutation of the
inputs, int32 [K]), its groups are cut after the inputs are put in that order: column j of the codes belongs
to input order[j], and a linear takes x[order]. `dequantised` gives the columns back in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import ModelFormatError


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """A number per group, as K-quants hold it: number[n, g] = f32(shared[n, g * S // G]) * f32(steps[n, g]).

    The float32 product is exact: 11 bits of a half times at most 7 bits of a step.
    """

    shared: NDArray[np.float16]  # [N, S], each shared by G / S neighbouring groups
    steps: NDArray[np.int8]  # [N, G]

    def __post_init__(self) -> None:
        rows, groups = self.steps.shape
        if self.shared.shape[0] != rows or not self.shared.shape[1] or groups % self.shared.shape[1]:
            raise ModelFormatError(
                "two-level scales that do not fit together",
                got=f"shared {self.shared.shape}, steps {self.steps.shape}",
                expected="a whole number of steps for each shared number",
            )


GroupNumbers = NDArray[Any] | TwoLevel  # [N, G]; an array is float16 (scales beside zeros: or bfloat16)


def float32_numbers(numbers: GroupNumbers) -> NDArray[np.float32]:
    """The numbers as float32 [N, G]; exact."""
    if isinstance(numbers, TwoLevel):
        share = numbers.steps.shape[1] // numbers.shared.shape[1]
        shared = np.repeat(numbers.shared.astype(np.float32), share, axis=1)
        return shared * numbers.steps.astype(np.float32)
    return numbers.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Dense:
    """[N, K] in float32, float16 or bfloat16 (ml_dtypes.bfloat16)."""

    values: NDArray[Any]

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def dequantised(self) -> NDArray[np.float32]:
        """float32 [N, K], exactly the values the linear uses."""
        return self.values.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Int8Groups:
    """value = scale * code, plus the minimum where there are `minimums`.

    In float32, the product rounded before the sum. Codes of 8 bits are -128..127; with fewer `bits`
    they are 0..2^bits - 1 where there are minimums, else -2^(bits-1)..2^(bits-1) - 1. A backend may
    pack them in as many bits; that changes no result. With `zeros` (-128..128; not beside minimums):
    scale * (code - zero), exactly.
    """

    codes: NDArray[np.int8]  # [N, K]
    scales: GroupNumbers  # [N, G]
    minimums: GroupNumbers | None = None  # [N, G]
    group_size: int = 32
    bits: int = 8
    zeros: NDArray[np.int16] | None = None  # [N, G]
    order: NDArray[np.int32] | None = None  # [K]

    def __post_init__(self) -> None:
        _check_groups(self)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantised(self) -> NDArray[np.float32]:
        """float32 [N, K]."""
        return _dequantised(self, self.codes.astype(np.float32))


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """Codes 0..15. With `minimums`: value = scale * code + minimum. Without: scale * (code - 8).

    In float32, the product rounded before the sum. With `zeros` (0..16; not beside minimums):
    scale * (code - zero), exactly. `paired`: as files hold codes, two a byte, the first in the low half.
    """

    codes: NDArray[np.uint8]  # [N, K], one code per byte; [N, K / 2] if paired
    scales: GroupNumbers  # [N, G]
    minimums: GroupNumbers | None = None  # [N, G]
    group_size: int = 32
    zeros: NDArray[np.int16] | None = None  # [N, G]
    order: NDArray[np.int32] | None = None  # [K]
    paired: bool = False

    def __post_init__(self) -> None:
        _check_groups(self)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] << self.paired

    def dequantised(self) -> NDArray[np.float32]:
        """float32 [N, K]."""
        stored = self.codes
        if self.paired:
            stored = np.stack([stored & 15, stored >> 4], axis=2).reshape(self.shape)
        codes = stored.astype(np.float32)
        if self.minimums is None and self.zeros is None:
            codes -= np.float32(8)
        return _dequantised(self, codes)


Grouped = Int8Groups | Int4Groups
Value = Dense | Grouped


@dataclass(frozen=True, slots=True)
class Part:
    """Some outputs of a Blocks weight, row after row in an open file (where it has a type name)."""

    file: BinaryIO
    offset: int
    rows: int
    read: Callable[[], Value]  # ModelFormatError that names the tensor: not there, or not finite


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight that is still in its file, not looked at yet: what it is, `value` says.

    A backend that knows the type packs the bytes as it reads them, which must give the bits that packing
    the value gives; so no code gets a byte of its own on the way. What it cannot read, or meets a number
    in that is not finite, it leaves to `value`, which says so. Without a type name it takes the value, and
    drops it when it is packed.
    """

    type_name: str | None  # of a GGUF tensor
    inputs: int
    parts: tuple[Part, ...]  # one after the other

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.rows for part in self.parts), self.inputs

    def value(self) -> Value | Stacked:
        """The weight itself (stacked where its parts differ in format); ModelFormatError for bytes that are
        not there or a number that is not finite."""
        whole = concat_rows([part.read() for part in self.parts])
        assert not isinstance(whole, Blocks)
        return whole

    def dequantised(self) -> NDArray[np.float32]:
        """float32 [N, K]."""
        return self.value().dequantised()


Weight = Value | Blocks


@dataclass(frozen=True, slots=True)
class Stacked:
    """Outputs of several weights of different formats, one after the other. Each part keeps its formula."""

    parts: tuple[Weight, ...]

    def __post_init__(self) -> None:
        shapes = [part.shape for part in self.parts]
        if len({inputs for _, inputs in shapes}) != 1:
            raise ModelFormatError(
                "weights that cannot be stacked", got=shapes, expected="one number of inputs"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def dequantised(self) -> NDArray[np.float32]:
        """float32 [N, K]."""
        return np.concatenate([part.dequantised() for part in self.parts])


def values_of(weight: Weight | Stacked) -> Value | Stacked:
    """The same weight with nothing left in blocks."""
    if isinstance(weight, Stacked):
        values = [values_of(part) for part in weight.parts]
        return Stacked(
            tuple(
                part for value in values for part in (value.parts if isinstance(value, Stacked) else [value])
            )
        )
    return weight.value() if isinstance(weight, Blocks) else weight


def concat_rows(parts: Sequence[Weight]) -> Weight | Stacked:
    """One weight whose outputs are the parts' outputs in order; neighbours of one format are merged."""
    merged = tuple(_merged(list(run)) for _, run in groupby(parts, _format))
    return merged[0] if len(merged) == 1 else Stacked(merged)


def take_rows(weight: Weight, rows: NDArray[Any]) -> Value:
    """The outputs `rows` (indices, in any order) of a weight of one format; their values do not change."""
    value = weight.value() if isinstance(weight, Blocks) else weight
    assert not isinstance(value, Stacked), "a tensor has one format"
    return replace(value, **{part.name: _taken(getattr(value, part.name), rows) for part in fields(value)})


def take_columns(weight: Weight, first: int, last: int) -> Value:
    """Inputs first..last-1 of a weight of one format. In its format where whole groups are taken, else as
    float32 numbers; the values do not change, but int8 activations become float32 ones then."""
    value = weight.value() if isinstance(weight, Blocks) else weight
    assert not isinstance(value, Stacked), "a tensor has one format"
    if isinstance(value, Dense):
        return Dense(np.ascontiguousarray(value.values[:, first:last]))
    numbers: tuple[Any, ...] = (value.scales, value.minimums, value.zeros)
    aligned = first % value.group_size == 0 and last % value.group_size == 0
    if not aligned or value.order is not None or any(isinstance(part, TwoLevel) for part in numbers):
        return Dense(value.dequantised()[:, first:last])
    paired = isinstance(value, Int4Groups) and value.paired
    groups = slice(first // value.group_size, last // value.group_size)
    codes = value.codes[:, first >> paired : last >> paired]
    parts: dict[str, Any] = {"codes": np.ascontiguousarray(codes)}
    parts |= {
        name: np.ascontiguousarray(part[:, groups])
        for name, part in zip(("scales", "minimums", "zeros"), numbers, strict=True)
        if part is not None
    }
    return replace(value, **parts)


def _taken(part: Any, rows: NDArray[Any]) -> Any:
    """Whatever has a row for each output, cut down; everything else as it is."""
    if isinstance(part, TwoLevel):
        return TwoLevel(part.shared[rows], part.steps[rows])
    return part[rows] if isinstance(part, np.ndarray) and part.ndim == 2 else part


def _format(weight: Weight) -> tuple[Any, ...]:
    """Equal for weights that one array of codes can hold."""
    if isinstance(weight, Dense):
        return Dense, weight.shape[1], weight.values.dtype
    if isinstance(weight, Blocks):
        return Blocks, weight.inputs, weight.type_name
    kinds = (_kind(weight.scales), _kind(weight.minimums), _kind(weight.zeros))
    bits = weight.bits if isinstance(weight, Int8Groups) else 4 + weight.paired
    order = None if weight.order is None else weight.order.tobytes()
    return type(weight), weight.shape[1], weight.group_size, bits, *kinds, order


def _kind(numbers: GroupNumbers | None) -> Any:
    if isinstance(numbers, TwoLevel):
        return "two levels", numbers.shared.shape[1]
    return None if numbers is None else numbers.dtype


def _merged(parts: list[Weight]) -> Weight:
    first = parts[0]
    if isinstance(first, Blocks):
        return replace(first, parts=tuple(x for p in parts if isinstance(p, Blocks) for x in p.parts))
    return _merged_values([p for p in parts if not isinstance(p, Blocks)])


def _merged_values(parts: list[Value]) -> Value:
    """One value of parts that have equal formats."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Dense):
        return Dense(np.concatenate([p.values for p in parts if isinstance(p, Dense)]))
    groups: list[Any] = parts  # all of first's type
    fields: dict[str, Any] = {
        "codes": np.concatenate([p.codes for p in groups]),
        "scales": _merged_numbers([p.scales for p in groups]),
    }
    if first.minimums is not None:
        fields["minimums"] = _merged_numbers([p.minimums for p in groups])
    if first.zeros is not None:
        fields["zeros"] = np.concatenate([p.zeros for p in groups])
    return replace(first, **fields)


def _merged_numbers(parts: list[Any]) -> GroupNumbers:
    if isinstance(parts[0], TwoLevel):
        return TwoLevel(np.concatenate([p.shared for p in parts]), np.concatenate([p.steps for p in parts]))
    merged: NDArray[np.float16] = np.concatenate(parts)
    return merged


def _dequantised(weight: Grouped, codes: NDArray[np.float32]) -> NDArray[np.float32]:
    scales, group_size = float32_numbers(weight.scales), weight.group_size
    values = np.repeat(scales, group_size, axis=1) * codes
    if weight.minimums is not None:
        values += np.repeat(float32_numbers(weight.minimums), group_size, axis=1)
    if weight.zeros is not None:  # both products and their sum are exact
        values += np.repeat(scales * (-weight.zeros).astype(np.float32), group_size, axis=1)
    if weight.order is None:
        return values
    return values[:, np.argsort(weight.order)]


def _check_groups(weight: Grouped) -> None:
    outputs, inputs = weight.shape
    group_size, scales = weight.group_size, weight.scales
    expected = (outputs, inputs // group_size)
    if inputs % group_size or _numbers_shape(scales) != expected:
        raise ModelFormatError(
            "quantised weight with wrong scales",
            got=f"codes {weight.shape}, scales {_numbers_shape(scales)}, group size {group_size}",
            expected=f"scales {expected} and a multiple of the group size",
        )
    for what, numbers in (("minimums", weight.minimums), ("zero points", weight.zeros)):
        if numbers is not None and _numbers_shape(numbers) != expected:
            raise ModelFormatError(
                f"quantised weight with wrong {what}", got=_numbers_shape(numbers), expected=expected
            )
    if weight.zeros is None:
        if not isinstance(scales, TwoLevel) and scales.dtype != np.float16:
            raise ModelFormatError("quantised weight with wrong scales", got=scales.dtype, expected="float16")
    else:
        low, high = (0, 16) if isinstance(weight, Int4Groups) else (-128, 128)
        if weight.minimums is not None or isinstance(scales, TwoLevel):
            raise ModelFormatError("quantised weight with zero points beside minimums or two-level scales")
        if weight.zeros.size and not low <= weight.zeros.min() <= weight.zeros.max() <= high:
            raise ModelFormatError("zero points out of range", expected=f"{low}..{high}")
    if weight.order is not None and not np.array_equal(np.sort(weight.order), np.arange(inputs)):
        raise ModelFormatError(
            "quantised weight whose inputs are in no order", expected=f"a permutation of {inputs}"
        )


def _numbers_shape(numbers: GroupNumbers) -> tuple[int, ...]:
    return numbers.steps.shape if isinstance(numbers, TwoLevel) else numbers.shape
