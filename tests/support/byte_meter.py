"""A byte meter over Triton's interpreter: what every kernel start really reads and writes.

Every load and store of the interpreter goes through two functions, which here also note the addresses that
the mask lets through. Bytes are those of distinct addresses, reads and writes apart, of all programs of a
start. Import before starting a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from triton.runtime import interpreter as triton_interpreter

from quickdraft.ops.cuda.launch import Launcher, Started, Watching
from tests.support import interpreter as interpreter

_builder: Any = triton_interpreter.InterpreterBuilder
_load, _store = _builder.create_masked_load, _builder.create_masked_store
noting: list[Noting] = []  # of the start that runs now


class Noting(Protocol):
    """Is told every address that a mask lets through: `kind` reads or writes, of so many bytes each."""

    def note(self, kind: str, size: int, addresses: NDArray[np.uint64]) -> None: ...


@dataclass
class _Touched:
    """Addresses by the size of what lies there."""

    reads: dict[int, list[Any]] = field(default_factory=dict)
    writes: dict[int, list[Any]] = field(default_factory=dict)

    def note(self, kind: str, size: int, addresses: NDArray[np.uint64]) -> None:
        getattr(self, kind).setdefault(size, []).append(addresses)

    def bytes(self) -> int:
        return sum(
            size * len(np.unique(np.concatenate(addresses)))
            for kind in (self.reads, self.writes)
            for size, addresses in kind.items()
        )


def _note(kind: str, pointers: Any, mask: Any) -> None:
    if noting:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        inside = np.broadcast_to(mask.data, pointers.data.shape)
        noting[-1].note(kind, size, pointers.data[inside].ravel())


def _noted_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
    _note("reads", pointers, mask)
    return _load(self, pointers, mask, *rest)


def _noted_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    _note("writes", pointers, mask)
    return _store(self, pointers, value, mask, *rest)


_builder.create_masked_load, _builder.create_masked_store = _noted_load, _noted_store


class Metering(Watching):
    """Starts kernels, writes them down, and keeps the bytes of each: `bytes[i]` of `seen[i]`."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def begin(self, started: Started) -> None:
        self.seen.append(started)
        touched = _Touched()
        noting.append(touched)
        try:
            Launcher.begin(self, started)
        finally:
            noting.pop()
            self.bytes.append(touched.bytes())
