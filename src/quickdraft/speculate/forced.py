"""ForcedDrafter: proposes what a request's constraint leaves no choice about, so all of it is accepted.

Such a draft saves steps like any other, and costs nothing to make. Its odds are 1 (odds.py).
"""

from __future__ import annotations

from typing import Any

from quickdraft.speculate.constraint import FORCED, ConstraintFailed
from quickdraft.speculate.draft import NOTHING, Draft, Drafter, SequenceView, Verdict, cut


class ForcedDrafter:
    """Implements the Drafter protocol; keeps nothing."""

    source = FORCED

    def propose(self, view: SequenceView, budget: int) -> Draft:
        """The next tokens that must come; see Drafter."""
        if view.matcher is None or budget <= 0:
            return NOTHING
        return Draft(tuple(view.matcher.forced(budget)), FORCED)

    def observe(self, view: SequenceView, verdict: Verdict, taps: Any) -> None:
        """Nothing is learned: what must come is known."""

    def forget(self, request_id: str) -> None:
        """There is nothing to forget."""


def proposed(drafter: Drafter, view: SequenceView, budget: int) -> Draft:
    """What a drafter proposes, up to the first token that the constraint of the sequence forbids. Nothing
    where the constraint fails: the step that asks it for a token ends the request."""
    try:
        draft = drafter.propose(view, budget)
        if view.matcher is None or not draft.tokens or draft.source == FORCED:
            return draft
        return cut(draft, view.matcher.fitting(draft.tokens))
    except ConstraintFailed:
        return NOTHING
