"""Strict reader of one safetensors file.

The format: 8 bytes length of the header (little-endian), the header (a JSON object of name ->
dtype, shape, data_offsets), then the data, which the tensors fill without overlap or hole. All of
that is checked before anything is read, so a damaged or hostile file gives a ModelFormatError that
names it. A tensor is read when it is asked for.
(The `safetensors` package has no numpy form of bfloat16; tests write files with it.)
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Final, NoReturn

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.models.loading.gguf import TensorInfo
from quickdraft.models.loading.strict_files import open_regular, parse_object, read_at
from quickdraft.ops.weights import Blocks, Dense, Part, Weight

MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors package
MAX_DIMENSIONS: Final = 8
_BYTES: Final = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4,
    "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
# dtype -> (numpy type, unsigned type of its size, bits of the exponent; all set: infinite or NaN)
_FLOATS: Final[dict[str, tuple[Any, Any, int]]] = {
    "F32": (np.float32, np.uint32, 0x7F800000),
    "F16": (np.float16, np.uint16, 0x7C00),
    "BF16": (ml_dtypes.bfloat16, np.uint16, 0x7F80),
}
READABLE: Final = tuple(_FLOATS)
INTEGERS: Final[dict[str, Any]] = {"I8": np.int8, "I32": np.int32, "I64": np.int64}


class SafetensorsFile:
    """The tensors of one file; keeps it open while alive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open_file = open_regular(path)
        self._size = os.fstat(self.open_file.fileno()).st_size
        self.tensors = self._place(self._header())

    def values(self, name: str) -> NDArray[Any]:
        """The tensor as float32, float16 or bfloat16, in its shape; all values are finite."""
        info = self._readable(name)
        return self._finite(info, 0, info.shape)

    def integers(self, name: str) -> NDArray[Any]:
        """A tensor of a type in INTEGERS, in its shape."""
        info = self.tensors[name]
        raw = read_at(self.open_file, self.path, info.offset, info.bytes)
        whole: NDArray[Any] = raw.view(INTEGERS[info.type_name]).reshape(info.shape)
        return whole

    def rows(self, name: str, first: int, count: int) -> NDArray[Any]:
        """As `values`, of some rows of a matrix."""
        info = self._readable(name)
        return self._finite(info, first * info.bytes // info.shape[0], (count, *info.shape[1:]))

    def vector(self, name: str) -> NDArray[np.float32]:
        """A small tensor as float32, in its shape."""
        return self.values(name).astype(np.float32)

    def matrix(self, name: str) -> Weight:
        """A two-dimensional tensor [N, K]."""
        info = self._readable(name)
        outputs, inputs = info.shape
        part = Part(self.open_file, info.offset, outputs, lambda: Dense(self.values(name)))
        return Blocks(info.type_name, inputs, (part,))

    def _finite(self, info: TensorInfo, start: int, shape: tuple[int, ...]) -> NDArray[Any]:
        dtype, unsigned, exponent = _FLOATS[info.type_name]
        size = math.prod(shape) * _BYTES[info.type_name]
        raw = read_at(self.open_file, self.path, info.offset + start, size)
        values: NDArray[Any] = raw.view(dtype).reshape(shape)
        if (values.view(unsigned) & unsigned(exponent)).max(initial=0) == exponent:
            raise ModelFormatError(
                f"{self.path}: tensor {info.name} holds values that are not finite",
                hint="the file is damaged; download it again",
            )
        return values

    def _readable(self, name: str) -> TensorInfo:
        """A tensor of a type that can be read."""
        info = self.tensors[name]
        if info.type_name not in _FLOATS:
            raise UnsupportedError(
                f"{self.path}: tensor {name} has a type this version cannot read",
                got=info.type_name, expected=", ".join(READABLE),
            )  # fmt: skip
        return info

    def _header(self) -> dict[str, Any]:
        if self._size < 8:
            self._fail("not a safetensors file", got=f"{self._size} bytes" if self._size else "an empty file")
        length = int.from_bytes(self._read(0, 8), "little")
        if not 2 <= length <= min(self._size - 8, MAX_HEADER_BYTES):
            self._fail(
                "the header does not fit the file", got=f"a header of {length} bytes",
                expected=f"at most {min(self._size - 8, MAX_HEADER_BYTES)}",
                hint="the file is cut off, or no safetensors file",
            )  # fmt: skip
        self._start = 8 + length
        text = self._read(8, length)
        if text[:1] != b"{":
            self._fail("not a safetensors file", got=f"a header that starts with {text[:1]!r}")
        return parse_object(text, f"{self.path}: header")

    def _read(self, offset: int, size: int) -> bytes:
        return read_at(self.open_file, self.path, offset, size).tobytes()

    def _place(self, header: dict[str, Any]) -> dict[str, TensorInfo]:
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            self._fail("__metadata__ is not an object of strings")
        infos = sorted((self._tensor(n, entry) for n, entry in header.items()), key=lambda t: t.offset)
        end = self._start
        for info in infos:
            if info.offset != end:
                self._fail(
                    f"tensor {info.name!r} leaves a hole or overlaps the one before it",
                    got=f"byte {info.offset - self._start}", expected=f"byte {end - self._start}",
                )  # fmt: skip
            end += info.bytes
        if end != self._size:
            self._fail(
                "the tensors do not fill the file", got=f"{self._size} bytes", expected=f"{end} bytes",
                hint="the file is cut off" if end > self._size else "",
            )  # fmt: skip
        return {info.name: info for info in infos}

    def _tensor(self, name: str, entry: Any) -> TensorInfo:
        label = f"tensor {name[:200]!r}"
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            self._fail(f"{label} is not described by dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _BYTES:
            raise UnsupportedError(f"{self.path}: {label} has an unknown type", got=repr(dtype)[:80])
        if not _naturals(shape) or len(shape) > MAX_DIMENSIONS:
            self._fail(f"{label} has a bad shape", got=repr(shape)[:80])
        if not _naturals(offsets) or len(offsets) != 2:
            self._fail(f"{label} has bad data_offsets", got=repr(offsets)[:80], expected="two numbers")
        size, expected = offsets[1] - offsets[0], math.prod(shape) * _BYTES[dtype]
        if size != expected:
            self._fail(
                f"{label} has a wrong size", got=f"{size} bytes",
                expected=f"{expected} bytes for {dtype} {shape}",
            )  # fmt: skip
        if offsets[1] > self._size - self._start:
            self._fail(
                f"{label} ends outside the file", got=f"byte {offsets[1]}",
                expected=f"at most {self._size - self._start}", hint="the file is cut off",
            )  # fmt: skip
        return TensorInfo(name, dtype, tuple(shape), self._start + offsets[0], size)

    def _fail(self, what: str, **details: Any) -> NoReturn:
        raise ModelFormatError(f"{self.path}: {what}", **details)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**48 for item in value)
