"""Step timing: a cost curve from steps that are run in turns, steady although others use the machine.

Every round runs each row count once, and what counts is a step's time over that of the round's own steps of
one row, which stand between the others: a neighbour who slows the machine down for a while changes no cost.
Medians over the rounds are the curve, and how far the rounds lie from them says whether it can be believed.
Knows no model: who calls brings steps, passes and the clock. Time is bounded, not repeats, so a large model
is not held up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from quickdraft.speculate.cost_curve import StepTimes
from quickdraft.speculate.costs import ConstantCosts

LEAST_ROWS: Final = 4  # a curve needs steps of at least so many
ROUNDS: Final = 25
STEADY: Final = 0.1  # deviation of the rounds, over the median, up to which a curve is believed
QUICK: Final = 0.15  # of the budget, for a round
FEW_ROUNDS: Final = 3  # that cannot tell how steady they are
_EXPECTED: Final = ConstantCosts()

Step = Callable[[int, int], float]  # (context, rows) -> seconds
Timer = Callable[[], float]  # seconds


@dataclass(frozen=True, slots=True)
class Timed:
    """A curve, and its spread: half of the range that the middle half of the rounds lie in, as a part of
    the point, the largest of all points; 0 where there were too few rounds to tell."""

    times: StepTimes
    spread: float

    @property
    def steady(self) -> bool:
        """Whether it need not be timed again."""
        return self.spread <= STEADY


@dataclass(slots=True)
class Rounds:
    """What was timed so far. Of steps of more than one row, passes and upkeep the ratios to the round's step
    of one row at the same context (near context 0 for the latter two) are kept."""

    step: Step
    passes: Mapping[str, Mapping[int, Timer]]  # by tokens that a pass drafts
    upkeep: Mapping[str, Timer]  # seconds per token
    rows: Sequence[int]  # 1 first
    contexts: Sequence[int]
    clock: Callable[[], float] = time.perf_counter
    quick: bool = False  # there is time for more steps of one row in a round
    ones: dict[int, list[float]] = field(default_factory=dict)
    ratios: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    others: dict[tuple[str, str, int], list[float]] = field(default_factory=dict)

    def run(self, budget_seconds: float) -> None:
        """At most ROUNDS more rounds. A step that is expected to end beyond the budget is not begun."""
        end = self.clock() + budget_seconds
        self.step(
            self.contexts[0], 1
        )  # the first reads the weights into caches, and huge pages into the table
        for _ in range(ROUNDS):
            if self.clock() >= end:
                return
            near, started = 0.0, self.clock()
            for context in self.contexts:
                one = self._round(context, end)
                near = near or one
            for key, timer in self._timers():
                if near and self.clock() < end:
                    self.others.setdefault(key, []).append(timer() / near)
            self.quick = self.clock() - started < QUICK * budget_seconds

    def _timers(self) -> Iterator[tuple[tuple[str, str, int], Timer]]:
        for source, timers in self.passes.items():
            # the longest first, for where the time does not suffice for all
            for tokens in sorted(timers, reverse=True):
                yield ("pass", source, tokens), timers[tokens]
        for source, timer in self.upkeep.items():
            yield ("upkeep", source, 0), timer

    def _round(self, context: int, end: float) -> float:
        """Every row count once; seconds of one row, 0 where there was no time for it."""
        ones, others = list[float](), list[tuple[int, float]]()
        if self.quick:
            self.step(context, 1)  # what went before leaves its traces in the caches
        for count in self.rows:
            if self.clock() + self._expected(context, count) >= end or (count > 1 and not ones):
                continue
            if count == 1 or (others and self.quick):
                ones.append(self.step(context, 1))
                self.ones.setdefault(context, []).append(ones[-1])
            if count > 1:
                others.append((count, self.step(context, count)))
        if not ones:
            return 0.0
        one = statistics.median(ones)
        for count, seconds in others:
            self.ratios.setdefault((context, count), []).append(seconds / one)
        return one

    def _expected(self, context: int, rows: int) -> float:
        """Seconds of a step: one row there (else near) times so many rows near (else the constant cost)."""
        near = self.contexts[0]
        if near not in self.ones:
            return 0.0
        known = self.ratios.get((near, rows))
        cost = 1.0 if rows == 1 else min(known) if known else _EXPECTED.step_cost(rows, near)
        return cost * min(self.ones.get(context, self.ones[near]))

    def result(self) -> Timed | None:
        """The row counts timed at all contexts, and of later contexts those whose first three row counts
        were; None where that is not at least LEAST_ROWS rows."""
        if self.contexts[0] not in self.ones:
            return None
        first, *later = self.contexts
        whole = [first, *(each for each in later if all(self._there(each, n) for n in self.rows[:3]))]
        counts = [n for n in sorted(self.rows) if all(self._there(context, n) for context in whole)]
        if counts[-1:] < [LEAST_ROWS]:
            return None
        lines = []
        for context in whole:
            one = statistics.median(self.ones[context])
            lines.append(tuple(one * self._ratio(context, count) for count in counts))
        near = lines[0][0]
        middle = {key: near * statistics.median(found) for key, found in self.others.items()}
        blocks = {
            source: {most: middle["pass", source, most] for most in timers}
            for source, timers in self.passes.items()
            if all(("pass", source, most) in middle for most in timers)
        }
        passes = {source: middle["pass", source, max(timers)] for source, timers in self.passes.items()
                  if ("pass", source, max(timers)) in middle}  # fmt: skip
        upkeep = {source: seconds for (kind, source, _), seconds in middle.items() if kind == "upkeep"}
        several = {source: of for source, of in blocks.items() if len(of) > 1}
        times = StepTimes(tuple(counts), tuple(whole), tuple(lines), passes, upkeep, several)
        return Timed(times, self._spread())

    def _there(self, context: int, rows: int) -> bool:
        return context in self.ones if rows == 1 else (context, rows) in self.ratios

    def _ratio(self, context: int, rows: int) -> float:
        return 1.0 if rows == 1 else statistics.median(self.ratios[context, rows])

    def _spread(self) -> float:
        """A neighbour who comes and goes shows in the ratios of some rounds."""
        return max((_deviation(found) for found in self._repeated()), default=0.0)

    def _repeated(self) -> Iterator[Sequence[float]]:
        return (found for found in self.ratios.values() if len(found) >= FEW_ROUNDS)


def _deviation(found: Sequence[float]) -> float:
    low, middle, high = statistics.quantiles(found, n=4)
    return (high - low) / (2.0 * middle)
