"""Strict reader of GGUF files (versions 2 and 3).

Every count, length and offset is checked against the file before anything is allocated or read,
so a damaged or hostile file gives a ModelFormatError that names it, never a crash. Tensors come
out as ops.weights values, bit for bit what the file holds. Knows the container, not the models in
it. (The `gguf` package trusts what it reads and takes a second on 49,152 tokens; tests compare
with it.)
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.models.loading.strict_files import open_regular, read_at
from quickdraft.models.loading.tensor_types import READABLE, TYPES, decode
from quickdraft.ops.weights import Blocks, Dense, GroupNumbers, Part, TwoLevel, Value, Weight

MAX_DIMENSIONS: Final = 4
MAX_ARRAY_DEPTH: Final = 4
MAX_ARRAY_ITEMS: Final = 1 << 22  # the largest vocabularies have under 2^19 merges
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# float type -> (unsigned type of its size, bits of the exponent; all set means infinite or NaN)
_EXPONENTS: Final = {"F32": (np.uint32, 0x7F800000), "F16": (np.uint16, 0x7C00), "BF16": (np.uint16, 0x7F80)}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` is row-major (outputs first), the reverse of the file's order."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int  # absolute
    bytes: int


class GGUFFile:
    """Metadata and tensors of one file; keeps it open while alive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_regular(path)
        try:
            header = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # an empty file cannot be mapped
            raise ModelFormatError(f"{path}: not a GGUF file", got="an empty file") from error
        with header:
            self.metadata, self.tensors = _Header(path, header).read()

    @property
    def tensor_bytes(self) -> int:
        return sum(info.bytes for info in self.tensors.values())

    def called(self, name: str) -> str:
        """See inventory.TensorFile."""
        return name

    def vector(self, name: str) -> NDArray[np.float32]:
        """A one-dimensional dense tensor as float32."""
        info = self.tensors[name]
        if len(info.shape) != 1:
            raise ModelFormatError(f"{self.path}: tensor {name}", got=info.shape, expected="one dimension")
        value = self._dense(info)
        if value is None:
            raise UnsupportedError(f"{self.path}: tensor {name} is a quantised vector", got=info.type_name)
        return value.astype(np.float32)

    def matrix(self, name: str) -> Weight:
        """A two-dimensional tensor [N, K]; UnsupportedError names the type."""
        info = self.tensors[name]
        if len(info.shape) != 2:
            raise ModelFormatError(f"{self.path}: tensor {name}", got=info.shape, expected="two dimensions")
        if info.type_name not in READABLE:
            raise UnsupportedError(
                f"{self.path}: tensor {name} has a type this version cannot read",
                got=info.type_name, expected=f"one of {', '.join(READABLE)}",
            )  # fmt: skip
        outputs, inputs = info.shape
        part = Part(self._file, info.offset, outputs, lambda: self._value(info))
        return Blocks(info.type_name, inputs, (part,))

    def _value(self, info: TensorInfo) -> Value:
        dense = self._dense(info)
        if dense is not None:
            return Dense(dense)
        weight = decode(info.type_name, self._raw(info), *info.shape)
        self._check_numbers(weight.scales, f"tensor {info.name} holds scales that are not finite")
        if weight.minimums is not None:
            self._check_numbers(weight.minimums, f"tensor {info.name} holds minimums that are not finite")
        return weight

    def _raw(self, info: TensorInfo) -> NDArray[np.uint8]:
        return read_at(self._file, self.path, info.offset, info.bytes)

    def _dense(self, info: TensorInfo) -> NDArray[Any] | None:
        types: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
        dtype = types.get(info.type_name)
        if dtype is None:
            return None
        values: NDArray[Any] = self._raw(info).view(dtype).reshape(info.shape)
        self._check_finite(values, info.type_name, f"tensor {info.name} holds values that are not finite")
        return values

    def _check_numbers(self, numbers: GroupNumbers, what: str) -> None:
        halves = numbers.shared if isinstance(numbers, TwoLevel) else numbers
        self._check_finite(halves, "F16", what)

    def _check_finite(self, values: NDArray[Any], type_name: str, what: str) -> None:
        unsigned, exponent = _EXPONENTS[type_name]
        if (values.view(unsigned) & unsigned(exponent)).max() == exponent:
            raise ModelFormatError(f"{self.path}: {what}", hint="the file is damaged; download it again")


