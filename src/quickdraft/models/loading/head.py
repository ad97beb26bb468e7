"""Embeddings and heads that a quantised folder left in 16 bits: made int8 groups while they are read.

The largest matrices of a model are often left as they were; in 8 bits they take half the memory and time.
That changes numbers, so what it costs is measured and reported. Knows matrices, not models.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quickdraft.config import usable_cores
from quickdraft.errors import ModelFormatError
from quickdraft.models.loading.safetensors import SafetensorsFile
from quickdraft.ops.weights import Blocks, Int8Groups, Part

GROUP: Final = 32
MAX_VALUE: Final = 127 * 65504  # by the largest fp16 scale
_CHUNK_VALUES: Final = 1 << 18  # so many at a time: what comes in between stays in the cache
_MAX_THREADS: Final = 8


def requantised(shard: SafetensorsFile, name: str, report: Callable[[float], None]) -> Blocks:
    """The matrix as int8 groups, made when it is packed; `report` then gets the relative rms error."""
    info = shard.tensors[name]
    outputs, inputs = info.shape

    def read() -> Int8Groups:
        codes = np.empty((outputs, inputs), np.int8)
        scales = np.empty((outputs, inputs // GROUP), np.float16)
        step = max(1, _CHUNK_VALUES // inputs)

        def convert(first: int) -> NDArray[np.float64]:
            """Squares of what is off and of the values."""
            values = shard.rows(name, first, min(step, outputs - first)).astype(np.float32)
            if np.abs(values).max() > MAX_VALUE:
                raise ModelFormatError(
                    f"{shard.path}: tensor {name} holds values too large for 8 bits",
                    expected=f"at most {MAX_VALUE}", hint="keep it as it is with --head-bits 16",
                )  # fmt: skip
            part = slice(first, first + len(values))
            codes[part], scales[part] = nearest_codes(values)
            off = Int8Groups(codes[part], scales[part]).dequantised() - values
            return np.array([np.vdot(off, off), np.vdot(values, values)], np.float64)

        with ThreadPoolExecutor(min(usable_cores(), _MAX_THREADS)) as pool:
            squares = sum(pool.map(convert, range(0, outputs, step)), np.zeros(2))
        report(float(np.sqrt(squares[0] / squares[1])) if squares[1] else 0.0)
        return Int8Groups(codes, scales)

    return Blocks(None, inputs, (Part(shard.open_file, info.offset, outputs, read),))


def nearest_codes(values: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[Any]]:
    """Of values of at most MAX_VALUE: codes [N, K] in -127..127 and scales [N, K / 32].

    scale = largest magnitude / 127, rounded up to fp16; code = rint(value / scale), 0 where the scale is.
    """
    groups = values.reshape(len(values), -1, GROUP)
    largest = np.abs(groups).max(axis=2) / np.float32(127)
    scales = largest.astype(np.float16)
    scales = np.where(scales < largest, np.nextafter(scales, np.float16(65504)), scales)
    divisors = np.where(scales == 0, np.float32(np.inf), scales.astype(np.float32))
    codes = np.clip(np.rint(groups / divisors[:, :, None]), -127, 127).astype(np.int8)
    return codes.reshape(values.shape), scales
