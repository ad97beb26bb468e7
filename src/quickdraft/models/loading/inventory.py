"""Inventory: every tensor of a file is used exactly once, with the shape the model expects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import ModelFormatError
from quickdraft.models.loading.gguf import TensorInfo
from quickdraft.ops.weights import Weight


class TensorFile(Protocol):
    """Tensors by their GGUF names, whatever the file calls them."""

    @property
    def path(self) -> Path: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    def vector(self, name: str) -> NDArray[np.float32]:
        """The tensor as float32, in its shape."""

    def matrix(self, name: str) -> Weight: ...
    def called(self, name: str) -> str:
        """The file's own word for a tensor, for messages."""


class Inventory:
    """Hands out the tensors of a file; `finish` complains about what nobody took."""

    def __init__(self, file: TensorFile) -> None:
        self._file, self._left = file, set(file.tensors)

    @property
    def path(self) -> Path:
        return self._file.path

    def called(self, name: str) -> str:
        return self._file.called(name)

    def has(self, name: str) -> bool:
        return name in self._left

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        """A float32 vector of exactly this size."""
        self._take(name, (size,))
        return self._file.vector(name)

    def array(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """A float32 tensor of exactly this shape."""
        self._take(name, shape)
        return self._file.vector(name)

    def claim(self, name: str, shape: tuple[int, ...]) -> None:
        """A tensor of exactly this shape, which the caller reads from the file."""
        self._take(name, shape)

    def leave(self, prefix: str) -> None:
        """Tensors whose names start so belong to somebody else; they are not missed by `finish`."""
        self._left = {name for name in self._left if not name.startswith(prefix)}

    def matrix(self, name: str, outputs: int, inputs: int) -> Weight:
        """A weight of exactly [outputs, inputs]."""
        self._take(name, (outputs, inputs))
        return self._file.matrix(name)

    def finish(self) -> None:
        """ModelFormatError naming the tensors that were not used."""
        if self._left:
            names = sorted(map(self._file.called, self._left))
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ModelFormatError(f"{self._file.path}: tensors nobody uses", got=", ".join(names[:5]) + more)

    def _take(self, name: str, shape: tuple[Any, ...]) -> None:
        if name not in self._left:
            raise ModelFormatError(
                f"{self._file.path}: tensor {self._file.called(name)} is missing", expected=f"shape {shape}"
            )
        found = self._file.tensors[name].shape
        if found != shape:
            raise ModelFormatError(
                f"{self._file.path}: tensor {self._file.called(name)} has a wrong shape",
                got=found, expected=shape,
            )  # fmt: skip
        self._left.discard(name)
