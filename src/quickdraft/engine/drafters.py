"""Drafting: who drafts how much for which request, at every step. Decides time, never output.

Sources that read the text always propose, which costs next to nothing; whether a model runs, what is joined
and how long the draft is decides the request's Decider (speculate/decide.py); rows that are short are shared
among the requests of the step (speculate/policy.py). Here drafters, requests and the clock meet them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quickdraft.engine.explain import StepRecord
from quickdraft.speculate.costs import CHAINED_SOURCES, ConstantCosts, Costs
from quickdraft.speculate.decide import Decider
from quickdraft.speculate.draft import (
    NOTHING,
    Draft,
    Drafter,
    FollowingDrafter,
    ForkingDrafter,
    ModelDrafter,
    SequenceView,
    Verdict,
    cut,
)
from quickdraft.speculate.forced import proposed
from quickdraft.speculate.online_costs import OnlineCosts
from quickdraft.speculate.policy import ALONE_IN_STEP, Wish, burden, share
from quickdraft.speculate.priors import Priors, shipped_for
from quickdraft.types import MAX_ROWS, Speculation

DEFAULT_MAX_ROWS = 16  # of a request that names its sources and no cap


@dataclass(frozen=True, slots=True)
class Asking:
    """A request that could verify a draft of at most `room` tokens in this step."""

    view: SequenceView
    speculation: Speculation
    room: int


class Drafting:
    """The drafters of an engine, and per request what it has learned of them."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        costs: Costs | None = None,
        explain: Callable[[dict[str, object]], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        shipped: Iterable[str] = (),
        priors: Priors | None = None,
    ) -> None:
        """`explain` is told of every step, as a JSON value (engine/explain.py). `shipped`: the models that
        the shipped table of priors was fitted to, which is used where no `priors` are given."""
        self._priors = shipped_for(frozenset(shipped)) if priors is None else priors
        self._drafters = {drafter.source: drafter for drafter in drafters}
        self._models = {each.source: each for each in drafters if isinstance(each, ModelDrafter)}
        self._kept = {each.source: each for each in drafters if isinstance(each, FollowingDrafter)}
        self._costs = costs or ConstantCosts()
        self._burden = ALONE_IN_STEP  # of the step under way
        self._online = costs if isinstance(costs, OnlineCosts) and not costs.frozen else None
        self._odds: dict[str, Decider] = {}
        self._clock = clock
        self._record = StepRecord(explain) if explain is not None else None

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
        return self.propose_all([Asking(view, speculation, budget)], budget)[0]

    def propose_all(self, asking: Sequence[Asking], rows: int) -> list[Draft]:
        """The drafts of one step, `rows` tokens at most in all."""
        if self._record is not None:
            self._record.begin()
        if all(one.speculation.off for one in asking):
            return [NOTHING] * len(asking)
        drafts, wishes = [NOTHING] * len(asking), []
        for index, one in enumerate(asking):
            room = min(one.room, most_rows(one.speculation) - 1)
            if not one.speculation.off:
                drafts[index], wish = self._decide(one, room)
            else:
                wish = Wish((), len(one.view.tokens))
            wishes.append(wish)
        counts = share(wishes, self._costs, rows)
        self._burden = burden(wishes, counts, self._costs)
        return [cut(draft, count) for draft, count in zip(drafts, counts, strict=True)]

    def _decide(self, asking: Asking, room: int) -> tuple[Draft, Wish]:
        view, models = asking.view, self._models
        names = self.auto_sources if asking.speculation.auto else asking.speculation.sources
        decider = self._odds.get(view.request_id)
        if decider is None:
            decider = self._odds[view.request_id] = Decider(
                self._costs, self._priors, explain=self._record is not None
            )
        contexts = [proposed(self._drafters[name], view, room) for name in names if name not in models]
        longest = {name: models[name].longest for name in names if name in models}
        decision = decider.decide(
            contexts, longest, len(view.tokens), room, lambda source, count: self._run(source, view, count)
        )
        for name in longest:
            if name in self._kept:
                self._kept[name].follow(view.request_id, decider.follows(name))
        if self._record is not None:
            self._record.decided(view.request_id, room, decision)
        return decision.draft, Wish(decision.odds, decision.context)

    def _run(self, source: str, view: SequenceView, count: int) -> Draft:
        """Run a model; its time corrects the costs."""
        if self._online is None:
            return proposed(self._drafters[source], view, count)
        started = self._clock()
        draft = proposed(self._drafters[source], view, count)
        passes = len(draft.tokens) if source in CHAINED_SOURCES else bool(draft.tokens)
        if passes:
            self._online.observe_pass(source, (self._clock() - started) / passes, count)
        return draft

    @property
    def timed(self) -> bool:
        """Whether `ran` learns from the times of steps."""
        return self._online is not None

    def ran(self, rows: int, context: int, seconds: float) -> None:
        """A step that verified `rows` rows of one sequence after `context` tokens, and nothing else, took so
        long in the model."""
        if self._online is not None:
            self._online.observe_step(rows, context, seconds)

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

    def publishing(self, view: SequenceView) -> None:
        """The blocks of a request are about to be published to the prefix cache."""
        for drafter in self._models.values():
            drafter.publishing(view)

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
        decider = self._odds.get(view.request_id)
        if decider is not None:
            cost = decider.observe(verdict, self._burden)
            if self._record is not None:
                self._record.observed(view.request_id, verdict, cost)
        for drafter in self._drafters.values():
            drafter.observe(view, verdict, taps)

    def settled(self) -> None:
        """The step is over."""
        if self._record is not None:
            self._record.end()

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._odds.pop(request_id, None)
        for drafter in self._drafters.values():
            drafter.forget(request_id)


def most_rows(speculation: Speculation) -> int:
    """The longest verify block a request may have."""
    if speculation.max_rows is not None:
        return speculation.max_rows
    return MAX_ROWS if speculation.auto else DEFAULT_MAX_ROWS
