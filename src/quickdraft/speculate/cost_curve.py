"""The measured cost curve: Costs from the times of steps that somebody else took (engine/measured_costs.py).

Pure arithmetic. It is evaluated for every draft, so everything is worked out beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from quickdraft.speculate.costs import ROW_COST, BatchCosts, ConstantCosts, Costs
from quickdraft.types import MAX_ROWS

_ENOUGH_ROWS: Final = 16
_ROUND: Final = 64  # tokens of context
_MOST_KNOWN: Final = 256


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured seconds: seconds[c][r] of a step after contexts[c] tokens with rows[r] rows; `passes` of one
    pass of each model that drafts, of its longest block; `blocks` of one pass of every block it can draft, by
    the block's tokens. Contexts and rows ascend, and rows begin with 1 and are at least two."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    passes: Mapping[str, float]
    upkeep: Mapping[str, float] = field(default_factory=dict)
    blocks: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def pass_seconds(self, source: str, count: int) -> float:
        """Of a pass that drafts `count` tokens, by the shortest block that has so many; 0 where none runs."""
        blocks = self.blocks.get(source, {})
        longest = self.passes.get(source, 0.0)
        return next((blocks[most] for most in sorted(blocks) if most >= count), longest)


class MeasuredCosts:
    """Costs by linear interpolation of measured times, between row counts and between contexts.

    Attention grows linearly with the context and nothing else grows, so a step of so many rows is a straight
    line over the context, also beyond the last one measured. Beyond the most rows the last line goes on, and
    where few were measured it rises by no less than ROW_COST: rows are nearly free only up to a point.
    Times of more rows that come out shorter are averaged with those of fewer (isotonic regression).
    """

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        first, last = times.contexts[0], times.contexts[-1]
        near = rising(times.seconds[0])
        far = rising(times.seconds[-1])
        span = max(1, last - first)
        slopes = rising([max(0.0, (b - a) / span) for a, b in zip(near, far, strict=True)])
        bases = [seconds - first * slope for seconds, slope in zip(near, slopes, strict=True)]
        least = ROW_COST * near[0] if times.rows[-1] < _ENOUGH_ROWS else 0.0
        self._base = _every_row(times.rows, bases, least)
        self._slope = _every_row(times.rows, slopes)
        self._batch = BatchCosts(self._base, self._slope)
        self._known: dict[int, list[float]] = {}
        self._passes = {source: seconds / near[0] for source, seconds in times.passes.items()}
        self._upkeep = {source: seconds / near[0] for source, seconds in times.upkeep.items()}
        self._blocks = {
            source: tuple(zip(sorted(of), rising([of[most] / near[0] for most in sorted(of)]), strict=True))
            for source, of in times.blocks.items()
        }

    def step_costs(self, context: int) -> Sequence[float]:
        """See Costs; worked out for a round number of tokens, as rarely as that changes."""
        known = self._known.get(context // _ROUND)
        if known is None:
            middle = context // _ROUND * _ROUND
            base, slope = self._base, self._slope
            plain = base[1] + slope[1] * middle
            known = [(shared + own * middle) / plain for shared, own in zip(base, slope, strict=True)]
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[context // _ROUND] = known
        return known

    def step_cost(self, rows: int, context: int) -> float:
        """Of so many rows after exactly so many tokens."""
        base, slope = self._base, self._slope
        return (base[rows] + slope[rows] * context) / (base[1] + slope[1] * context)

    def seconds(self, rows: int, context: int) -> float:
        """Of a step of one sequence."""
        return self._base[rows] + self._slope[rows] * context

    def batch_costs(self) -> BatchCosts:
        """See Costs, in seconds: attention is each sequence's own, everything else depends on all rows."""
        return self._batch

    def draft_cost(self, source: str) -> float:
        """See Costs."""
        return self._passes.get(source, 0.0)

    def block_costs(self, source: str) -> Sequence[tuple[int, float]]:
        """See Costs."""
        return self._blocks.get(source, ())

    def upkeep_cost(self, source: str) -> float:
        """See Costs."""
        return self._upkeep.get(source, 0.0)


class CurveCosts(Costs, Protocol):
    """Costs that rest on a curve."""

    @property
    def times(self) -> StepTimes: ...
    def step_cost(self, rows: int, context: int) -> float: ...


KnownCosts = ConstantCosts | CurveCosts


def explain_costs(costs: KnownCosts) -> str:
    """The curve in one line, for the start of a server."""
    if isinstance(costs, ConstantCosts):
        return f"cost of a verified row: {costs.row_cost:g} plain steps, assumed and not measured"
    times = costs.times
    counts = [rows for rows in times.rows if rows > 1]
    lines = [
        f"after {context} tokens "
        + ", ".join(f"{rows} rows {costs.step_cost(rows, context):.2f}" for rows in counts)
        for context in times.contexts
    ]
    passes = [f"a pass of {source} {_passes(costs, source)}" for source in times.passes]
    passes += [f"a token followed by {source} {costs.upkeep_cost(source):.3f}" for source in times.upkeep]
    return "cost of a step, in steps of one row: " + "; ".join([*lines, *passes])


def _passes(costs: CurveCosts, source: str) -> str:
    blocks = costs.block_costs(source)
    if len(blocks) < 2:
        return f"{costs.draft_cost(source):.2f}"
    return " ".join(f"{one:.2f} for {most}" for most, one in blocks) + " tokens"


def rising(values: Sequence[float]) -> list[float]:
    """The nearest values, by least squares, that never fall (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # mean, how many
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, more = pools.pop()
            mean, count = (mean * count + before * more) / (count + more), count + more
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _every_row(rows: Sequence[int], values: Sequence[float], least: float = 0.0) -> list[float]:
    """Values at 0 (unused) to MAX_ROWS rows; beyond the last, on along the line from the one before, which
    rises by at least `least` a row there."""
    found, rise = [values[0]] * 2, 0.0
    for index in range(1, len(rows)):
        low, high = rows[index - 1], rows[index]
        rise = (values[index] - values[index - 1]) / (high - low)
        found += [values[index - 1] + rise * (count - low) for count in range(low + 1, high + 1)]
    rise = max(rise, least)
    return found + [found[-1] + rise * count for count in range(1, MAX_ROWS - rows[-1] + 1)]
