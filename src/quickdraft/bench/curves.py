"""Curve: what steps and drafter passes take on some machine, in seconds, and where the simulator has it from.

A curve is StepTimes and, in words, what they rest on. The policy sees it as the engine does, as
MeasuredCosts; time is counted with the same numbers. Knows no trace, no policy and no clock.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Final

from quickdraft.bench import rtx3090
from quickdraft.bench.verify_cost import SCHEMA as VERIFY_COST
from quickdraft.engine.measured_costs import SCHEMA as COSTS
from quickdraft.engine.measured_costs import blocks_of
from quickdraft.errors import ConfigError
from quickdraft.speculate.cost_curve import MeasuredCosts, StepTimes, rising
from quickdraft.speculate.costs import CHAINED_SOURCES
from quickdraft.types import MAX_ROWS

_FAR: Final = 1 << 20
ROOF_CONTEXTS: Final = (0, 131_072)
RTX3090: Final = "rtx3090"
ROOF: Final = "rtx3090-roofline"
PROJECTED: Final = "rtx3090-projected"
PROJECTED_FILE: Final = "curve-rtx3090-projected.json"
SHIPPED: Final = "cpu"
MEASURED: Final = "measured"
SHIPPED_FILE: Final = "curve-cpu.json"
SHIPPED_NOTES: Final = (
    "timed by `bench verify-cost` on 2 cores of a Zen 3 server, SmolLM2-135M-Instruct in Q4_1, up to 64 rows",
    "passes of its drafters, and following, by their part of a plain step when a server was started there",
    "passes of 3 and 5 tokens by their part of one of 7, medians of two more starts",
)


@dataclass(frozen=True)
class Curve:
    """The times of a machine; `notes` are printed beside what is counted with them. A step of r rows of one
    sequence takes base[r] + slope[r] * context seconds."""

    name: str
    times: StepTimes
    notes: tuple[str, ...] = ()
    costs: MeasuredCosts = field(init=False, repr=False, compare=False)
    base: tuple[float, ...] = field(init=False, repr=False, compare=False)
    slope: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        costs, counts = MeasuredCosts(self.times), range(1, MAX_ROWS + 1)
        near, far = (
            [self._plain(context) * costs.step_cost(rows, context) for rows in counts]
            for context in (0, _FAR)
        )
        slopes = ((b - a) / _FAR for a, b in zip(near, far, strict=True))
        for name, value in (("costs", costs), ("base", (0.0, *near)), ("slope", (0.0, *slopes))):
            object.__setattr__(self, name, value)

    def _plain(self, context: int) -> float:
        """A step of one row; as MeasuredCosts, where more rows that took less time count as one row too."""
        contexts, lines = self.times.contexts, self.times.seconds
        near, far = rising(lines[0])[0], rising(lines[-1])[0]
        return near + max(0.0, far - near) / max(1, contexts[-1] - contexts[0]) * (context - contexts[0])

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What a number that was counted with this curve rests on."""
        most = max(self.times.rows)
        beyond = f"beyond {most} rows the line through the last two row counts goes on"
        return self.notes if most == MAX_ROWS else (*self.notes, beyond)

    def row_seconds(self, rows: int, context: int) -> float:
        """A step of 1..MAX_ROWS rows of one sequence."""
        return self.base[rows] + self.slope[rows] * context

    def step_seconds(self, rows: Sequence[int], contexts: Sequence[int]) -> float:
        """A step of several sequences: all rows near context 0 (beyond MAX_ROWS of them on along the last
        line), and for each sequence what its own context adds to its rows."""
        total, most = sum(rows), self.base[MAX_ROWS]
        over = max(0, total - MAX_ROWS) * (most - self.base[MAX_ROWS - 1])
        added = (self.slope[count] * context for count, context in zip(rows, contexts, strict=True))
        return self.base[min(total, MAX_ROWS)] + over + sum(added)

    def draft_seconds(self, source: str, count: int) -> float:
        """Drafting `count` tokens from a source; 0 for one that runs no model."""
        passes = 0 if count == 0 else count if source in CHAINED_SOURCES else 1
        return self.times.pass_seconds(source, count) * passes

    def upkeep_seconds(self, source: str) -> float:
        """Following one token with a model; 0 where that is not known."""
        return self.times.upkeep.get(source, 0.0)

    def at(self, context: int) -> Curve:
        """The same machine with every step after `context` tokens, whatever a trace's own length is; for
        steps of one sequence."""
        rows = tuple(range(1, MAX_ROWS + 1))
        line = tuple(self.row_seconds(count, context) for count in rows)
        times = replace(self.times, rows=rows, contexts=(context,), seconds=(line,))
        return Curve(self.name, times, self.notes)

    def require(self, models: Iterable[str]) -> None:
        """ConfigError for a model that drafts whose passes this curve has no time of."""
        for source in models:
            if source not in self.times.passes:
                raise ConfigError(
                    f"the curve {self.name} has no time for a pass of {source}, which the traces have",
                    got=f"times for {', '.join(self.times.passes) or 'no drafter'}",
                    hint="record traces with --drafter none, or give a curve with `passes`",
                )


