"""A sanitizer over Triton's interpreter: what would be wrong on a card and yet pass program by program.

Programs of a start run in any order; every address that a mask lets through must lie in a tensor which the
start was given; and no program may touch what another one of the start writes. `SanitizedOps` also fills with
garbage whatever holds nothing between ops or steps. Knows no kernel but two whose views reach beyond
themselves. Import before starting a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from triton.runtime import interpreter as triton_interpreter

from quickdraft.ops.cuda.backend import CudaOps
from quickdraft.ops.cuda.buffers import Buffer, CudaKV
from quickdraft.ops.cuda.launch import Launcher, Started
from quickdraft.ops.cuda.program import Start
from quickdraft.ops.cuda.recurrent import CudaRecurrent
from tests.support.byte_meter import noting
from tests.support.card import SPAN

# Views of the first slot, from which other slots are reached.
TO_THE_END: Final = {"convolve": ("windows",), "delta_rule": ("states",)}
NAN_BYTE: Final = 0xFF  # of floats of any type; of integers -1

Addresses = NDArray[np.uint64]
_builder: Any = triton_interpreter.InterpreterBuilder
_dim, _index = _builder.set_grid_dim, _builder.set_grid_idx
_running: list[_Accesses] = []


def _set_dim(self: Any, *grid: int) -> None:
    _dim(self, *grid)
    if _running:
        _running[-1].begin(grid)


def _set_index(self: Any, *index: int) -> None:
    _index(self, *(_running[-1].next() if _running else index))


_builder.set_grid_dim, _builder.set_grid_idx = _set_dim, _set_index


class Unsound(AssertionError):
    """A kernel start that a card may not forgive."""


@dataclass(frozen=True, slots=True)
class _Extent:
    """Addresses of a view: of rows `stride` bytes apart the first `width` bytes."""

    first: int
    end: int
    stride: int
    width: int

    @staticmethod
    def of(tensor: torch.Tensor, *, to_the_end: bool) -> _Extent:
        first, size = tensor.data_ptr(), tensor.element_size()
        storage = tensor.untyped_storage()
        end = storage.data_ptr() + storage.nbytes()
        if not to_the_end and tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            end = first + size * (1 + sum((count - 1) * step for count, step in steps))
        rows = tensor.dim() == 2 and tensor.stride(1) == 1 and not to_the_end
        stride = tensor.stride(0) * size if rows and len(tensor) > 1 else end - first
        return _Extent(first, end, stride, tensor.shape[1] * size if rows else stride)

    def holds(self, addresses: Addresses, size: int) -> NDArray[np.bool_]:
        offset = addresses.astype(np.int64) - self.first
        inside: NDArray[np.bool_] = (offset >= 0) & (offset + size <= self.end - self.first)
        return inside & (offset % max(self.stride, 1) + size <= self.width)


@dataclass
class _Accesses:
    """Of one start, whose programs run in the order of `random`, None: backwards."""

    name: str
    extents: list[_Extent]
    random: np.random.Generator | None
    order: list[tuple[int, ...]] = field(default_factory=list)
    program: int = -1  # in the order they run
    reads: list[tuple[int, int, Addresses]] = field(default_factory=list)  # program, bytes each, addresses
    writes: list[tuple[int, int, Addresses]] = field(default_factory=list)

    def begin(self, grid: tuple[int, ...]) -> None:
        numbers = np.arange(prod(grid))[::-1] if self.random is None else self.random.permutation(prod(grid))
        self.order = [tuple(map(int, np.unravel_index(number, grid))) for number in numbers]

    def next(self) -> tuple[int, ...]:
        self.program += 1
        return self.order[self.program]

    def note(self, kind: str, size: int, addresses: Addresses) -> None:
        lost = np.ones(len(addresses), bool)
        for extent in self.extents:
            lost[lost] = ~extent.holds(addresses[lost], size)
            if not lost.any():
                break
        else:
            if len(addresses):
                where = self.order[self.program]
                raise Unsound(f"{self.name}, program {where}: {kind} {lost.sum()} numbers of no tensor")
        getattr(self, kind).append((self.program, size, addresses))

    def check_races(self) -> None:
        """Unsound where a program touches what another one writes."""
        if not self.writes:
            return
        places, owners = _bytes_of(self.writes)
        order = np.argsort(places, kind="stable")
        places, owners = places[order], owners[order]
        self._raise((places[1:] == places[:-1]) & (owners[1:] != owners[:-1]), owners, "write the same")
        low, high = places[0], places[-1]
        near = [(who, size, at[(at + size > low) & (at <= high)]) for who, size, at in self.reads]
        read, readers = _bytes_of(near)
        found = np.minimum(np.searchsorted(places, read), len(places) - 1)
        met = (places[found] == read) & (owners[found] != readers)
        self._raise(met, readers, "read what others write")

    def _raise(self, met: NDArray[np.bool_], programs: NDArray[np.int64], what: str) -> None:
        if met.any():
            named = sorted({self.order[int(one)] for one in programs[: len(met)][met][:1000]})[:4]
            raise Unsound(f"{self.name}: programs {what}, as {named}")


def _bytes_of(accesses: list[tuple[int, int, Addresses]]) -> tuple[Addresses, NDArray[np.int64]]:
    """Every byte touched, and by which program."""
    bytes_of = [
        (at[:, None] + np.arange(size, dtype=np.uint64)).ravel() if len(at) else np.empty(0, np.uint64)
        for _, size, at in accesses
    ]
    owners = [np.full(len(one), who) for one, (who, _, _) in zip(bytes_of, accesses, strict=True)]
    return np.concatenate(bytes_of or [np.empty(0, np.uint64)]), np.concatenate(owners or [np.empty(0, int)])


class Sanitizer(Launcher):
    """Starts kernels and checks each; `seed` None: the last program of a grid runs first."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.random = None if seed is None else np.random.default_rng(seed)
        self.started: set[str] = set()  # kernels

    def begin(self, started: Started) -> None:
        name = started.kernel.__name__
        self.started.add(name)
        given = zip(started.kernel.arg_names, started.arguments, strict=False)
        extents = [
            _Extent.of(value, to_the_end=argument in TO_THE_END.get(name, ()))
            for argument, value in given
            if isinstance(value, torch.Tensor)
        ]
        accesses = _Accesses(name, extents, self.random)
        noting.append(accesses)
        _running.append(accesses)
        try:
            super().begin(started)
        except triton_interpreter.InterpreterError as error:
            raise (error.__cause__ if isinstance(error.__cause__, Unsound) else error) from None
        finally:
            noting.pop()
            _running.pop()
        accesses.check_races()


