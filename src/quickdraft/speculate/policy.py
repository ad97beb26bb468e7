"""The decision of a step: which draft, how long, for which sequence. Pure: odds and costs in, a choice out.

A sequence asks with its options: drafts whose tokens are known, and models that could be run. `choose` takes
the option and the length with the most expected tokens per plain step's time; what a draft may cost at worst
is bounded by a credit (Ledger), so text on which no draft pays takes at most some per cent more
than plain decoding, whatever the odds say. `share` divides rows among sequences when they cannot all have
what they chose. Whoever replays decisions calls these two with the same values and gets the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Final

from quickdraft.speculate.costs import BatchCosts, Costs
from quickdraft.types import MAX_ROWS

MIN_GAIN: Final = 1.01  # expected tokens per plain step's time below which one row is verified
TIE: Final = 0.1  # what a draft sure to be accepted may gain less than a shorter one
ALONE: Final = 4  # sequences at most whose choices do not depend on each other while rows last
GOOD_ENOUGH: Final = 0.9  # of the best tokens per time, for that
TIES_UP_TO: Final = 16  # tokens: longer ones must gain more
MOST_CREDIT: Final = 6.0  # that lasts; what is above it fades
PROBE_TOKENS: Final = 2
SOON, FIRST_WAIT, LONGEST_WAIT = 4, 16, 256  # tokens between two probes of what does not pay
_FADE: Final = 0.9  # per step
_HARDLY: Final = 0.02  # the chance of a token behind which nothing is worth a look


@dataclass(frozen=True, slots=True)
class Option:
    """A draft that could be verified, if it costs at most `credit` plain steps more than no draft.

    `odds[i]`: that token i is accepted if all before it are. `fixed` plain steps are spent before any token
    is known, and `each` per token more: what running a model takes. Both are 0 for a draft that is known.
    """

    source: str
    odds: Sequence[float]
    credit: float = float("inf")
    fixed: float = 0.0
    each: float = 0.0


@dataclass(frozen=True, slots=True)
class Ask:
    """What a sequence of `context` tokens could do: at most `room` drafted tokens of one of `options`.
    `spent`: plain steps that drafting took already, where a model ran. `probe`: a source to try although it
    does not pay."""

    options: Sequence[Option]
    context: int
    room: int
    spent: float = 0.0
    probe: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """`count` tokens of options[`option`], or none (-1, 0); `gain`: expected tokens per plain step's time.
    `gains`: the best of every option, in their order (0: none is worth it or fits)."""

    option: int
    count: int
    gain: float
    gains: tuple[float, ...] = ()
    probe: bool = False


def choose(ask: Ask, costs: Costs) -> Choice:
    """The best option of one sequence, of equal ones the first. Depends on nothing but its arguments."""
    best, count, gain = -1, 0, 1.0 / (1.0 + ask.spent)
    least = MIN_GAIN if not ask.spent else gain
    score, gains = least, []
    for index, option in enumerate(ask.options):
        length, value, highest = best_length(option, ask, costs, least)
        gains.append(highest if length else 0.0)
        if highest > score:
            best, count, gain, score = index, length, value, highest
    if best < 0 and ask.probe:
        for index, option in enumerate(ask.options):
            length = _probe_length(option, ask, costs) if option.source == ask.probe else 0
            if length:
                return Choice(index, length, gain, tuple(gains), probe=True)
    return Choice(best, count, gain, tuple(gains))


def best_length(option: Option, ask: Ask, costs: Costs, least: float = MIN_GAIN) -> tuple[int, float, float]:
    """(tokens, their gain, the highest gain) of the best length of an option; (0, least, least) where none
    gains more than `least`.

    Near ties go to the longer draft: gains up to TIE lower than the highest count as equal, as far as the
    draft is likely to be accepted whole. Fewer steps are better, as a step has costs that no curve has, and
    where costs rise with the rows alone the noise of a measured curve must not keep copying short.
    """
    best, best_gain, highest = 0, least, least
    expected = chance = 1.0
    each, spent = option.each, ask.spent + option.fixed
    dearest = 1.0 + option.credit - option.fixed
    odds, steps = option.odds[: min(ask.room, MAX_ROWS - 1)], costs.step_costs(ask.context)
    for count, (one, step) in enumerate(zip(odds, steps[2:], strict=False), 1):
        chance *= one
        expected += chance
        cost = step + each * count
        if cost > dearest:
            break
        gain = expected / (cost + spent)
        if gain > highest:
            best, best_gain, highest = count, gain, gain
        elif count < TIES_UP_TO:
            if best and gain >= highest * (1.0 - TIE * chance * chance):
                best, best_gain = count, gain
            elif chance < _HARDLY:
                break
        elif chance < _HARDLY:
            break
    return best, best_gain, highest


def _probe_length(option: Option, ask: Ask, costs: Costs) -> int:
    steps = costs.step_costs(ask.context)
    for count in range(min(PROBE_TOKENS, ask.room, len(option.odds)), 0, -1):
        if steps[1 + count] + option.fixed + option.each * count - 1.0 <= option.credit:
            return count
    return 0


@dataclass(frozen=True, slots=True)
class Wish:
    """The odds of the tokens that a sequence of `context` tokens wants to verify."""

    odds: Sequence[float]
    context: int


@dataclass(frozen=True, slots=True)
class Burden:
    """What a step of several sequences costs one of them, in plain steps of all of them together: `row` per
    drafted row, by the curve alone where that is None, and `scale` times what it would spend alone on
    models."""

    row: float | None = None
    scale: float = 1.0

    def of_rows(self, drafted: int, costs: Costs, context: int) -> float:
        """A sequence's part of a step in which it verified so many drafted tokens."""
        if not drafted:
            return 1.0
        if self.row is None:
            return costs.step_costs(context)[1 + drafted]
        return 1.0 + self.row * drafted


