"""Program: recorded kernel starts, run one by one or, for step shapes in use, replayed as captured graphs.

A capture freezes grids and numbers, so all starts of a program follow from a *shape* alone: padded rows and
wanted rows, sequences, and spans of positions rounded up. Rows up to the padded count are computed and mean
nothing; what a kernel needs to know of real rows, sequences and contexts it reads from the batch's tensors. A
shape is run as it is when it is first met, as that compiles kernels and sizes workspaces (once more where the
run made copies, which norms write from then on), captured when it is met again, and replayed from then on.
How a capture is made is the business of a Capture. Not run on a card yet.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from quickdraft.ops.cuda.batch import CudaBatch, Shape
from quickdraft.ops.cuda.buffers import Buffer, card_memory

ROOM_BYTES: Final = 96 << 20  # of the card, that are left to others than captures
MOST_SHAPES: Final = 64  # of a program; the one that was not used for longest gives way to another


@dataclass(frozen=True, slots=True)
class Start:
    """One recorded op. Its starts follow from the shape of `batch` alone; None: from something else, and the
    program is not captured. `rows` and `wanted`: how many its buffers hold, where it works on so many;
    `spans`: whether it works on spans of positions; `check` raises ValueError for a step it cannot run."""

    run: Callable[[], None]
    batch: CudaBatch | None = None
    rows: int | None = None
    wanted: int | None = None
    spans: bool = False
    check: Callable[[], None] | None = None


class Capture(Protocol):
    """Makes captures."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Take down what `run` starts, without its taking effect; calling the result does it."""

    def keep(self) -> Any:
        """What must stay allocated as long as a capture made now is replayed."""

    def room(self) -> bool:
        """Whether there is memory for one more."""


@contextmanager
def no_garbage() -> Iterator[None]:
    """Nothing is collected meanwhile: what ends may wait for the card for it, which voids a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class CudaGraphs:
    """Capture of a card; `workspaces` says what graphs use. Each has a pool of its own, of no memory, as a
    capture allocates none: torch refuses a shared pool once all graphs that were in it are gone."""

    def __init__(self, workspaces: Callable[[], Any]) -> None:
        self._workspaces = workspaces

    def room(self) -> bool:
        return int(torch.cuda.mem_get_info()[0]) >= ROOM_BYTES

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        # by hand, as torch.cuda.graph collects garbage each time, which takes longer than a capture
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), no_garbage():
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # of a capture that is void; what happened is the other error
                    graph.capture_end()
                raise
            graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay

    def keep(self) -> Any:
        return self._workspaces()


class Program:
    """See ops.interface.Program. Without a capture every start is run each time."""

    def __init__(self, starts: Sequence[Start], capture: Capture | None = None) -> None:
        self._starts, self._capture = list(starts), capture
        self._checks = [start.check for start in starts if start.check is not None]
        batches = {id(start.batch): start.batch for start in starts}
        self._batch = next(iter(batches.values())) if len(batches) == 1 else None
        self._rows = min((start.rows for start in starts if start.rows is not None), default=None)
        self._wanted = min((start.wanted for start in starts if start.wanted is not None), default=None)
        self._spans = any(start.spans for start in starts)
        # By when they were last used; a number: run, not yet captured, and the copies there were before.
        self._met: dict[Shape, tuple[Callable[[], None], Any] | int] = {}

    @property
    def captured(self) -> int:
        """How many shapes are."""
        return sum(not isinstance(found, int) for found in self._met.values())

    @card_memory()
    def run(self) -> None:
        Buffer.runs += 1
        for check in self._checks:
            check()
        batch, shape = self._batch, self._shape()
        if batch is None or shape is None:
            self._start()
        else:
            self._run_as(batch, shape)

    def _run_as(self, batch: CudaBatch, shape: Shape) -> None:
        found = self._met.pop(shape, None)
        if found == Buffer.made:  # the last run made none, which other kernels would have written in this one
            found = self._record(batch, shape)
        if isinstance(found, tuple):
            self._met[shape] = found
            found[0]()
            return
        if len(self._met) >= MOST_SHAPES:
            del self._met[next(iter(self._met))]
        self._met[shape] = Buffer.made
        with batch.padded(shape):
            self._start()

    def _start(self) -> None:
        for start in self._starts:
            start.run()

    def _shape(self) -> Shape | None:
        """The shape to run as, without what no start here works on; None: none that is captured."""
        shape = self._batch.shape() if self._capture is not None and self._batch is not None else None
        if shape is None:
            return None
        rows = 0 if self._rows is None else shape.rows
        wanted = 0 if self._wanted is None else shape.wanted
        if rows > (self._rows or 0) or wanted > (self._wanted or 0):
            return None
        return Shape(rows, wanted, shape.sequences, shape.spans if self._spans else 0)

    def _record(self, batch: CudaBatch, shape: Shape) -> tuple[Callable[[], None], Any] | None:
        """Where memory is short, the capture that was not used for longest gives way; None: there is none."""
        assert self._capture is not None
        if not self._capture.room():
            oldest = next((met for met, found in self._met.items() if isinstance(found, tuple)), None)
            if oldest is None:
                return None
            del self._met[oldest]
        with batch.padded(shape):
            replay = self._capture.record(self._start)
        return replay, self._capture.keep()