def garbage(tensor: torch.Tensor) -> None:
    """Fill a view with NaN; integers with -1, which is no id, no block and no code that was written."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(NAN_BYTE if tensor.dtype == torch.uint8 else -1)


class SanitizedOps(CudaOps):
    """A card in the interpreter with a Sanitizer. Workspaces hold garbage before every op; new keys, values,
    states and histories hold it from the start; `spoil` fills what no step may read from the last one."""

    def __init__(self, launcher: Launcher) -> None:
        super().__init__(launcher=launcher, span=SPAN)
        self.buffers: list[Buffer] = []

    def empty(self, rows: int, width: int) -> Buffer:
        self.buffers.append(super().empty(rows, width))
        garbage(self.buffers[-1].tensor)
        return self.buffers[-1]

    def kv_cache(self, *sizes: Any) -> CudaKV:
        kv = super().kv_cache(*sizes)
        garbage(kv.key_tensor)
        garbage(kv.value_tensor)
        return kv

    def recurrent_cache(self, *sizes: Any) -> CudaRecurrent:
        cache = super().recurrent_cache(*sizes)
        for part in (cache.inputs, cache.rows, cache.states):  # a sequence clears its slot
            garbage(part)
        return cache

    def spoil(self) -> None:
        """Between steps whose programs read nothing but their batch."""
        self.spoil_copies()
        for buffer in self.buffers:
            garbage(buffer.tensor)

    def spoil_copies(self) -> None:
        """Copies in 16 bits last for one run; columns that fill them up are zeros for ever."""
        for buffer in self.buffers:
            for copy in buffer.copies.values():
                garbage(copy[:, : buffer.shape[1]])

    def _do(self, start: Start) -> None:
        run = start.run

        def spoiled() -> None:
            for memory in self.workspaces():
                garbage(memory)
            run()

        super()._do(Start(spoiled, start.batch, start.rows, start.wanted, start.spans, start.check))
