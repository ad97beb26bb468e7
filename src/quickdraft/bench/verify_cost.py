"""`bench verify-cost`: what a whole step costs by rows, after contexts of several lengths.

The curve that decides how long a draft should be. Row counts take turns, in mirrored order from round to
round, so that a machine that slows down slows them alike; the median of each is kept.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from quickdraft.bench.machine import commit
from quickdraft.bench.report import check_json_folder, say, write_json
from quickdraft.bench.step_runner import open_steps
from quickdraft.config import usable_cores
from quickdraft.ops.select import resolve, select
from quickdraft.types import Backend

SCHEMA: Final = "quickdraft-verify-cost-1"
ROUNDS: Final = 8
WARM_UP: Final = 2


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Median milliseconds of a step: step_ms[c][r] after contexts[c] tokens, with rows[r] rows."""

    model: str
    threads: int
    commit: str | None
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    step_ms: tuple[tuple[float, ...], ...]

    def to_dict(self) -> dict[str, object]:
        """The JSON shape of `--json`."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "threads": self.threads,
            "commit": self.commit,
            "rows": list(self.rows),
            "contexts": list(self.contexts),
            "step_ms": [[round(value, 4) for value in line] for line in self.step_ms],
        }


def run(
    model: str | Path,
    json_path: Path | None = None,
    rows: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    threads: int | None = None,
    head_bits: int | None = None,
    backend: Backend = Backend.AUTO,
) -> CostCurve:
    """Measure, print, write `json_path` if given. ConfigError for rows or contexts that do not fit."""
    check_json_folder(json_path)
    threads = usable_cores() if threads is None else threads
    chosen_backend, note = resolve(backend)
    if note:
        say(note)
    ops = select(threads, chosen_backend)
    runner, chosen_rows, chosen = open_steps(model, ops, rows, contexts, head_bits=head_bits)
    lines = []
    for context in chosen:
        say(f"reading up to {context} tokens")
        runner.read(context)
        lines.append(tuple(1000 * value for value in medians_in_turns(runner.step, chosen_rows)))
    curve = CostCurve(runner.name, threads, commit(), tuple(chosen_rows), tuple(chosen), tuple(lines))
    print_curve(curve, Console())
    if json_path is not None:
        write_json(json_path, curve.to_dict())
    return curve


def medians_in_turns(
    measure: Callable[[int], float], choices: Sequence[int], rounds: int = ROUNDS
) -> list[float]:
    """The median of `measure` for each choice; all take turns, every second round backwards."""
    for choice in choices:
        for _ in range(WARM_UP):
            measure(choice)
    values: dict[int, list[float]] = {choice: [] for choice in choices}
    for turn in range(rounds):
        for choice in choices if turn % 2 == 0 else reversed(choices):
            values[choice].append(measure(choice))
    return [statistics.median(values[choice]) for choice in choices]


def print_curve(curve: CostCurve, console: Console) -> None:
    """Milliseconds, and below them how many steps of the fewest rows a step costs."""
    table = Table(
        title=f"{curve.model}, {curve.threads} threads: ms per step, x the step of fewest rows",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("context", justify="right", no_wrap=True)
    for count in curve.rows:
        table.add_column(f"{count} rows" if count > 1 else "1 row", justify="right", no_wrap=True)
    for context, line in zip(curve.contexts, curve.step_ms, strict=True):
        table.add_row(str(context), *(f"{value:.2f}\n{value / line[0]:.2f} x" for value in line))
    console.print(table)