ALONE_IN_STEP: Final = Burden()


def burden(wishes: Sequence[Wish], counts: Sequence[int], costs: Costs) -> Burden:
    """Of a step in which these verify so many drafted tokens each: what it takes longer than plain decoding
    of all is borne by the rows alike."""
    sequences, total = len(wishes), sum(counts)
    if sequences <= 1 or not costs.batch_costs().measured:
        return ALONE_IN_STEP
    batch = costs.batch_costs()
    plain, added, alone = batch.of_rows(sequences), 0.0, 0.0
    for wish, count in zip(wishes, counts, strict=True):
        own = batch.own[1] * wish.context
        plain += batch.each + own
        alone += batch.of_rows(1) + batch.each + own
        added += (batch.own[1 + count] - batch.own[1]) * wish.context
    added += batch.of_rows(sequences + total) - batch.of_rows(sequences)
    return Burden(sequences * added / plain / max(1, total), alone / plain)


def share(wishes: Sequence[Wish], costs: Costs, rows: int) -> list[int]:
    """Tokens of each wish to verify in one step, `rows` drafted rows at most in all.

    At most ALONE sequences get what they wish, so that what is drafted for one does not depend on the others,
    while these rows last and the step keeps within its budget: it gives more tokens per time than plain
    decoding of all, and GOOD_ENOUGH of the most it could. Beyond, every row goes where it brings most tokens,
    as long as the step's tokens per time grow. Where it is not known what a step of several costs, only the
    rows are a limit.
    """
    counts = [len(wish.odds) for wish in wishes]
    total = sum(counts)
    if not total or len(wishes) == 1:
        return [min(count, rows) for count in counts]
    batch, own, more = costs.batch_costs(), 0.0, 0.0
    for wish, count in zip(wishes, counts, strict=True):
        own += batch.each + batch.own[1] * wish.context
        more += (batch.own[1 + count] - batch.own[1]) * wish.context
    alone = len(wishes) <= ALONE and total <= rows
    if alone and not batch.measured:
        return counts
    shared, gain = _marginal(wishes, batch, own, rows)
    if alone:
        cost, plain = batch.of_rows(total + len(wishes)) + own + more, batch.of_rows(len(wishes)) + own
        least = max(GOOD_ENOUGH * gain, len(wishes) / plain)
        if sum(_expected(wish.odds) for wish in wishes) >= least * cost:
            return counts
    return shared


def _marginal(wishes: Sequence[Wish], batch: BatchCosts, own: float, rows: int) -> tuple[list[int], float]:
    """Row by row to the likeliest next token. What a step costs may rise in stairs, so all are tried, and
    the most tokens per time taken. Equal ones go to the sequence that has fewer, then to the first.
    `own`: what one row of each costs beside what they share. Returns the tokens of each, and the gain."""
    total, expected = len(wishes), float(len(wishes))
    slope = batch.own
    taken: list[int] = []  # the sequence of every further row, in order
    best, best_gain = 0, expected / (batch.of_rows(total) + own)
    heap = [(-wish.odds[0], 0, index) for index, wish in enumerate(wishes) if wish.odds]
    heapify(heap)
    shared, known = batch.shared, len(batch.shared)
    while heap and len(taken) < rows:
        chance, count, index = heap[0]
        expected -= chance
        taken.append(index)
        total += 1
        own += (slope[count + 2] - slope[count + 1]) * wishes[index].context
        odds = wishes[index].odds
        if count + 1 < len(odds):
            heapreplace(heap, (chance * odds[count + 1], count + 1, index))
        else:
            heappop(heap)
        gain = expected / ((shared[total] if total < known else batch.of_rows(total)) + own)
        if gain > best_gain:
            best, best_gain = len(taken), gain
    return [taken[:best].count(index) for index in range(len(wishes))], best_gain


def _expected(odds: Sequence[float]) -> float:
    total = chance = 1.0
    for one in odds:
        chance *= one
        total += chance
    return total


class Ledger:
    """What drafts of some sources have cost and won a sequence, in plain steps, and when to try again what
    did not pay.

    The credit begins with `start`, grows by `income` per token and by the time that accepted drafts save, and
    falls by what refused ones cost. A draft that costs more than the credit if it fails is not made. So n
    tokens of a new sequence take at most n (1 + income) + start plain steps, whatever the text. What is saved
    beyond MOST_CREDIT fades, so that a text that was copied for long is soon as careful as any other.
    """

    __slots__ = ("_income", "_tokens", "_waits", "credit")

    def __init__(self, start: float, income: float) -> None:
        self.credit, self._income = start, income
        self._tokens = 0
        self._waits: dict[str, tuple[int, int]] = {}  # source -> (tokens to wait, emitted when it began)

    def settle(self, emitted: int, cost: float | None) -> None:
        """A step emitted so many tokens; with a draft of these sources, it took `cost` plain steps."""
        self._tokens += emitted
        earned = emitted * self._income + (emitted - cost if cost is not None else 0.0)
        kept = (
            self.credit if self.credit <= MOST_CREDIT else MOST_CREDIT + _FADE * (self.credit - MOST_CREDIT)
        )
        self.credit = kept + earned

    def due(self, source: str) -> bool:
        """Whether a source that does not pay may be tried."""
        wait, since = self._waits.get(source, (FIRST_WAIT, 0))
        return self._tokens - since >= wait

    def tried(self, source: str, paid: bool) -> None:
        """A source drafted: its next probe comes soon where it paid, else later and later."""
        wait, _ = self._waits.get(source, (FIRST_WAIT // 2, 0))
        self._waits[source] = (SOON if paid else min(max(2 * wait, FIRST_WAIT), LONGEST_WAIT), self._tokens)
