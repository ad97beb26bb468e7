"""`bench ops`: each op of a whole step beside its roof, and their sum beside the step.

The compiled program times its own ops, so each runs where it does in a step: after the op before it, with
that op's caches, over all layers. Steps that are timed whole carry no timer and alternate with timed ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from quickdraft.bench.machine import commit, measure_peaks, rates, read_bandwidth
from quickdraft.bench.report import check_json_folder, say, write_json
from quickdraft.bench.roofline import Rates
from quickdraft.bench.step_runner import OpTime, StepRunner, open_steps
from quickdraft.bench.verify_cost import ROUNDS, WARM_UP
from quickdraft.config import usable_cores
from quickdraft.ops.select import select

if TYPE_CHECKING:
    from quickdraft.bench.op_work import OpWork

SCHEMA: Final = "quickdraft-ops-1"


@dataclass(frozen=True, slots=True)
class Line:
    """Ops of one name in one step, all layers together; seconds are medians over the rounds."""

    name: str
    count: int
    seconds: float
    waiting: float  # of `seconds`: a thread's mean wait for the others
    roof: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step shape: its ops, and the whole step as an engine would run it."""

    rows: int
    context: int
    lines: tuple[Line, ...]
    step_seconds: float

    @property
    def sum_seconds(self) -> float:
        return sum(line.seconds for line in self.lines)

    @property
    def waiting_seconds(self) -> float:
        return sum(line.waiting for line in self.lines)

    @property
    def roof_seconds(self) -> float:
        return sum(line.roof for line in self.lines)

    def to_dict(self) -> dict[str, object]:
        return {
            "rows": self.rows,
            "context": self.context,
            "step_ms": _ms(self.step_seconds),
            "sum_ms": _ms(self.sum_seconds),
            "waiting_ms": _ms(self.waiting_seconds),
            "roof_ms": _ms(self.roof_seconds),
            "ops": [
                {"name": line.name, "count": line.count, "ms": _ms(line.seconds),
                 "waiting_ms": _ms(line.waiting), "roof_ms": _ms(line.roof)}
                for line in self.lines
            ],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpsResult:
    """One run of `bench ops`."""

    model: str
    threads: int
    commit: str | None
    rates: Rates
    steps: tuple[StepTimes, ...]

    def to_dict(self) -> dict[str, object]:
        """The JSON shape of `--json`."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "threads": self.threads,
            "commit": self.commit,
            "rates": {name: round(getattr(self.rates, name)) for name in self.rates.__slots__},
            "steps": [step.to_dict() for step in self.steps],
        }


def run(
    model: str | Path,
    json_path: Path | None = None,
    rows: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    threads: int | None = None,
    head_bits: int | None = None,
) -> OpsResult:
    """Measure, print, write `json_path` if given. ConfigError for rows or contexts that do not fit."""
    check_json_folder(json_path)
    threads = usable_cores() if threads is None else threads
    select(threads)  # for its errors: too many threads, or no compiled kernels
    from quickdraft.bench.op_work import DescribingOps

    ops = DescribingOps(threads)
    runner, chosen_rows, chosen = open_steps(model, ops, rows, contexts, head_bits=head_bits)
    machine = rates(read_bandwidth(threads), measure_peaks(threads))
    steps = []
    for context in chosen:
        say(f"reading up to {context} tokens")
        runner.read(context)
        steps += [step_times(runner, ops.works, count, machine) for count in chosen_rows]
    result = OpsResult(runner.name, threads, commit(), machine, tuple(steps))
    print_result(result, Console())
    if json_path is not None:
        write_json(json_path, result.to_dict())
    return result


def step_times(
    runner: StepRunner, works: Sequence[OpWork], rows: int, machine: Rates, rounds: int = ROUNDS
) -> StepTimes:
    """One step shape measured now, after the runner's context."""
    for _ in range(WARM_UP):
        runner.step(rows)
    whole: list[float] = []
    timed: list[list[OpTime]] = []
    for _ in range(rounds):
        whole.append(runner.step(rows))
        timed.append(runner.timed_ops(rows))
    return StepTimes(rows, runner.context, _lines(works, timed, rows, runner.context, machine),
                     statistics.median(whole))  # fmt: skip


def _lines(
    works: Sequence[OpWork], timed: Sequence[Sequence[OpTime]], rows: int, context: int, machine: Rates
) -> tuple[Line, ...]:
    """Sums over the ops of a name within each round, then medians; names in the order they first run."""
    lines = []
    for name in dict.fromkeys(work.name for work in works):
        places = [index for index, work in enumerate(works) if work.name == name]
        seconds = statistics.median(sum(times[i][0] for i in places) for times in timed)
        waiting = statistics.median(sum(times[i][1] for i in places) for times in timed)
        roof = sum(works[i].roof_seconds(rows, context, machine) for i in places)
        lines.append(Line(name, len(places), seconds, waiting, roof))
    return tuple(lines)


def print_result(result: OpsResult, console: Console) -> None:
    """A table per step shape: ms, share, roof, and the sum beside the whole step."""
    for step in result.steps:
        rows = f"{step.rows} row{'s' * (step.rows > 1)}"
        table = Table(
            title=f"{result.model}, {result.threads} threads: {rows} after {step.context} tokens",
            title_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        table.add_column("op", overflow="fold", min_width=24)
        for column in ("times", "ms", "of sum", "waiting", "roof ms", "x roof"):
            table.add_column(column, justify="right", no_wrap=True)
        for line in step.lines:
            table.add_row(
                line.name, str(line.count), f"{_ms(line.seconds):.3f}",
                f"{100 * line.seconds / step.sum_seconds:.0f} %", f"{_ms(line.waiting):.3f}",
                *((f"{_ms(line.roof):.3f}", f"{line.seconds / line.roof:.2f}") if line.roof else ("", "")),
            )  # fmt: skip
        console.print(table)
        total, waiting, roof = _ms(step.sum_seconds), _ms(step.waiting_seconds), _ms(step.roof_seconds)
        summary = (
            f"sum {total:.3f} ms, {waiting:.3f} of them waiting; roofs {roof:.3f} ms; "
            f"whole step {_ms(step.step_seconds):.3f} ms, "
            f"{step.step_seconds / step.sum_seconds:.2f} x the sum"
        )
        console.print(summary, highlight=False, soft_wrap=True)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 5)
