"""Random numbers of a tensor, chunk by chunk, so that no tensor is ever whole in memory.

A tensor's numbers depend on the seed and its name only: not on files, other tensors or chunks. They
come from the raw 64-bit output of a bit generator, which numpy keeps stable over its versions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

CHUNK_VALUES: Final = 1 << 22  # a multiple of 4, so that chunks use whole outputs of the generator
_FLOATS: Final[dict[str, Any]] = {"BF16": ml_dtypes.bfloat16, "F16": np.float16}
_INTEGERS: Final[dict[str, Any]] = {"I32": np.dtype("<u4"), "I64": np.dtype("<u8")}
_STEPS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Uniform:
    """Floats between `low` and `high`, or between their negatives with the same odds."""

    low: float
    high: float
    either_sign: bool = False


@dataclass(frozen=True, slots=True)
class Codes:
    """32-bit words whose bits are all random."""


@dataclass(frozen=True, slots=True)
class Constant:
    """The same integers over and over."""

    values: tuple[int, ...]


Fill = Uniform | Codes | Constant


def chunks(fill: Fill, dtype: str, shape: tuple[int, ...], seed: int, name: str) -> Iterator[NDArray[Any]]:
    """The bits of a tensor in order, as flat unsigned arrays (little-endian) of at most CHUNK_VALUES."""
    left = math.prod(shape)
    raw = _generator(seed, name)
    table = _table(fill, dtype) if isinstance(fill, Uniform) else None
    while left:
        count = min(left, CHUNK_VALUES)
        if table is not None:
            yield table.take(_random(raw, count, np.dtype("<u2")))
        elif isinstance(fill, Constant):
            yield np.resize(np.array(fill.values, _INTEGERS[dtype]), count)
        else:
            yield _random(raw, count, _INTEGERS[dtype])
        left -= count


def _generator(seed: int, name: str) -> np.random.SFC64:
    words = np.frombuffer(hashlib.sha256(name.encode()).digest(), "<u4")
    return np.random.SFC64(np.random.SeedSequence([seed, *map(int, words)]))


def _random(raw: np.random.SFC64, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    each = 8 // dtype.itemsize
    words: NDArray[np.uint64] = raw.random_raw(-(-count // each))
    return words.astype("<u8", copy=False).view(dtype)[:count]


def _table(fill: Uniform, dtype: str) -> NDArray[np.uint16]:
    """The bits of 2^16 numbers; one is picked by 16 random bits."""
    count = _STEPS // (2 if fill.either_sign else 1)
    values = np.linspace(fill.low, fill.high, count)
    if fill.either_sign:
        values = np.concatenate([values, -values])
    return values.astype(_FLOATS[dtype]).view(np.uint16)
