"""Hindsight: what decisions nobody can make in time would have reached on a trace.

Three of them: one source and one length for a whole workload, the best of all; the clairvoyant oracle, which
knows at every position how much of every proposal would be accepted; and plain decoding, which drafts
nothing. Counted on the same curve and by the same rules as replay.py counts the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from quickdraft.bench.curves import Curve
from quickdraft.bench.replay import Outcome, View, step_outcome, text_drafters
from quickdraft.bench.traces import Trace, TracedWorkload
from quickdraft.speculate.draft import CORPUS, LOOKUP, PREDICTION, Draft, Verdict
from quickdraft.speculate.fusion import agreement
from quickdraft.types import MAX_ROWS

STRONG_MATCH: Final = 8  # from which on a static fusion drafts from the context


@dataclass(frozen=True, slots=True)
class Offer:
    """At one position: the tokens a source proposed, how many of them the target emits, and which source's
    passes that takes."""

    source: str
    offered: int
    accepted: int


@dataclass(frozen=True, slots=True)
class KnownTrace:
    """A trace and, by source, its offer at every position."""

    trace: Trace
    offers: Mapping[str, tuple[Offer, ...]]


@dataclass(frozen=True, slots=True)
class Static:
    """Always so many tokens of one source, fewer where it proposes fewer."""

    source: str = ""
    count: int = 0

    @property
    def model(self) -> str:
        """Whose rows are kept up, if the source has a model."""
        return self.source.partition("+")[0]

    def __str__(self) -> str:
        return f"{self.source}@{self.count + 1}" if self.count else "off"


@dataclass(slots=True)
class StaticPolicy:
    """replay.Policy of one Static."""

    static: Static
    offers: Mapping[str, KnownTrace]  # by the trace's name
    _drafted: dict[tuple[str, int], int] = field(default_factory=dict)
    _emitted: int = 0

    def propose(self, views: Sequence[View], spare: int) -> Sequence[Draft]:
        """As the engine does: the oldest first."""
        drafts = []
        for view in views:
            draft = self._draft(view, min(spare, view.room))
            spare -= len(draft.tokens)
            drafts.append(draft)
        return drafts

    def _draft(self, view: View, most: int) -> Draft:
        if not self.static.count:
            return Draft()
        offer = self.offers[view.trace.name].offers[self.static.source][view.done]
        count = max(0, min(self.static.count, offer.offered, most))
        key = offer.source, count
        self._drafted[key] = self._drafted.get(key, 0) + 1
        rest = view.trace.output[view.done :][: min(count, offer.accepted)]
        return Draft((*rest, *(-1 for _ in range(count - len(rest)))), offer.source)  # -1: refused

    def observe(self, view: View, verdict: Verdict) -> None:
        """It never learns."""
        self._emitted += len(verdict.tokens)

    def drafting_seconds(self, curve: Curve) -> float:
        """See replay.Policy."""
        passes = sum(curve.draft_seconds(*key) * times for key, times in self._drafted.items())
        return passes + self._emitted * curve.upkeep_seconds(self.static.model)


def known(trace: Trace) -> KnownTrace:
    """What every source would have given, alone and, for models, where no strong match goes before."""
    texts = text_drafts(trace)
    found = {
        source: tuple(_offer(source, draft.tokens, trace, at) for at, draft in enumerate(drafts))
        for source, drafts in texts.items()
    }
    for source, drafts in trace.drafts.items():
        own = tuple(_offer(source, draft.tokens, trace, at) for at, draft in enumerate(drafts))
        found[source] = own
        found[f"{source}+{LOOKUP}"] = tuple(
            copied if draft.match_length >= STRONG_MATCH else drafted
            for draft, copied, drafted in zip(texts[LOOKUP], found[LOOKUP], own, strict=True)
        )
    return KnownTrace(trace, found)


def statics(traces: Sequence[KnownTrace], most_rows: int = MAX_ROWS) -> list[Static]:
    """Every source with every length up to `most_rows` rows that it ever proposes; plain decoding first."""
    longest: dict[str, int] = {}
    for one in traces:
        for source, offers in one.offers.items():
            longest[source] = max(longest.get(source, 0), *(offer.offered for offer in offers))
    lengths = ((source, range(1, min(most, most_rows - 1) + 1)) for source, most in longest.items())
    return [Static(), *(Static(source, count) for source, counts in lengths for count in counts)]


def run_static(traces: Sequence[KnownTrace], curve: Curve, static: Static) -> Outcome:
    """Sequences one after the other."""
    return sum((_static_outcome(one, curve, static) for one in traces), Outcome())


def _static_outcome(one: KnownTrace, curve: Curve, static: Static) -> Outcome:
    """What replay of StaticPolicy gives, without the tokens."""
    trace, offers = one.trace, one.offers.get(static.source, ())
    base, slope, prompt, end = curve.base, curve.slope, len(one.trace.prompt), len(one.trace.output)
    done = steps = rows = count = accepted = 0
    seconds = drafting = refused = 0.0
    while done < end:
        if static.count:
            offer = offers[done]
            count = min(static.count, offer.offered, trace.max_tokens - done - 1)
            accepted = min(count, offer.accepted)
            drafting += curve.draft_seconds(offer.source, count)
        step = base[1 + count] + slope[1 + count] * (prompt + done)
        seconds += step
        if accepted < count:
            refused += step - base[1 + accepted] - slope[1 + accepted] * (prompt + done)
        done, steps, rows = done + accepted + 1, steps + 1, rows + count + 1
    drafting += end * curve.upkeep_seconds(static.model)
    return Outcome(end, steps, rows, seconds + drafting, drafting, refused)


def run_oracle(one: KnownTrace, curve: Curve, most_rows: int = MAX_ROWS) -> Outcome:
    """The least time in which the trace can be emitted by steps that draft what one source proposed there:
    the shortest path over positions. No policy over these sources is faster."""
    trace, prompt = one.trace, len(one.trace.prompt)
    best = [(0.0, 0, 0.0)] * (len(trace.output) + 1)  # seconds to the end, tokens drafted now, for passes
    for at in range(len(trace.output) - 1, -1, -1):
        best[at] = min(
            (
                curve.row_seconds(1 + count, prompt + at) + passes + best[at + count + 1][0],
                count,
                passes,
            )
            for count, passes in _right_drafts(one, at, curve, most_rows)
        )
    at, total = 0, Outcome()
    while at < len(trace.output):
        _, count, passes = best[at]
        total += step_outcome(curve, [prompt + at], [count], [count + 1])
        total += Outcome(seconds=passes, drafting_seconds=passes)
        at += count + 1
    return total


def _right_drafts(one: KnownTrace, at: int, curve: Curve, most_rows: int) -> Iterator[tuple[int, float]]:
    """(tokens, seconds of passes) of every draft that is accepted whole, the cheapest of each length."""
    cheapest: dict[int, float] = {0: 0.0}
    for offers in one.offers.values():
        offer = offers[at]
        for count in range(1, min(offer.accepted, most_rows - 1) + 1):
            seconds = curve.draft_seconds(offer.source, count)
            cheapest[count] = min(seconds, cheapest.get(count, seconds))
    return iter(cheapest.items())


@dataclass(slots=True)
class OraclePolicy:
    """replay.Policy that knows every verdict, for batches: in each step it gives rows one by one to the
    sequence where the step's tokens per second rise most, while they rise. Step by step, so not a bound."""

    curve: Curve
    offers: Mapping[str, KnownTrace]
    most_rows: int = MAX_ROWS
    _seconds: float = 0.0

    def propose(self, views: Sequence[View], spare: int) -> Sequence[Draft]:
        """Accepted tokens only."""
        known_right = [
            dict(_right_drafts(self.offers[view.trace.name], view.done, self.curve, self.most_rows))
            for view in views
        ]
        counts = self._counts(known_right, [len(view.tokens) for view in views], spare)
        for right, count in zip(known_right, counts, strict=True):
            self._seconds += right[count]
        return [
            Draft(view.trace.output[view.done :][:count], LOOKUP)
            for view, count in zip(views, counts, strict=True)
        ]

    def _counts(self, right: Sequence[Mapping[int, float]], contexts: Sequence[int], spare: int) -> list[int]:
        """Lengths per sequence: from all that is right, take off what is not worth its time."""

        def rate(counts: Sequence[int]) -> float:
            passes = sum(one[count] for one, count in zip(right, counts, strict=True))
            seconds = self.curve.step_seconds([1 + count for count in counts], contexts) + passes
            return (sum(counts) + len(counts)) / seconds

        best = _climb([0 for _ in right], right, spare, rate)
        whole = [max(one) for one in right]
        if sum(whole) <= spare and rate(whole) > rate(best):
            best = whole
        return best

    def observe(self, view: View, verdict: Verdict) -> None:
        """It knew."""

    def drafting_seconds(self, curve: Curve) -> float:
        """See replay.Policy."""
        return self._seconds


