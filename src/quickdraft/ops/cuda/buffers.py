"""What the CUDA backend keeps in memory: buffers, and paged keys and values.

A Buffer is opaque to models; to host code it reads and writes as rows of numpy, which on a card is a copy
each way and in the interpreter the memory itself. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from quickdraft.errors import UnsupportedError
from quickdraft.ops.interface import KVDtype, block_views, kv_shapes

KV_TYPES: dict[str, tuple[torch.dtype, Any]] = {  # name -> (torch type, numpy type)
    "float32": (torch.float32, np.float32),
    "float16": (torch.float16, np.float16),
    "bfloat16": (torch.bfloat16, ml_dtypes.bfloat16),
    "int8": (torch.uint8, np.uint8),
}

COPY_ROWS = 64  # a linear reads whole tiles of rows


def to_tensor(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on the device; bfloat16, which numpy knows through ml_dtypes only, by its bits."""
    values = np.ascontiguousarray(values)
    if values.dtype == ml_dtypes.bfloat16:
        return torch.tensor(values.view(np.int16), device=device).view(torch.bfloat16)
    return torch.tensor(values, device=device)


@contextmanager
def card_memory() -> Iterator[None]:
    """MemoryError where the card has no room: torch, the driver and triton have an error each."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            raise MemoryError(str(error)) from error
        raise


def zeros(shape: tuple[int, ...], kind: torch.dtype, device: torch.device) -> torch.Tensor:
    """MemoryError where the card has no room."""
    with card_memory():
        return torch.zeros(shape, dtype=kind, device=device)


class CardRows:
    """ops.interface.Rows: a view of a tensor, of which numpy gets a copy."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: Any) -> CardRows:
        return CardRows(self.tensor[index])

    def copy(self) -> CardRows:
        return CardRows(self.tensor.clone())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.tensor.cpu().numpy(), dtype)


class Buffer:
    """A tensor on the device whose items are numpy on the host: reading copies, on a CPU tensor it is a
    view. `copies` holds it in the 16-bit types that linears wanted it in, by type and padded width; norms and
    gates write them beside it: `copied` rows are up to date until the run of the program ends, as captured
    starts do not say what they write."""

    __slots__ = ("_copied", "_run", "copies", "tensor")
    runs: ClassVar[int] = 0  # of programs so far
    made: ClassVar[int] = 0  # copies so far

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.copied = tensor, 0
        self.copies: dict[tuple[torch.dtype, int], torch.Tensor] = {}

    @property
    def copied(self) -> int:
        return self._copied if self._run == Buffer.runs else 0

    @copied.setter
    def copied(self, rows: int) -> None:
        self._copied, self._run = rows, Buffer.runs

    def copy_of(self, kind: torch.dtype, padded: int, rows: int) -> tuple[torch.Tensor, bool]:
        """Memory for `rows` in that type, zeros behind the last column, and whether it is up to date."""
        found = self.copies.get((kind, padded))
        if found is None:
            Buffer.made += 1
            height = -(-len(self.tensor) // COPY_ROWS) * COPY_ROWS
            found = self.copies[kind, padded] = zeros((height, padded), kind, self.tensor.device)
            return found, False
        return found, rows <= self.copied

    def first_copies(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The copies a norm or gate writes: the first in float16 and in bfloat16, if any is wanted."""
        half = (copy for (kind, _), copy in self.copies.items() if kind == torch.float16)
        brain = (copy for (kind, _), copy in self.copies.items() if kind == torch.bfloat16)
        return next(half, None), next(brain, None)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: Any) -> Any:
        return self.tensor[index].cpu().numpy()

    def __setitem__(self, index: Any, values: Any) -> None:
        target, self.copied = self.tensor[index], 0
        if isinstance(values, Buffer | CardRows):
            target.copy_(values.tensor)
            return
        numbers = np.broadcast_to(np.asarray(values), tuple(target.shape))
        target.copy_(torch.tensor(numbers).to(self.tensor.dtype))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self.tensor.cpu().numpy(), dtype)


def tensor_of(rows: Any, device: torch.device) -> torch.Tensor:
    """Rows of a buffer where they lie, or numpy's, copied to the device."""
    return rows.tensor if isinstance(rows, CardRows) else to_tensor(np.asarray(rows), device)


class CudaKV:
    """See ops.interface.KVCache. `key_tensor` and `value_tensor` are the memory kernels read; int8 is
    bytes."""

    def __init__(
        self, device: torch.device, layers: int, blocks: int, kv_heads: int, head_dim: int, dtype: KVDtype
    ) -> None:
        kind, self._numpy_type = KV_TYPES[dtype]
        self.blocks, self.dtype, self.kv_heads, self.head_dim = blocks, dtype, kv_heads, head_dim
        keys, values = kv_shapes(kv_heads, head_dim, dtype)
        self.key_tensor = zeros((layers, blocks, *keys), kind, device)
        self.value_tensor = zeros((layers, blocks, *values), kind, device)
        total = self.key_tensor.nbytes + self.value_tensor.nbytes
        self.bytes_per_block = total // max(blocks, 1)
        self._room: list[torch.Tensor] = []  # on the host, of the block that is being filled

    @property
    def keys(self) -> NDArray[Any]:
        return self._host(self.key_tensor)

    @property
    def values(self) -> NDArray[Any]:
        return self._host(self.value_tensor)

    @property
    def layout(self) -> tuple[int, ...]:
        return len(self.key_tensor), *self.key_tensor.shape[2:]

    def views(self, block: int) -> list[memoryview]:
        return self._views([part[:, block].cpu() for part in (self.key_tensor, self.value_tensor)])

    def room(self, block: int) -> list[memoryview]:
        parts = self.key_tensor, self.value_tensor
        self._room = [torch.empty_like(part[:, block], device="cpu") for part in parts]
        return self._views(self._room)

    def filled(self, block: int) -> None:
        for part, room in zip((self.key_tensor, self.value_tensor), self._room, strict=True):
            part[:, block].copy_(room)
        self._room = []

    def copy_block(self, source: int, target: int) -> None:
        for part in (self.key_tensor, self.value_tensor):
            part[:, target] = part[:, source]

    def take(self, blocks: int) -> None:
        for part in (self.key_tensor, self.value_tensor):
            part[:, :blocks] = 0

    def _views(self, parts: list[torch.Tensor]) -> list[memoryview]:
        keys, values = (host_view(part.contiguous()).view(np.uint8)[:, None] for part in parts)
        return block_views(keys, values, 0)

    def _host(self, tensor: torch.Tensor) -> NDArray[Any]:
        numbers: NDArray[Any] = host_view(tensor).view(self._numpy_type)
        return numbers


def host_view(tensor: torch.Tensor) -> NDArray[Any]:
    """The tensor's own memory as numpy; on a card it has none here."""
    if tensor.is_cuda:
        raise UnsupportedError(
            "the host cannot reach the card's memory",
            hint="copy it: views, room and filled do",
        )
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.float32}[tensor.element_size()]
    numbers: NDArray[Any] = tensor.view(same_size).numpy()
    return numbers
