"""A drafter's folder: config.json and model.safetensors, as one inventory.TensorFile.

Tensors have the names of the published checkpoints, with or without "model." before them. A quantised
linear is one tensor here, as in folder.py. Knows no drafter.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import ModelFormatError
from quickdraft.models.loading.folder import CONFIG, SINGLE
from quickdraft.models.loading.gguf import TensorInfo
from quickdraft.models.loading.quantised import QuantisedLinear, collect, settle
from quickdraft.models.loading.safetensors import SafetensorsFile
from quickdraft.models.loading.strict_files import read_object
from quickdraft.ops.weights import Weight

_PREFIX: Final = "model."


class DrafterFolder:
    """`config` is config.json as it stands; messages use the file's own names."""

    def __init__(self, folder: Path) -> None:
        self.config_path, self.path = folder / CONFIG, folder / SINGLE
        self.config = read_object(self.config_path)
        self._file = SafetensorsFile(self.path)
        self.tensors: dict[str, TensorInfo] = {}
        self._called: dict[str, str] = {}
        self._linears: dict[str, QuantisedLinear] = {}
        plain, linears = collect([self._file])
        for _, info in plain:
            self._add(info.name, info)
        for linear in linears:
            self._linears[self._add(f"{linear.module}.weight", linear.info)] = linear

    def _add(self, called: str, info: TensorInfo) -> str:
        name = called.removeprefix(_PREFIX)
        if name in self.tensors:
            raise ModelFormatError(f"{self.path}: tensor {called} is there under another name too")
        self.tensors[name] = replace(info, name=name)
        self._called[name] = info.name
        return name

    @property
    def tensor_bytes(self) -> int:
        return sum(info.bytes for info in self.tensors.values())

    @property
    def files(self) -> tuple[Path, ...]:
        """They determine what it drafts."""
        return self.config_path, self.path

    def called(self, name: str) -> str:
        """See inventory.TensorFile."""
        return self._called.get(name, name)

    def check_quantisation(self) -> None:
        """See ModelFolder.check_quantisation."""
        settle(self.path.parent, self.config, list(self._linears.values()))

    def vector(self, name: str) -> NDArray[np.float32]:
        """See inventory.TensorFile."""
        return self.values(name).astype(np.float32)

    def values(self, name: str) -> NDArray[Any]:
        """A tensor of floats in its own type and shape; all values are finite."""
        self._check_plain(name)
        return self._file.values(self._called[name])

    def codes(self, name: str) -> NDArray[Any]:
        """A tensor of integers in its own type and shape."""
        return self._file.integers(self._called[name])

    def matrix(self, name: str) -> Weight:
        """See inventory.TensorFile."""
        if name in self._linears:
            return self._linears[name].matrix()
        return self._file.matrix(self._called[name])

    def _check_plain(self, name: str) -> None:
        if name in self._linears:
            raise ModelFormatError(
                f"{self.path}: tensor {self._called[name]} is quantised", expected="16 or 32 bit floats"
            )
