"""Captures without a card: the kernel starts of a capture are written down, with their grids and numbers as
they were then, and a replay starts just these again. So a number of one step that slipped into a capture
shows in the next. A kernel that a capture would be the first to start, and so to compile, is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from quickdraft.ops.cuda.backend import CudaOps
from quickdraft.ops.cuda.launch import Launcher, Started
from tests.support.card import SPAN


def signature(started: Started) -> tuple[Any, ...]:
    """What a kernel may be compiled for: types, numbers, and whether pointers are aligned."""

    def key(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return argument.dtype, argument.data_ptr() % 16
        return argument

    options = (*started.numbers.items(), *started.options.items())
    return started.kernel, *map(key, started.arguments), *options


@dataclass
class Recorder(Launcher):
    """Starts kernels, or writes them down into `seen` while there is one."""

    seen: list[Started] | None = None
    compiled: set[tuple[Any, ...]] = field(default_factory=set)

    def begin(self, started: Started) -> None:
        if self.seen is not None:
            assert signature(started) in self.compiled, f"{started.kernel} is compiled in a capture"
            self.seen.append(started)
            return
        self.compiled.add(signature(started))
        super().begin(started)


@dataclass
class FakeCapture:
    """A program.Capture; `starts` of each capture, and how often any was replayed."""

    launcher: Recorder
    starts: list[int] = field(default_factory=list)
    replays: int = 0
    full: bool = False  # no memory is left for another

    def room(self) -> bool:
        return not self.full

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        seen: list[Started] = []
        self.launcher.seen = seen
        try:
            run()
        finally:
            self.launcher.seen = None
        self.starts.append(len(seen))

        def replay() -> None:
            self.replays += 1
            for started in seen:
                self.launcher.begin(started)

        return replay

    def keep(self) -> Any:
        return None


def capturing_card() -> tuple[CudaOps, FakeCapture]:
    """A card in the interpreter whose programs are captured."""
    launcher = Recorder()
    ops = CudaOps(launcher=launcher, span=SPAN)
    ops.capture = capture = FakeCapture(launcher)
    return ops, capture
