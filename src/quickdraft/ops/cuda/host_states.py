"""HostStates: recurrent states that no kernel reads, in the host's memory, beside a card or not.

Pinned memory is copied by the card itself, in the order of its stream, while the host goes on: so the host
waits for the last copy of a slot before it reads or writes that slot. Where memory cannot be pinned, or is so
much of what is free that the system would miss it, it is ordinary memory and a copy is done when it returns.
Knows no layer and no owner.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Final, Protocol

import torch

from quickdraft.config import Hardware

PINNED_SHARE: Final = 2  # at most one part in so many of free memory is pinned: nothing can swap it out

PINNED: Final = "pinned host memory"

Wait = Callable[[], None]


class Copies(Protocol):
    """How tensors are copied between the host and the card."""

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Wait | None:
        """Begin a copy behind all that the stream was given before; the result waits for it, None: it is
        done."""


class Finished:
    """Copies that are done when they return: all but those of pinned memory are."""

    def start(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)


class Streamed:
    """Copies of the card's current stream, which kernels and captured graphs run in too."""

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Wait:
        target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return done.synchronize


class HostStates:
    """`count` float32 states of one shape, zero at first. MemoryError where the host has no room.

    `copies` is for tests: what stands in for the card's stream."""

    def __init__(
        self, count: int, shape: tuple[int, ...], device: torch.device, copies: Copies | None = None
    ) -> None:
        try:
            self._tensor = torch.zeros((count, *shape), dtype=torch.float32)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
        self.where = self._pin(device) if device.type == "cuda" and count else "host memory"
        self._copies: Copies = copies or (Streamed() if self.where == PINNED else Finished())
        self._waits: dict[int, Wait] = {}  # of slots that a copy may still read or write

    def _pin(self, device: torch.device) -> str:
        """Pin the memory where it lies, which takes no more than it has, and say what it is now."""
        size, free = self._tensor.nbytes, Hardware.detect().free_memory_bytes
        if size > free // PINNED_SHARE:
            return f"pageable host memory, as more than half of the {free / 2**30:.1f} GiB free is not pinned"
        runtime, at = torch.cuda.cudart(), self._tensor.data_ptr()
        failed = int(runtime.cudaHostRegister(at, size, 0))
        if failed:
            _forget_error(device)
            return f"pageable host memory, as the driver pins none (error {failed})"
        weakref.finalize(self, _unpin, at).atexit = False  # the end of the process does it anyway
        return PINNED

    def store(self, source: torch.Tensor, slot: int) -> None:
        """A state from the card."""
        self._begin(slot, source, self._tensor[slot])

    def load(self, slot: int, target: torch.Tensor) -> None:
        """A state to the card."""
        self._begin(slot, self._tensor[slot], target)

    def host(self, slot: int) -> torch.Tensor:
        """Its memory, for the host to read and write: no copy is under way."""
        wait = self._waits.pop(slot, None)
        if wait is not None:
            wait()
        return self._tensor[slot]

    def _begin(self, slot: int, source: torch.Tensor, target: torch.Tensor) -> None:
        wait = self._copies.start(source, target)
        if wait is not None:  # of a stream: once this copy is done, so are those of the slot before it
            self._waits[slot] = wait


def _forget_error(device: torch.device) -> None:
    """The next kernel that starts would report the driver's last error: start one that may."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def _unpin(at: int) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(at)