def _climb(
    counts: list[int],
    right: Sequence[Mapping[int, float]],
    spare: int,
    rate: Callable[[Sequence[int]], float],
) -> list[int]:
    """Lengthen one draft at a time, by any number of tokens, as long as the rate rises."""
    while True:
        options = [
            [*counts[:index], longer, *counts[index + 1 :]]
            for index, one in enumerate(right)
            for longer in one
            if longer > counts[index] and sum(counts) - counts[index] + longer <= spare
        ]
        best = max(options, key=rate, default=counts)
        if rate(best) <= rate(counts):
            return counts
        counts = best


def text_drafts(trace: Trace) -> dict[str, tuple[Draft, ...]]:
    """The whole proposals before every token of the output, of lookup and of what else reads a text here."""
    view, found = View(trace.name, trace), dict[str, list[Draft]]()
    here = {LOOKUP} | ({PREDICTION} if trace.prediction else set()) | ({CORPUS} if trace.corpus else set())
    drafters = [drafter for drafter in text_drafters() if drafter.source in here]
    for token in trace.output:
        for drafter in drafters:
            found.setdefault(drafter.source, []).append(drafter.propose(view, MAX_ROWS - 1))
        view.tokens.append(token)
    return {source: tuple(drafts) for source, drafts in found.items()}


def _offer(source: str, tokens: Sequence[int], trace: Trace, at: int) -> Offer:
    """The last token of the output needs no draft: a step emits one more than it accepts."""
    rest = trace.output[at : len(trace.output) - 1]
    return Offer(source, len(tokens), agreement(tokens, rest))


def known_workload(work: TracedWorkload) -> list[KnownTrace]:
    """Of all its sequences."""
    return [known(trace) for trace in work.traces]
