"""`bench card`: what one NVIDIA card does with these kernels and a random model of the shape of Qwen3.8-27B.

One run of at most eight minutes for whoever has a card: facts, parity with the reference, bits of rows, the
promises on a small model, rates of kernels, step times beside the simulator's, captures, memory and prefixes.
Nothing is timed on kernels that are wrong. The JSON is described in docs/reference/bench-card.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from quickdraft.bench.card_cases import Sizes
from quickdraft.bench.card_kernels import REPEATS, Rate, rates
from quickdraft.bench.card_model import Prefix, StepTime, opened_random, prefix, step_times
from quickdraft.bench.card_parity import FEW, MANY, REAL, REFERENCE_ROWS, Parity, parities, rows_alike
from quickdraft.bench.curves import PROJECTED, ROOF, RTX3090, open_curve
from quickdraft.bench.machine import commit
from quickdraft.bench.report import check_json_folder, say, write_json
from quickdraft.errors import ConfigError, UnsupportedError
from quickdraft.models.describe_hybrid import HybridSizes
from quickdraft.models.known import QWEN_27B
from quickdraft.ops.select import select

SCHEMA: Final = "quickdraft-card-1"
ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS: Final = (2048, 25_000, 64_000)
KERNEL_ROWS: Final = (1, 16, 64)
PREFIX_TOKENS: Final = 2048
STEPS: Final = 5
BUDGET_SECONDS: Final = 480.0
# Of the time: when each part ends, or begins nothing more. Most of a first run is the compiler's.
COMPARED, PROMISED, RATED, STEPPED, LAST = 0.45, 0.55, 0.65, 0.8, 0.9
AGAIN: Final = "no time; run it again, as kernels that were compiled are kept"
CURVES: Final = (RTX3090, PROJECTED, ROOF)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure; tests take less."""

    sizes: HybridSizes = QWEN_27B
    rows: tuple[int, ...] = ROWS
    contexts: tuple[int, ...] = CONTEXTS
    kernel_rows: tuple[int, ...] = KERNEL_ROWS
    parity_rows: tuple[int, ...] = REFERENCE_ROWS
    few_rows: tuple[int, ...] = FEW
    many_rows: int = MANY
    alike: Sizes = REAL
    prefix_tokens: int = PREFIX_TOKENS
    repeats: int = REPEATS  # of a kernel
    steps: int = STEPS  # of a shape
    seconds: float = BUDGET_SECONDS


class Promise(Protocol):
    """The outcome of one check of a promise (doctor/check.py)."""

    @property
    def ok(self) -> bool: ...
    def lines(self) -> list[str]: ...
    def to_dict(self) -> dict[str, object]: ...


@dataclass
class CardResult:
    """One run; what takes time is missing where something is wrong."""

    facts: dict[str, Any]
    commit: str | None
    parity: list[Parity] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    weight_bytes: int = 0
    steps: list[StepTime] = field(default_factory=list)
    predicted: list[dict[str, float]] = field(default_factory=list)  # of each step, seconds by curve
    prefix: Prefix | None = None
    captured_shapes: int = 0
    peak_bytes: dict[str, int | None] = field(default_factory=dict)  # by phase
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(one.ok for one in self.parity) and all(one.ok for one in self.promises)

    def to_dict(self) -> dict[str, object]:
        """The JSON shape of `--json`."""
        return {
            "schema": SCHEMA, "commit": self.commit, "ok": self.ok, "facts": self.facts,
            "parity": [one.to_dict() for one in self.parity],
            "promises": [one.to_dict() for one in self.promises],
            "rates": [one.to_dict() for one in self.rates],
            "weight_bytes": self.weight_bytes,
            "steps": [
                asdict(step) | {"predicted_seconds": predicted}
                for step, predicted in zip(self.steps, self.predicted, strict=True)
            ],
            "prefix": asdict(self.prefix) if self.prefix is not None else None,
            "captured_shapes": self.captured_shapes, "peak_bytes": self.peak_bytes,
            "skipped": self.skipped, "seconds": self.seconds,
        }  # fmt: skip


def run(
    json_path: Path | None = None,
    plan: Plan = Plan(),
    promises: Callable[[], Iterable[Promise]] = tuple,
) -> CardResult:
    """Measure, print, write `json_path` if given; `promises` are checked before anything is timed.
    UnsupportedError without a card or the extra; ConfigError for contexts or rows that are none."""
    check_json_folder(json_path)
    if not plan.rows or not plan.contexts or min(plan.rows) < 1 or max(plan.rows) > 64:
        raise ConfigError("bad rows or contexts", got=f"{plan.rows}, {plan.contexts}", expected="rows 1..64")
    started = time.monotonic()
    plain = select(backend="cuda")
    from quickdraft.ops.cuda.measure import facts, peak_bytes

    result = CardResult(facts(_cuda(plain)), commit())
    say(plain.explain())
    say("comparing kernels with the reference")
    clock = Clock(started, plan.seconds)
    compared = _until(clock, COMPARED, parities(plain, plan.parity_rows), result.parity)
    say("comparing rows among few with rows among many")
    alike = rows_alike(plain, plan.few_rows, plan.many_rows, plan.alike)
    compared &= _until(clock, COMPARED, alike, result.parity)
    if result.ok and compared:
        say("checking the promises on a small random model")
        compared = _until(clock, PROMISED, promises(), result.promises)
    if not compared:
        result.skipped.append(f"comparisons, and so all that takes time: {AGAIN}")
    elif result.ok:
        say("timing kernels")
        made = rates(plain, plan.sizes, plan.kernel_rows, plan.contexts[:2], plan.repeats)
        if not _until(clock, RATED, made, result.rates):
            result.skipped.append(f"rates of kernels: {AGAIN}")
        result.peak_bytes["kernels"] = peak_bytes(_cuda(plain))
        _measure_model(result, plan, clock)
    result.seconds = time.monotonic() - started
    _print(result, Console())
    if json_path is not None:
        write_json(json_path, result.to_dict())
    return result


