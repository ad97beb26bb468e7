"""What a user sees while drafters are trained: bars on stderr, and a line for every measurement.

Knows no network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from quickdraft.train.fit import Plan
from quickdraft.train.fit import Progress as Line


class Display:
    """Bars where stderr is a terminal, lines everywhere."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)

    def report(self, line: str) -> None:
        """One line."""
        self._console.print(line)

    def counting(self, what: str) -> Callable[[Iterable[int], int], Iterable[int]]:
        """Wraps an iterable and its length so that it is shown how far it is."""

        def wrap(items: Iterable[int], total: int) -> Iterator[int]:
            with self._bar() as bar:
                task = bar.add_task(what, total=total)
                for item in items:
                    yield item
                    bar.advance(task)
            self.report(f"{what} of {total} rows")

        return wrap

    @contextmanager
    def training(self, plan: Plan) -> Iterator[Callable[[Line], None]]:
        """Gives what takes the lines of the curve."""
        with self._bar() as bar:
            task = bar.add_task("train", total=plan.steps)

            def show(line: Line) -> None:
                bar.update(task, completed=line.step, description=f"train, loss {line.loss:.3f}")
                if line.report is not None:
                    reached = ", ".join(f"{value:.3f}" for value in line.report.tokens_per_step)
                    self.report(f"step {line.step}: loss {line.loss:.3f}; held-out tokens per step {reached}")

            yield show

    def _bar(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=self._console, disable=not self._console.is_terminal,
        )  # fmt: skip