class _Header:
    """A cursor over the header of one file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self.take(4, "magic") != b"GGUF":
            self.fail("not a GGUF file", got=bytes(self.data[:4]), expected=b"GGUF")
        version = self.number("I", "version")
        if version not in (2, 3):
            self.fail("unknown GGUF version", got=version, expected="2 or 3")
        tensor_count = self.count("tensor count", 24)
        pair_count = self.count("metadata count", 13)
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self.string("metadata key")
            if key in metadata:
                self.fail(f"metadata key {key!r} occurs twice")
            metadata[key] = self.value(self.number("I", f"type of {key!r}"), key, 0)
        alignment = metadata.get("general.alignment", 32)
        if (
            not isinstance(alignment, int)
            or alignment < 8
            or alignment & (alignment - 1)
            or alignment > 65536
        ):
            self.fail("bad general.alignment", got=alignment, expected="a power of two from 8 to 65536")
        raw = [self.tensor() for _ in range(tensor_count)]
        start = -(-self.at // alignment) * alignment
        return metadata, self.place(raw, start, alignment)

    def place(self, raw: list[TensorInfo], start: int, alignment: int) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        end = start
        for info in sorted(raw, key=lambda t: t.offset):
            offset = start + info.offset
            if info.name in tensors:
                self.fail(f"tensor {info.name!r} occurs twice")
            if info.offset % alignment:
                self.fail(
                    f"tensor {info.name!r} is not aligned",
                    got=info.offset,
                    expected=f"a multiple of {alignment}",
                )
            if offset < end:
                self.fail(
                    f"tensor {info.name!r} overlaps the one before it", got=offset, expected=f"from {end} on"
                )
            end = offset + info.bytes
            if end > len(self.data):
                self.fail(
                    f"tensor {info.name!r} ends outside the file",
                    got=f"byte {end}", expected=f"at most {len(self.data)}", hint="the file is cut off",
                )  # fmt: skip
            tensors[info.name] = TensorInfo(info.name, info.type_name, info.shape, offset, info.bytes)
        return tensors

    def tensor(self) -> TensorInfo:
        name = self.string("tensor name")
        dimensions = self.number("I", f"dimensions of {name!r}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self.fail(f"tensor {name!r} has a bad rank", got=dimensions, expected=f"1..{MAX_DIMENSIONS}")
        shape = tuple(self.number("Q", f"shape of {name!r}") for _ in range(dimensions))
        code = self.number("I", f"type of {name!r}")
        offset = self.number("Q", f"offset of {name!r}")
        if code not in TYPES:
            raise UnsupportedError(f"{self.path}: tensor {name!r} has an unknown type", got=code)
        type_name, elements, size = TYPES[code]
        total = math.prod(shape)
        if min(shape) < 1 or total > 8 * len(self.data) or shape[0] % elements:
            self.fail(f"tensor {name!r} has a bad shape for {type_name}", got=shape)
        return TensorInfo(name, type_name, shape[::-1], offset, total // elements * size)

    def value(self, kind: int, key: str, depth: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], key)
        if kind == _STRING:
            return self.string(key)
        if kind != _ARRAY or depth >= MAX_ARRAY_DEPTH:
            self.fail(f"metadata {key!r} has a bad type", got=kind)
        item = self.number("I", key)
        length = self.count(key, struct.calcsize(_SCALARS[item]) if item in _SCALARS else 8)
        if length > MAX_ARRAY_ITEMS:
            self.fail(f"metadata {key!r} is too long", got=length, expected=f"at most {MAX_ARRAY_ITEMS}")
        if item in _SCALARS:
            code = f"<{length}{_SCALARS[item]}"
            return list(struct.unpack(code, self.take(struct.calcsize(code), key)))
        if item == _STRING:
            return self.strings(length, key)
        return [self.value(item, key, depth + 1) for _ in range(length)]

    def strings(self, count: int, key: str) -> list[str]:
        """The hot loop: 98k strings in the default model."""
        data, at, size, result = self.data, self.at, len(self.data), []
        unpack = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                length = unpack(data, at)[0]
                at += 8 + length
                if at > size:
                    self.fail(f"string in {key!r} runs past the end", got=f"{length} bytes")
                result.append(data[at - length : at].decode())
        except (struct.error, UnicodeDecodeError) as error:
            self.fail(f"strings of {key!r} are damaged", got=error)
        self.at = at
        return result

    def string(self, what: str) -> str:
        length = self.number("Q", f"length of {what}")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8", got=error)

    def count(self, what: str, least_bytes: int) -> int:
        """A count of things of at least `least_bytes` each, which must still fit the file."""
        count = self.number("Q", what)
        if count * least_bytes > len(self.data) - self.at:
            self.fail(
                f"{what} does not fit the file", got=count, expected=f"a file of {len(self.data)} bytes"
            )
        return int(count)

    def number(self, code: str, what: str) -> Any:
        raw = self.take(struct.calcsize(code), what)
        if code == "?" and raw > b"\x01":
            self.fail(f"{what} is neither true nor false", got=raw)
        return struct.unpack(f"<{code}", raw)[0]

    def take(self, size: int, what: str) -> bytes:
        if size > len(self.data) - self.at:
            self.fail(
                f"the file ends inside {what}", got=f"{len(self.data)} bytes", hint="the file is cut off"
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def fail(self, what: str, **details: Any) -> NoReturn:
        raise ModelFormatError(f"{self.path}: {what}", **details)