def open_curve(name: str, measure: Callable[[], Curve]) -> Curve:
    """A curve by its name, or that of a file; `measure` is asked for the one of this machine."""
    if name == MEASURED:
        return measure()
    if name == RTX3090:
        return Curve(name, rtx3090.measured_times(), rtx3090.NOTES)
    if name == ROOF:
        return Curve(name, rtx3090.roofline_times(ROOF_CONTEXTS), rtx3090.ROOF_NOTES)
    if name == SHIPPED:
        return Curve(name, parse_times(_shipped(SHIPPED_FILE), SHIPPED_FILE), SHIPPED_NOTES)
    if name == PROJECTED:
        text = _shipped(PROJECTED_FILE)
        return Curve(name, parse_times(text, PROJECTED_FILE), tuple(json.loads(text)["notes"]))
    return read_curve(Path(name))


def _shipped(name: str) -> str:
    return resources.files("quickdraft.bench").joinpath("data", name).read_text("ascii")


def at_context(curve: Curve, context: int) -> Curve:
    """`curve.at`; the roofline, which is not a line over the context, is worked out there."""
    if curve.name != ROOF:
        return curve.at(context)
    return Curve(ROOF, rtx3090.roofline_times((context,)), rtx3090.ROOF_NOTES)


def read_curve(path: Path) -> Curve:
    """A file of `bench verify-cost --json`, or one that the engine remembers its costs in; ConfigError for
    any other."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = f"{SHIPPED}, {RTX3090}, {ROOF}, {PROJECTED}, {MEASURED}"
        raise ConfigError(f"no curve '{path}'", got=str(error), expected=f"{names} or a file") from error
    return Curve(path.name, parse_times(text, str(path)), (f"times of {path.name}",))


def parse_times(text: str, where: str) -> StepTimes:
    """The times in the text of such a file."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON", got=str(error)) from error
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema not in (COSTS, VERIFY_COST):
        raise ConfigError(
            f"{where}: not a cost curve", got=f"schema {schema!r}", expected=f"{COSTS} or {VERIFY_COST}"
        )
    rows, contexts = _ascending(value, "rows", 1, where), _ascending(value, "contexts", 0, where)
    if rows[0] != 1 or len(rows) < 2 or rows[-1] > MAX_ROWS:
        raise ConfigError(f"{where}: bad 'rows'", got=rows, expected=f"1 and others up to {MAX_ROWS}")
    name, unit = ("seconds", 1.0) if schema == COSTS else ("step_ms", 0.001)
    lines = value.get(name)
    good = isinstance(lines, list) and [_width(line) for line in lines] == [len(rows)] * len(contexts)
    if not good:
        raise ConfigError(f"{where}: bad '{name}'", expected="positive numbers for all rows")
    passes, upkeep = _by_source(value, "passes", where), _by_source(value, "upkeep", where)
    seconds = tuple(tuple(one * unit for one in line) for line in lines)
    return StepTimes(rows, contexts, seconds, passes, upkeep, _blocks(value, where))


def _blocks(value: dict[str, Any], where: str) -> dict[str, dict[int, float]]:
    try:
        found = blocks_of(value.get("blocks", {}))
        if all(of and min(of) > 0 and _width(list(of.values())) == len(of) for of in found.values()):
            return found
    except (ValueError, TypeError):
        pass
    raise ConfigError(f"{where}: bad 'blocks'", expected="by source, a positive number for each block length")


def _by_source(value: dict[str, Any], name: str, where: str) -> dict[str, float]:
    found = value.get(name, {})
    if not isinstance(found, dict) or _width(list(found.values())) != len(found):
        raise ConfigError(f"{where}: bad '{name}'", expected="a positive number for each source")
    return found


def _ascending(value: dict[str, Any], name: str, least: int, where: str) -> tuple[int, ...]:
    numbers = value.get(name)
    whole = isinstance(numbers, list) and all(type(one) is int and one >= least for one in numbers)
    if not whole or not numbers or sorted(set(numbers)) != numbers:
        raise ConfigError(f"{where}: bad '{name}'", got=repr(numbers)[:60], expected="ascending numbers")
    return tuple(numbers)


def _width(line: Any) -> int:
    """How many numbers the list holds; -1 for what is not a list of positive numbers."""
    good = isinstance(line, list) and all(
        type(one) in (int, float) and math.isfinite(one) and one > 0 for one in line
    )
    return len(line) if good else -1
