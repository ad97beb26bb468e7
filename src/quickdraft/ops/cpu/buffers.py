"""Buffers: numpy memory for the CPU backend, aligned, and taken from the system on request.

It knows which of what it gave is still in use, and keeps none of it alive. What the compiled module
allocates itself is zero-filled there and so taken at once.
"""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

ALIGNMENT_BYTES: Final = 64
_PAGE_BYTES: Final = 4096


class Buffers:
    """Hands out zeros; `take` makes them real."""

    def __init__(self) -> None:
        self._owners: WeakValueDictionary[int, NDArray[np.uint8]] = WeakValueDictionary()

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Zeros at a 64-byte boundary; the system hands out the memory when it is first touched."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        raw = np.zeros(size + ALIGNMENT_BYTES, np.uint8)
        self._owners[id(raw)] = raw
        first = -raw.ctypes.data % ALIGNMENT_BYTES
        zeros: NDArray[Any] = raw[first : first + size].view(dtype).reshape(shape)
        return zeros

    def take(self) -> None:
        """Write to every page, leaving its content."""
        for raw in self._owners.values():
            pages = raw[::_PAGE_BYTES]
            np.bitwise_or(pages, 0, out=pages)
