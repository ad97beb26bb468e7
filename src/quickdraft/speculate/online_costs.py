"""Online costs: a measured curve, corrected by the times of the steps that are run anyway.

Every step is compared with what the curve says. A slow exponential factor per region of (rows, context)
takes up what a region keeps doing differently; a faster one for all regions takes up what the whole machine
does, such as a neighbour's burst, which is no reason to draft differently. Each step moves both by a bounded
amount, so an outlier counts no more than a small difference. More rows never get cheaper than fewer. Pure:
who runs steps brings the times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from quickdraft.speculate.cost_curve import MeasuredCosts, StepTimes, rising
from quickdraft.speculate.costs import BatchCosts
from quickdraft.types import MAX_ROWS

BEYOND: Final = (32, 64)  # rows at which a curve that was measured up to fewer can be corrected too
MOST_AT_ONCE: Final = 0.3  # of a logarithm: what one step may differ at most, as far as it counts
MACHINE_RATE, REGION_RATE, PASS_RATE = 0.05, 0.01, 0.02
LARGEST: Final = 1.5  # logarithm of the largest factor of a region
CHANGED: Final = 0.02  # a factor that moved by so much is used
DOUBTFUL: Final = 0.25  # and one that is wrong by so much, seen in fewer steps, of being measured again
DOUBTFUL_STEPS: Final = 40
WORTH_KEEPING: Final = 0.1  # a curve that is wrong by so much of a logarithm is worth correcting on disk
ENOUGH_STEPS: Final = 200  # of a region, before its factor counts as known


class OnlineCosts:
    """Costs that follow the machine. `frozen` ones never change."""

    def __init__(self, measured: MeasuredCosts, *, frozen: bool = False) -> None:
        self.measured, self.frozen = measured.times, frozen
        self._curve = measured
        self._base = measured if frozen else _longer(measured)
        self._near = [_nearest(self._base.times.rows, rows) for rows in range(1, MAX_ROWS + 1)]
        self._machine = 0.0
        self._regions: dict[tuple[int, int], float] = {}
        self._steps: dict[tuple[int, int], int] = {}
        self._passes: dict[str, float] = {}
        self._used: dict[tuple[int, int], float] = {}
        self._used_passes: dict[str, float] = {}

    @property
    def times(self) -> StepTimes:
        """The curve in use, in seconds of the machine as it was measured."""
        return self._curve.times

    def step_costs(self, context: int) -> Sequence[float]:
        """See Costs."""
        return self._curve.step_costs(context)

    def step_cost(self, rows: int, context: int) -> float:
        """Of so many rows after exactly so many tokens."""
        return self._curve.step_cost(rows, context)

    def batch_costs(self) -> BatchCosts:
        """See Costs."""
        return self._curve.batch_costs()

    def draft_cost(self, source: str) -> float:
        """See Costs."""
        return self._curve.draft_cost(source)

    def block_costs(self, source: str) -> Sequence[tuple[int, float]]:
        """See Costs."""
        return self._curve.block_costs(source)

    def upkeep_cost(self, source: str) -> float:
        """See Costs."""
        return self._curve.upkeep_cost(source)

    def observe_step(self, rows: int, context: int, seconds: float) -> None:
        """A step of one sequence took so long."""
        if self.frozen or not seconds > 0.0 or not 1 <= rows <= MAX_ROWS:
            return
        region = self._region(rows, context)
        known = self._regions.get(region, 0.0)
        expected = self._base.seconds(rows, context)
        error = _bounded(math.log(seconds / expected) - self._machine - known)
        self._machine += MACHINE_RATE * error
        factor = max(-LARGEST, min(LARGEST, known + REGION_RATE * error))
        self._regions[region] = factor
        self._steps[region] = self._steps.get(region, 0) + 1
        if abs(factor - self._used.get(region, 0.0)) > CHANGED:
            self._renew()

    def observe_pass(self, source: str, seconds: float, count: int) -> None:
        """A pass of a model that was asked for `count` tokens took so long; blocks of all lengths are
        corrected alike."""
        expected = self._base.times.pass_seconds(source, count)
        if self.frozen or not seconds > 0.0 or not expected:
            return
        known = self._passes.get(source, 0.0)
        error = _bounded(math.log(seconds / expected) - self._machine - known)
        self._passes[source] = max(-LARGEST, min(LARGEST, known + PASS_RATE * error))
        if abs(self._passes[source] - self._used_passes.get(source, 0.0)) > CHANGED:
            self._renew()

    @property
    def corrected(self) -> StepTimes | None:
        """The curve to remember instead of the one that was measured: None while no region that was seen for
        long differs much, beside what all have in common."""
        if self._disagreement(ENOUGH_STEPS) < WORTH_KEEPING:
            return None
        self._renew()
        return self._curve.times

    @property
    def doubtful(self) -> bool:
        """Whether the steps so far contradict the curve, though they are too few to correct it for good."""
        return self._disagreement(DOUBTFUL_STEPS) >= DOUBTFUL

    def _disagreement(self, steps: int) -> float:
        """By how much of a logarithm regions that were seen so often differ."""
        seen = [factor for region, factor in self._regions.items() if self._steps[region] >= steps]
        return max(seen) - min(seen) if len(seen) >= 2 else 0.0

    def _renew(self) -> None:
        """A curve of the factors as they are now. Regions nobody saw take those of their neighbours."""
        self._used, self._used_passes = dict(self._regions), dict(self._passes)
        times = self._base.times
        factors = [
            [math.exp(self._factor(row, far)) for row in range(len(times.rows))]
            for far in range(len(times.contexts))
        ]
        factor = {source: math.exp(self._passes.get(source, 0.0)) for source in times.passes}
        passes = {source: seconds * factor[source] for source, seconds in times.passes.items()}
        blocks = {
            source: {most: seconds * factor[source] for most, seconds in of.items()}
            for source, of in times.blocks.items()
        }
        lines = tuple(
            tuple(rising([seconds * factor for seconds, factor in zip(line, by_row, strict=True)]))
            for line, by_row in zip(times.seconds, factors, strict=True)
        )
        self._curve = MeasuredCosts(replace(times, seconds=lines, passes=passes, blocks=blocks))

    def _region(self, rows: int, context: int) -> tuple[int, int]:
        """The point of the curve that is nearest, as (index of rows, index of context)."""
        contexts = self._base.times.contexts
        near = self._near[rows - 1]
        far = min(range(len(contexts)), key=lambda index: abs(contexts[index] - context))
        return near, far

    def _factor(self, row: int, far: int) -> float:
        """The factor of a point; of one nobody saw that of the nearest that was, in context, then in rows."""
        if (row, far) in self._regions:
            return self._regions[row, far]
        seen = [(2 * abs(a - row) + abs(b - far), a, b) for a, b in self._regions]
        return self._regions[min(seen)[1:]] if seen else 0.0


def _longer(costs: MeasuredCosts) -> MeasuredCosts:
    """The same curve with points beyond the last one measured, on its line."""
    times = costs.times
    more = [rows for rows in BEYOND if rows > times.rows[-1]]
    seconds = tuple(
        (*line, *(costs.seconds(rows, context) for rows in more))
        for context, line in zip(times.contexts, times.seconds, strict=True)
    )
    return MeasuredCosts(replace(times, rows=(*times.rows, *more), seconds=seconds))


def _nearest(known: Sequence[int], rows: int) -> int:
    """The index of the row count that is nearest, as a ratio."""
    return min(range(len(known)), key=lambda index: abs(math.log(known[index] / rows)))


def _bounded(error: float) -> float:
    return max(-MOST_AT_ONCE, min(MOST_AT_ONCE, error))
