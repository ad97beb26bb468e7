"""Source `prediction`: a request brings text that its answer will largely repeat, and that is drafted.

The answer is followed through the prediction token by token. Where it departs, the longest run of
its last tokens that the prediction has says where it comes back; of equally long ones the nearest ahead
of where it left, as edits go forward. One or two tokens alone count only close ahead. Knows tokens only,
and only those of the request itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from quickdraft.speculate.draft import PREDICTION, Draft, SequenceView, Verdict
from quickdraft.speculate.suffix_order import LONGEST_MATCH, SuffixOrder, backwards, sorted_positions

FIRM: Final = 3  # tokens in a row that are no accident
NEAR: Final = 64  # how far ahead fewer than that may come back
FIRST_MATCH: Final = 8  # what the beginning is taken for: who sends a prediction expects it


class Alignment:
    """Where one answer is in its prediction."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = tuple(prediction)
        self._next: int | None = 0  # the position of the token that is predicted to follow
        self._left = 0  # where the answer last left the prediction
        self._recent: list[int] = []  # the last tokens of the answer
        self._order: SuffixOrder | None = None  # made when an answer first departs
        self.match_length = FIRST_MATCH  # tokens in a row that agree so far; 0: astray

    def extend(self, tokens: Sequence[int]) -> None:
        """The answer goes on with `tokens`."""
        if not tokens:
            return
        self._recent = [*self._recent, *tokens][-LONGEST_MATCH:]
        for token in tokens:
            self._follow(token)
        if self._next is None:
            self._come_back()

    def continuation(self, count: int) -> tuple[int, ...]:
        """At most `count` tokens that are predicted to follow; none while the answer is astray."""
        return () if self._next is None else self._prediction[self._next : self._next + count]

    def _follow(self, token: int) -> None:
        at = self._next
        if at is None:
            return
        if at < len(self._prediction) and self._prediction[at] == token:
            self._next = at + 1
            self.match_length += 1
            return
        if self.match_length >= FIRM:
            self._left = at
        self._next, self.match_length = None, 0

    def _come_back(self) -> None:
        if self._order is None:
            text = backwards(self._prediction)
            self._order = SuffixOrder(text, len(self._prediction), sorted_positions(text))
        length, _ = self._order.find(self._recent)
        if not length:
            return
        found = self._order.all_of(self._recent[-length:])
        ahead = found[found > self._left]
        if len(ahead) and (length >= FIRM or int(ahead.min()) <= self._left + NEAR):
            self._next, self.match_length = int(ahead.min()), length
        elif length >= FIRM:
            self._next, self.match_length = int(found.max()), length


class PredictionDrafter:
    """speculate.draft.Drafter over one alignment per request that brought a prediction."""

    source = PREDICTION

    def __init__(self) -> None:
        self._alignments: dict[str, Alignment] = {}
        self._followed: dict[str, int] = {}  # tokens of the sequence, prompt included

    def propose(self, view: SequenceView, budget: int) -> Draft:
        """The prediction's next tokens, at most `budget`; empty without one and while astray."""
        if not view.prediction:
            return Draft()
        alignment = self._alignments.get(view.request_id)
        if alignment is None:
            alignment = self._alignments[view.request_id] = Alignment(view.prediction)
        followed = self._followed.get(view.request_id, view.prompt_length)
        alignment.extend(view.tokens[followed:])
        self._followed[view.request_id] = len(view.tokens)
        tokens = alignment.continuation(max(0, budget))
        return Draft(tokens, self.source, (), alignment.match_length) if tokens else Draft()

    def observe(self, view: SequenceView, verdict: Verdict, taps: Any) -> None:
        """Nothing to learn: the tokens themselves are the state."""

    def forget(self, request_id: str) -> None:
        """Drop the request's alignment."""
        self._alignments.pop(request_id, None)
        self._followed.pop(request_id, None)
