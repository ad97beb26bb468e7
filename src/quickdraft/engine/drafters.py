"""Drafting: which draft, how long, for which request. Decides time, never output.

A simple rule until costs are measured: draft only what would pay at the acceptance this request
has seen of late. `odds` is a running estimate that the next drafted token is accepted; a block of
n drafted tokens costs about 1 + ROW_COST * n plain steps and emits 1 + odds + odds^2 + ... tokens;
the longest n whose last token still pays for itself is drafted. After refusals one short draft
probes again every few tokens, so a request that starts to copy is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quickdraft.speculate.draft import Draft, Drafter, SequenceView, Verdict
from quickdraft.types import Speculation

DEFAULT_MAX_ROWS = 16
ROW_COST = 0.4  # a further row of a verify block, in plain steps (measured: docs/experiments.md)
MIN_GAIN = 1.05  # expected tokens per plain step's time below which one row is verified
_FORGET_DRAFTED, _FORGET_PLAIN = 0.85, 0.97  # how fast old verdicts fade, per step
_PRIORS = ((8, 0.85), (5, 0.6), (0, 0.35))  # (match length from, odds before anything is seen)
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


def best_length(odds: float, limit: int) -> int:
    """Drafted tokens (0..limit) that maximise expected tokens per time at these odds."""
    best, best_gain = 0, MIN_GAIN
    expected, chance = 1.0, 1.0
    for count in range(1, limit + 1):
        chance *= odds
        expected += chance
        gain = expected / (1.0 + ROW_COST * count)
        if gain > best_gain:
            best, best_gain = count, gain
    return best


class Drafting:
    """The drafters of an engine, and per request what it has learned of them."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = {drafter.source: drafter for drafter in drafters}
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
        odds = self._odds.setdefault(view.request_id, [_Odds(prior) for _, prior in _PRIORS])
        for name in names:
            draft = self._drafters[name].propose(view, budget)
            if draft.tokens:
                kind = next(i for i, (length, _) in enumerate(_PRIORS) if draft.match_length >= length)
                count = best_length(odds[kind].value, len(draft.tokens))
                if count:
                    self._used[view.request_id] = kind
                    return Draft(draft.tokens[:count], name, draft.scores[:count], draft.match_length)
        return Draft()

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
