"""Drafting: which draft, how long, for which request. Decides time, never output.

Draft only what would pay at the acceptance this request has seen of late (speculate/odds.py) and at what
steps cost (speculate/costs.py): the length that maximises expected tokens per time. After refusals one
short draft probes again every few tokens, so a request that starts to copy is noticed. Of several sources
the one with the highest gain drafts, of equal ones the first. A model runs only when chosen, and where the
context has a continuation too the two become one draft (speculate/fusion.py); behind a strong match that
has held the context gains more alone, and the model is not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quickdraft.speculate.costs import ConstantCosts, Costs, drafting_cost
from quickdraft.speculate.draft import (
    Draft,
    Drafter,
    ForkingDrafter,
    ModelDrafter,
    SequenceView,
    Verdict,
)
from quickdraft.speculate.fusion import fuse
from quickdraft.speculate.odds import RequestOdds, best_length
from quickdraft.types import Speculation

DEFAULT_MAX_ROWS = 16


@dataclass(frozen=True, slots=True)
class _Offer:
    """What one source would draft: `draft` is None for a model, which is not run before it is chosen."""

    source: str
    count: int
    gain: float
    draft: Draft | None


class Drafting:
    """The drafters of an engine, and per request what it has learned of them."""

    def __init__(self, drafters: Sequence[Drafter], costs: Costs | None = None) -> None:
        self._drafters = {drafter.source: drafter for drafter in drafters}
        self._models = {each.source: each for each in drafters if isinstance(each, ModelDrafter)}
        self._costs = costs or ConstantCosts()
        self._odds: dict[str, RequestOdds] = {}

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self._drafters)

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        return tuple(self._drafters.values())

    @property
    def auto_sources(self) -> tuple[str, ...]:
        """What a request with `auto` uses."""
        models = self._models
        return tuple(name for name in self._drafters if name not in models or models[name].in_auto)

    def check(self, speculation: Speculation) -> None:
        """Raise UnsupportedError for a source that has no drafter here."""
        speculation.require(self.sources)

    def propose(self, view: SequenceView, speculation: Speculation, budget: int) -> Draft:
        """A draft of at most `budget` tokens under the request's own limits; often an empty one."""
        budget = min(budget, (speculation.max_rows or DEFAULT_MAX_ROWS) - 1)
        names = self.auto_sources if speculation.auto else speculation.sources
        if budget <= 0 or not names:
            return Draft()
        odds = self._odds.setdefault(view.request_id, RequestOdds())
        odds.begin()
        offers = [self._offer(name, view, odds, budget) for name in names]
        contexts = [offer.draft for offer in offers if offer.draft is not None and offer.draft.tokens]
        context = max(contexts, key=lambda draft: draft.match_length, default=Draft())
        for offer in sorted(offers, key=lambda offer: -offer.gain):
            if not offer.count:
                continue
            if offer.draft is not None:
                odds.context_proposed(offer.draft.tokens, offer.draft.match_length)
                return _cut(offer.draft, offer.count)
            draft = self._drafters[offer.source].propose(view, offer.count)
            if draft.tokens:
                return self._fused(view, draft, context, odds)
        return Draft()

    def _offer(self, name: str, view: SequenceView, odds: RequestOdds, budget: int) -> _Offer:
        costs, context = self._costs, len(view.tokens)
        if name in self._models:
            chances = odds.model(name, min(budget, self._models[name].longest))
            found = best_length(
                chances,
                lambda count: costs.step_cost(1 + count, context) + drafting_cost(costs, name, count),
            )
            return _Offer(name, *found, None)
        draft = self._drafters[name].propose(view, budget)
        chances = [odds.match(draft.match_length)] * len(draft.tokens)
        found = best_length(chances, lambda count: costs.step_cost(1 + count, context))
        return _Offer(name, *found, draft)

    def _fused(self, view: SequenceView, draft: Draft, context: Draft, odds: RequestOdds) -> Draft:
        """A model's draft, joined with the context's continuation, as long as it pays."""
        match, costs = context.match_length, self._costs
        chances = odds.model(draft.source, len(draft.tokens))
        fused = fuse(draft.tokens, context.tokens, chances, lambda agreed: odds.match(match + agreed))
        odds.model_proposed(draft.source, draft.tokens)
        odds.context_proposed(context.tokens, match, fused.agreed)
        spent = drafting_cost(costs, draft.source, len(draft.tokens))
        count, _ = best_length(
            fused.odds,
            lambda count: costs.step_cost(1 + count, len(view.tokens)) + spent,
            least=1.0 / (1.0 + spent),
        )
        own = len(fused.tokens) - fused.extended
        if not own:
            return _cut(context, count)
        scores, extended = draft.scores[:own], max(0, count - own)
        return Draft(fused.tokens[:count], draft.source, scores[:count], match, extended)

    def read(self, view: SequenceView, taps: Any) -> None:
        """Prompt tokens of a request were computed."""
        for drafter in self._drafters.values():
            drafter.observe(view, Verdict((), 0), taps)

    def resumed(self, view: SequenceView) -> None:
        """A request starts, or starts again, from what the prefix cache has of it."""
        for drafter in self._models.values():
            drafter.resumed(view)

    def forked(self, source: SequenceView, view: SequenceView) -> None:
        """A request is about to start from a copy of another's state."""
        for drafter in self._models.values():
            if isinstance(drafter, ForkingDrafter):
                drafter.forked(source, view)

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
            odds.observe(verdict)
        for drafter in self._drafters.values():
            drafter.observe(view, verdict, taps)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._odds.pop(request_id, None)
        for drafter in self._drafters.values():
            drafter.forget(request_id)


def _cut(draft: Draft, count: int) -> Draft:
    return Draft(draft.tokens[:count], draft.source, draft.scores[:count], draft.match_length)
