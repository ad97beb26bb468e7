"""Program: recorded kernel starts, run one by one or, for step shapes in use, replayed as captured graphs.

A capture freezes grids and numbers, so only starts that depend on nothing but a *shape* (padded rows, padded
wanted rows, sequences) are captured: stretches of them between attention, whose grids follow the context and
which is started each time. Rows up to the padded count are computed and mean nothing; what a kernel needs to
know of real rows it reads from the batch's tensors. A stretch is run as it is when a shape is first met, as
that compiles kernels and sizes workspaces, captured when it is met again, and replayed from then on. How a
capture is made is the business of a Capture. Not run on a card yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, NamedTuple, Protocol

import torch

from quickdraft.ops.cuda.buffers import Buffer, CudaBatch, padded_rows

MOST_SHAPES: Final = 64  # of a program; others are run start by start


class Shape(NamedTuple):
    """All that captured starts depend on beside the contents of tensors."""

    rows: int
    wanted: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Start:
    """One recorded op. `fixed`: its starts follow from the shape of `batch` alone; `rows` and `wanted`: how
    many its buffers hold, where it works on so many; `check` raises ValueError for a step it cannot run."""

    run: Callable[[], None]
    batch: CudaBatch | None = None
    fixed: bool = False
    rows: int | None = None
    wanted: int | None = None
    check: Callable[[], None] | None = None


class Capture(Protocol):
    """Makes captures."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Take down what `run` starts, without its taking effect; calling the result does it."""

    def keep(self) -> Any:
        """What must stay allocated as long as a capture made now is replayed."""


class CudaGraphs:
    """Capture of a card. Graphs share a pool, as no two run at a time; `workspaces` says what they use."""

    def __init__(self, workspaces: Callable[[], Any]) -> None:
        self._pool: Any = None
        self._workspaces = workspaces

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # by hand, as torch.cuda.graph collects garbage each time, which takes longer than a capture
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay

    def keep(self) -> Any:
        return self._workspaces()


@dataclass(slots=True)
class Stretch:
    """Starts one behind the other that are all fixed, or all not."""

    starts: list[Start]
    fixed: bool
    replays: dict[Shape, tuple[Callable[[], None], Any]] = field(default_factory=dict)

    def run(self) -> None:
        for start in self.starts:
            start.run()


class Program:
    """See ops.interface.Program. Without a capture every start is run each time."""

    def __init__(self, starts: Sequence[Start], capture: Capture | None = None) -> None:
        self._starts, self._capture = list(starts), capture
        self._checks = [start.check for start in starts if start.check is not None]
        runs = [(fixed, list(part)) for fixed, part in groupby(starts, _is_fixed)]
        self._stretches = [Stretch(part, fixed and len(part) > 1) for fixed, part in runs]
        batches = {id(start.batch): start.batch for start in starts if start.batch is not None}
        self._batch = next(iter(batches.values())) if len(batches) == 1 else None
        self._rows = min((start.rows for start in starts if start.rows is not None), default=0)
        self._wanted = min((start.wanted for start in starts if start.wanted is not None), default=0)
        self._met: set[Shape] = set()
        self.captured = 0  # stretches, for reports

    def run(self) -> None:
        Buffer.runs += 1
        for check in self._checks:
            check()
        batch, shape = self._batch, self._shape()
        if batch is None or shape is None:
            for start in self._starts:
                start.run()
            return
        first = shape not in self._met
        self._met.add(shape)
        for stretch in self._stretches:
            if not stretch.fixed:
                stretch.run()
            elif first:
                with _padded(batch, shape):
                    stretch.run()
            else:
                self._replay(batch, stretch, shape)

    def _shape(self) -> Shape | None:
        """The shape to run as; None: none that is captured."""
        batch = self._batch
        if self._capture is None or batch is None:
            return None
        rows, wanted = padded_rows(batch.rows.count), padded_rows(batch.wanted.count)
        room = min(self._rows, batch.limits[0])
        if rows is None or wanted is None or rows > room or (wanted and wanted > self._wanted):
            return None
        shape = Shape(rows, wanted, len(batch.starts) - 1)
        return shape if shape in self._met or len(self._met) < MOST_SHAPES else None

    def _replay(self, batch: CudaBatch, stretch: Stretch, shape: Shape) -> None:
        assert self._capture is not None
        found = stretch.replays.get(shape)
        if found is None:
            with _padded(batch, shape):
                replay = self._capture.record(stretch.run)
            found = stretch.replays[shape] = replay, self._capture.keep()
            self.captured += 1
        found[0]()


def _is_fixed(start: Start) -> bool:
    return start.fixed


@contextmanager
def _padded(batch: CudaBatch, shape: Shape) -> Iterator[None]:
    """The batch's counts on the host as those of the shape."""
    before = batch.rows.count, batch.wanted.count, batch.longest, batch.most_pending
    batch.rows.count, batch.wanted.count = shape.rows, shape.wanted
    batch.longest = batch.most_pending = shape.rows
    try:
        yield
    finally:
        batch.rows.count, batch.wanted.count, batch.longest, batch.most_pending = before
