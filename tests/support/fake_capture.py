"""Captures without a card: the kernel starts of a capture are written down, with their grids and numbers as
they were then, and a replay starts just these again. So a number of one step that slipped into a capture
shows in the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quickdraft.ops.cuda.backend import CudaOps
from quickdraft.ops.cuda.launch import Launcher, Started
from tests.support.card import SPAN


@dataclass
class Recorder(Launcher):
    """Starts kernels, or writes them down into `seen` while there is one."""

    seen: list[Started] | None = None
    begun: int = 0

    def begin(self, started: Started) -> None:
        if self.seen is not None:
            self.seen.append(started)
            return
        self.begun += 1
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