@dataclass(frozen=True, slots=True)
class Clock:
    """Of a run that began at `started` (time.monotonic) and may take so many seconds."""

    started: float
    seconds: float

    def over(self, part: float) -> bool:
        """Whether that part of the time is over."""
        return time.monotonic() > self.started + part * self.seconds


def _until(clock: Clock, part: float, made: Iterable[Any], found: list[Any]) -> bool:
    """Put what is made one by one into `found`; False where the part was over, and perhaps not all made."""
    for one in made:
        found.append(one)
        if clock.over(part):
            return False
    return True


def _cuda(ops: Any) -> Any:
    """The value as the card's, for mypy: select gives Ops."""
    return ops


def _measure_model(result: CardResult, plan: Plan, clock: Clock) -> None:
    from quickdraft.ops.cuda.measure import DrawnOps, peak_bytes

    ops: Any = DrawnOps(plan.sizes.vocabulary)
    say("drawing a random model on the card")
    longest = max(plan.contexts) + max(plan.rows)
    context = max(longest, plan.prefix_tokens + 1) + 1
    with opened_random(plan.sizes, ops, context) as opened:
        result.weight_bytes = opened.weight_bytes
        result.peak_bytes["weights"] = peak_bytes(ops)
        say(f"steps of {', '.join(map(str, plan.rows))} rows")
        for step in step_times(opened, plan.rows, plan.contexts, plan.steps, lambda: clock.over(STEPPED)):
            result.steps.append(step)
            result.predicted.append(predictions(step.rows, step.context))
        result.peak_bytes["steps"] = peak_bytes(ops)
        missing = len(plan.rows) * len(plan.contexts) - len(result.steps)
        if missing:
            result.skipped.append(f"{missing} step shapes: no room in the states' history, or no time")
        if clock.over(LAST):
            result.skipped.append(f"prefixes: {AGAIN}")
        else:
            say(f"a prompt of {plan.prefix_tokens} tokens, cold and warm")
            result.prefix = prefix(opened, plan.prefix_tokens)
            result.peak_bytes["prefix"] = peak_bytes(ops)
        program: Any = opened.runner.program
        result.captured_shapes = program.captured


def predictions(rows: int, context: int) -> dict[str, float]:
    """Seconds of such a step on an RTX 3090 by each curve of the simulator."""

    def none_here() -> Any:
        raise UnsupportedError("a curve of this machine is not asked for here")

    return {name: open_curve(name, none_here).row_seconds(rows, context) for name in CURVES}


def _print(result: CardResult, console: Console) -> None:
    for line in _lines(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if result.rates:
        headings = ("kernel", "rows", "context", "us", "GB/s", "TFLOP/s")
        rows = [
            (r.kernel, str(r.rows), str(r.context), f"{1e6 * r.seconds:.1f}",
             f"{r.bytes / r.seconds / 1e9:.1f}", f"{r.flops / r.seconds / 1e12:.2f}")
            for r in result.rates
        ]  # fmt: skip
        console.print(_table("kernels; bytes are the least they must move", headings, rows))
    if result.steps:
        columns = ("rows", "context", "ms", "first", "second", *(f"{name} ms" for name in CURVES))
        lines = [
            (str(step.rows), str(step.context),
             *(f"{1000 * each:.2f}" for each in (step.seconds, step.first, step.second)),
             *(f"{1000 * predicted[name]:.2f}" for name in CURVES))
            for step, predicted in zip(result.steps, result.predicted, strict=True)
        ]  # fmt: skip
        console.print(_table("steps, and what the simulator says of an RTX 3090", columns, lines))


def _lines(result: CardResult) -> list[str]:
    known = result.facts
    lines = [
        f"{known['card'] or 'no card: the interpreter'}, driver {known['driver']}, torch {known['torch']}, "
        f"triton {known['triton']}",
        *(
            f"{'ok  ' if one.ok else 'FAIL'} {one.kernel}: differs by {one.difference:.1e} of the largest "
            f"value, at most {one.tolerance:.0e}"
            for one in result.parity
        ),
        *(line for one in result.promises for line in one.lines()),
        *(f"{phase}: at most {peak / 2**30:.2f} GiB" for phase, peak in result.peak_bytes.items() if peak),
        *(f"skipped {line}" for line in result.skipped),
    ]
    if result.prefix is not None:
        one = result.prefix
        lines.append(
            f"first token of {one.tokens} tokens: {one.cold_seconds:.3f} s, with {one.cached_tokens} cached "
            f"{one.warm_seconds:.3f} s; {result.captured_shapes} shapes captured"
        )
    return lines


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table
