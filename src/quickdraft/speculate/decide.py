"""Decider: the steps of one request, decided one after the other, and what it learns from them.

It joins odds (odds.py), the decision (policy.py) and fusion (fusion.py). Drafts of the context are handed
in; a model is run through a callback, only when running it is the choice. The engine drives one per request,
and a simulator drives one over recorded proposals: equal inputs give equal decisions. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from quickdraft.speculate.constraint import FORCED
from quickdraft.speculate.costs import CHAINED_SOURCES, Costs, drafting_cost
from quickdraft.speculate.draft import LOOKUP, NOTHING, Draft, Verdict, cut
from quickdraft.speculate.follow import WARM, Follow
from quickdraft.speculate.fusion import join
from quickdraft.speculate.odds import RequestOdds
from quickdraft.speculate.policy import (
    ALONE_IN_STEP,
    PROBE_TOKENS,
    Ask,
    Burden,
    Choice,
    Ledger,
    Option,
    choose,
)
from quickdraft.speculate.priors import Priors

# Credits in plain steps, and what may be lost of plain decoding's time per token: together under 3 % of the
# time of some 200 tokens. Models need more, as they cannot be judged without running.
CONTEXT_START, CONTEXT_INCOME = 1.5, 0.007
MODEL_START, MODEL_INCOME = 1.5, 0.008

Run = Callable[[str, int], Draft]  # (source, tokens at most) -> what the model drafts; empty: it cannot here


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a source offered: its odds (of a model before it ran: without its margins), what it may cost at
    most in plain steps, and the gain of its best length, 0 where none is worth it or fits the credit."""

    source: str
    match_length: int
    odds: tuple[float, ...]
    credit: float
    gain: float


@dataclass(frozen=True, slots=True)
class Decision:
    """`draft` is to be verified; `odds` are those of its tokens, `gain` its expected tokens per plain step's
    time. `ran`: the model that ran, and `spent`, the plain steps that took."""

    draft: Draft
    odds: tuple[float, ...]
    gain: float
    context: int
    candidates: tuple[Candidate, ...]
    ran: str = ""
    spent: float = 0.0
    probe: bool = False


