"""Drafting: which draft, how long, for which request. Decides time, never output.

A simple rule: draft only what would pay at the acceptance this request has seen of late. `odds` is a
running estimate that the next drafted token is accepted; a block of n drafted tokens emits
1 + odds + odds^2 + ... tokens and costs what the cost curve (speculate/costs.py) says; the n with the
most tokens per time is drafted. After refusals one short draft
probes again every few tokens, so a request that starts to copy is noticed. Of several sources the
one with the highest gain drafts, of equal ones the first; a model that drafts runs only when chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quickdraft.speculate.costs import ConstantCosts, Costs, drafting_cost
from quickdraft.speculate.draft import Draft, Drafter, ModelDrafter, SequenceView, Verdict
from quickdraft.types import Speculation

DEFAULT_MAX_ROWS = 16
CONSTANT: Costs = ConstantCosts()
MIN_GAIN = 1.05  # expected tokens per plain step's time below which one row is verified
_FORGET_DRAFTED, _FORGET_PLAIN = 0.85, 0.97  # how fast old verdicts fade, per step
_PRIORS = ((8, 0.85), (5, 0.6), (0, 0.35))  # (match length from, odds before anything is seen)
_MODEL_PRIOR = 0.85  # of a model that drafts: the odds class behind those of _PRIORS
_PRIOR_WEIGHT = 2.0


@dataclass(slots=True)
class _Odds:
    """Estimate that the next token of a draft is accepted, for one class of match lengths."""

    prior: float
    accepted: float = 0.0
    refused: float = 0.0

    @property
    def value(self) -> float:
        seen = self.accepted + self.refused
        return (self.accepted + _PRIOR_WEIGHT * self.prior) / (seen + _PRIOR_WEIGHT)

    def fade(self, rate: float) -> None:
        self.accepted *= rate
        self.refused *= rate


def best_length(odds: float, limit: int, costs: Costs = CONSTANT, context: int = 0, source: str = "") -> int:
    """Drafted tokens (0..limit) that maximise expected tokens per time at these odds."""
    return _best(odds, limit, costs, context, source)[0]


def _best(odds: float, limit: int, costs: Costs, context: int, source: str) -> tuple[int, float]:
    """(length, gain): see best_length; the gain is expected tokens per plain step's time."""
    best, best_gain = 0, MIN_GAIN
    expected, chance = 1.0, 1.0
    for count in range(1, limit + 1):
        chance *= odds
        expected += chance
        gain = expected / (costs.step_cost(1 + count, context) + drafting_cost(costs, source, count))
        if gain > best_gain:
            best, best_gain = count, gain
    return best, best_gain


@dataclass(frozen=True, slots=True)
class _Offer:
    """What one source would draft: `draft` is None for a model, which is not run before it is chosen."""

    source: str
    kind: int  # odds class
    count: int
    gain: float
    draft: Draft | None


class Drafting:
    """The drafters of an engine, and per request what it has learned of them."""

    def __init__(self, drafters: Sequence[Drafter], costs: Costs = CONSTANT) -> None:
        self._costs = costs
        self._drafters = {drafter.source: drafter for drafter in drafters}
        self._models = {each.source: each for each in drafters if isinstance(each, ModelDrafter)}
        self._odds: dict[str, list[_Odds]] = {}
        self._used: dict[str, int] = {}  # request -> odds class of the draft under way

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self._drafters)

    def check(self, speculation: Speculation) -> None:
        """Raise UnsupportedError for a source that has no drafter here."""
        speculation.require(self.sources)

    def propose(self, view: SequenceView, speculation: Speculation, budget: int) -> Draft:
        """A draft of at most `budget` tokens under the request's own limits; often an empty one."""
        budget = min(budget, (speculation.max_rows or DEFAULT_MAX_ROWS) - 1)
        names = self._drafters if speculation.auto else speculation.sources
        if budget <= 0 or not names:
            return Draft()
        odds = self._odds.setdefault(view.request_id, _fresh_odds())
        offers = [self._offer(name, view, odds, budget) for name in names]
        for offer in sorted(offers, key=lambda offer: -offer.gain):
            draft = offer.draft
            if draft is None and offer.count:
                draft = self._drafters[offer.source].propose(view, offer.count)
            if draft is not None and draft.tokens and offer.count:
                self._used[view.request_id] = offer.kind
                tokens, scores = draft.tokens[: offer.count], draft.scores[: offer.count]
                return Draft(tokens, offer.source, scores, draft.match_length)
        return Draft()

    def _offer(self, name: str, view: SequenceView, odds: list[_Odds], budget: int) -> _Offer:
        if name in self._models:
            count, gain = self._best(name, view, odds[-1], min(budget, self._models[name].longest))
            return _Offer(name, len(_PRIORS), count, gain, None)
        draft = self._drafters[name].propose(view, budget)
        kind = next(i for i, (length, _) in enumerate(_PRIORS) if draft.match_length >= length)
        count, gain = self._best(name, view, odds[kind], len(draft.tokens))
        return _Offer(name, kind, count, gain, draft)

    def _best(self, name: str, view: SequenceView, odds: _Odds, limit: int) -> tuple[int, float]:
        return _best(odds.value, limit, self._costs, len(view.tokens), name)

    def read(self, view: SequenceView, taps: Any) -> None:
        """Prompt tokens of a request were computed."""
        for drafter in self._drafters.values():
            drafter.observe(view, Verdict((), 0), taps)

    def resumed(self, view: SequenceView) -> None:
        """A request starts, or starts again, from what the prefix cache has of it."""
        for drafter in self._models.values():
            drafter.resumed(view)

    @property
    def cold_tokens(self) -> int:
        """Tokens that requests resumed from while the model that drafts for them had no rows of them."""
        return sum(drafter.cold_tokens for drafter in self._models.values())

    @property
    def longest(self) -> dict[str, int]:
        """Of each source whose drafts a model makes, the most tokens of one."""
        return {name: drafter.longest for name, drafter in self._models.items()}

    def observe(self, view: SequenceView, verdict: Verdict, taps: Any = None) -> None:
        """Learn from a verify step of a request."""
        odds = self._odds.get(view.request_id)
        if odds is not None:
            for one in odds:
                one.fade(_FORGET_DRAFTED if verdict.drafted else _FORGET_PLAIN)
            kind = self._used.pop(view.request_id, None)
            if kind is not None:
                odds[kind].accepted += verdict.accepted
                odds[kind].refused += verdict.accepted < verdict.drafted
        for drafter in self._drafters.values():
            drafter.observe(view, verdict, taps)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._odds.pop(request_id, None)
        self._used.pop(request_id, None)
        for drafter in self._drafters.values():
            drafter.forget(request_id)


def _fresh_odds() -> list[_Odds]:
    return [*(_Odds(prior) for _, prior in _PRIORS), _Odds(_MODEL_PRIOR)]