class Decider:
    """Of one request. After every `decide` comes one `observe`, or, where the step failed, another."""

    def __init__(self, costs: Costs, priors: Priors | None = None, *, explain: bool = False) -> None:
        """`explain`: decisions come with their candidates."""
        self._explain = explain
        self.odds = RequestOdds(priors)
        self.context_ledger = Ledger(CONTEXT_START, CONTEXT_INCOME)
        self.model_ledger = Ledger(MODEL_START, MODEL_INCOME)
        self._follow = Follow()
        self._costs = costs
        self._decision: Decision | None = None

    def decide(
        self, contexts: Sequence[Draft], models: Mapping[str, int], tokens: int, room: int, run: Run
    ) -> Decision:
        """The draft of a step after `tokens` tokens, at most `room` drafted ones. `contexts`: what sources
        that read the text propose; `models`: the sources that may be run and their longest drafts."""
        self.odds.begin()
        contexts = [draft for draft in contexts if draft.tokens]
        options = [
            Option(draft.source, self._context_odds(draft, room), self._credit(draft)) for draft in contexts
        ]
        for draft in contexts:
            self.odds.context_proposed(draft.source, draft.tokens, draft.match_length, draft.in_output)
        probe = ""
        if models and room > 0:
            offers = [one for source, most in models.items() for one in self._offers(source, min(most, room))]
            followed = self._followed(offers, options, tokens, room)
            options += followed
            probe = next((one.source for one in followed if self.model_ledger.due(one.source)), "")
        choice = choose(Ask(options, tokens, room, probe=probe), self._costs)
        candidates = _candidates(contexts, options, choice) if self._explain else ()
        while choice.option >= len(contexts):
            option = options[choice.option]
            chained = option.source in CHAINED_SOURCES
            draft = run(option.source, choice.count if chained else len(option.odds))
            if draft.tokens:
                decision = self._with_model(draft, contexts, options, choice, tokens, room)
                return self._made(replace(decision, candidates=candidates))
            options = [one for one in options if one.source != option.source]
            choice = choose(Ask(options, tokens, room), self._costs)
        if choice.option < 0:
            return self._made(Decision(NOTHING, (), 1.0, tokens, candidates))
        odds = tuple(options[choice.option].odds[: choice.count])
        draft = cut(contexts[choice.option], choice.count)
        return self._made(Decision(draft, odds, choice.gain, tokens, candidates))

    def follows(self, source: str) -> bool:
        """Whether the model of this source is to follow the text."""
        return self._follow.follows(source)

    def observe(self, verdict: Verdict, burden: Burden = ALONE_IN_STEP) -> float:
        """What the step emitted, having verified the draft or, where rows were short, its beginning; returns
        what it cost, in plain steps, drafting and following included. `burden`: of a step of several."""
        decision, self._decision = self._decision, None
        self.odds.observe(verdict)
        if decision is None:
            return 1.0
        emitted, drafted = len(verdict.tokens), verdict.drafted
        upkeep = burden.scale * emitted * sum(map(self._costs.upkeep_cost, self._follow.sources()))
        spent = burden.scale * decision.spent
        rows = burden.of_rows(drafted, self._costs, decision.context)
        model = bool(decision.ran)
        context = bool(drafted) and (not model or decision.draft.source != decision.ran)
        self.context_ledger.settle(emitted, rows if context else None)
        if not model:
            cost = emitted + upkeep if upkeep else None
        else:
            cost = upkeep + spent + (emitted if context else rows)
        self.model_ledger.settle(emitted, cost)
        self._follow.emitted(emitted)
        if model:
            self.model_ledger.tried(decision.ran, paid=emitted > rows + spent)
        return rows + spent + upkeep

    def _followed(
        self, offers: Sequence[Option], contexts: Sequence[Option], tokens: int, room: int
    ) -> list[Option]:
        """The models that may draft now; of those whose following costs something it is settled which do."""
        first = {one.source: one for one in reversed(offers)}  # of every model the cheapest pass
        paid = [one for one in first.values() if self._costs.upkeep_cost(one.source)]
        if not paid:
            return list(offers)
        ready = [one for one in offers if self._follow.ready(one.source)]
        best = choose(Ask((*contexts, *offers), tokens, room), self._costs).option - len(contexts)
        one_row = self._costs.step_costs(tokens)[2] - 1.0
        for one in paid:
            upkeep, credit = self._costs.upkeep_cost(one.source), self.model_ledger.credit
            wanted = best >= 0 and offers[best].source == one.source
            again = one_row + one.fixed + one.each + WARM * upkeep * (one not in ready)
            wanted = wanted or (self.model_ledger.due(one.source) and credit >= again)
            self._follow.settle(one.source, wanted, credit > (0.0 if one in ready else WARM * upkeep))
        return [one for one in ready if self._follow.follows(one.source)]

    def _made(self, decision: Decision) -> Decision:
        self._decision = decision
        return decision

    def _credit(self, draft: Draft) -> float:
        """What it may cost if it fails, which what must come does not."""
        return self.context_ledger.credit if draft.source != FORCED else inf

    def _context_odds(self, draft: Draft, room: int) -> list[float]:
        count = min(len(draft.tokens), room)
        return self.odds.context(draft.source, draft.match_length, draft.in_output, count)

    def _offers(self, source: str, count: int) -> list[Option]:
        """Running a model for up to `count` tokens; of one that drafts blocks, one option for each length."""
        odds, credit = self.odds.model(source, count), self.model_ledger.credit
        if source in CHAINED_SOURCES:
            return [Option(source, odds, credit, each=self._costs.draft_cost(source))]
        costs = self._costs.block_costs(source)
        shorter = [Option(source, odds[:most], credit, one) for most, one in costs if most < count]
        return [*shorter, Option(source, odds, credit, drafting_cost(self._costs, source, count))]

    def _with_model(
        self,
        draft: Draft,
        contexts: Sequence[Draft],
        options: Sequence[Option],
        choice: Choice,
        tokens: int,
        room: int,
    ) -> Decision:
        """A model's draft, joined with the likeliest continuation of the context, as long as it pays."""
        own = self.odds.model(draft.source, len(draft.tokens), draft.scores)
        self.odds.model_proposed(draft.source, draft.tokens, draft.scores)
        best = max(range(len(contexts)), key=lambda index: choice.gains[index], default=-1)
        context = contexts[best] if best >= 0 else NOTHING
        branches = join(draft.tokens, context.tokens, own, options[best].odds if best >= 0 else ())
        asked_for = options[choice.option]
        spent = asked_for.fixed + asked_for.each * len(draft.tokens)
        model, own_text = self.model_ledger.credit - spent, self.context_ledger.credit
        asked = [
            Option(draft.source, one.odds, own_text if one.extended == len(one.tokens) else model)
            for one in branches
        ]
        length = choose(Ask(asked, tokens, room, spent), self._costs)
        fused, count = branches[max(length.option, 0)], length.count
        if choice.probe and not count:
            count = min(choice.count, PROBE_TOKENS, len(fused.tokens))
        first = len(fused.tokens) - fused.extended
        if not first:
            made = cut(context, count)
        else:
            made = Draft(
                fused.tokens[:count], draft.source, draft.scores[: min(first, count)], context.match_length,
                max(0, count - first), context.source or LOOKUP, context.in_output,
            )  # fmt: skip
        odds = tuple(fused.odds[:count])
        return Decision(made, odds, length.gain, tokens, (), draft.source, spent, choice.probe)


def _candidates(
    contexts: Sequence[Draft], options: Sequence[Option], choice: Choice
) -> tuple[Candidate, ...]:
    matches = [draft.match_length for draft in contexts] + [0] * (len(options) - len(contexts))
    return tuple(
        Candidate(option.source, match, tuple(option.odds), option.credit, gain)
        for option, match, gain in zip(options, matches, choice.gains, strict=True)
    )
