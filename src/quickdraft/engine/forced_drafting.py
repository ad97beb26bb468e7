"""ForcedDrafting: one source at one length in every step, to measure what it is worth.

It keeps what was drafted where; speculation that pays is engine/drafters. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quickdraft.engine.drafters import Asking, Drafting
from quickdraft.speculate.draft import Draft, SequenceView, Verdict


class ForcedDrafting(Drafting):
    """In the place of an engine's own. `accepted`: how many full drafts kept 0, 1, .. tokens."""

    def __init__(self, own: Drafting, source: str, length: int) -> None:
        super().__init__(own.drafters)
        self._forced = next(one for one in own.drafters if one.source == source)
        self._length = length
        self._made: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # text before, draft
        self.accepted = [0] * (length + 1)

    def propose_all(self, asking: Sequence[Asking], rows: int) -> list[Draft]:
        """The source's draft for each, as long as the step has room for."""
        return [self._draft(one, min(one.room, rows, self._length)) for one in asking]

    def _draft(self, asking: Asking, count: int) -> Draft:
        if asking.speculation.off or count <= 0:
            return Draft()
        view = asking.view
        draft = self._forced.propose(view, count)
        if len(draft.tokens) == self._length:
            self._made.append((tuple(view.tokens), draft.tokens))
        return draft

    def observe(self, view: SequenceView, verdict: Verdict, taps: Any = None) -> None:
        """See Drafting; counts what was kept of full drafts."""
        if verdict.drafted == self._length:
            self.accepted[verdict.accepted] += 1
        super().observe(view, verdict, taps)

    def slot_accuracy(self, texts: Sequence[tuple[int, ...]]) -> list[float]:
        """Share of right tokens by slot among all full drafts, right ones before or not; `texts` are whole:
        prompts with their answers. What a text has no token for is left out."""
        right, total = [0] * self._length, [0] * self._length
        for before, draft in self._made:
            text = next((text for text in texts if text[: len(before)] == before), ())
            for slot, (token, found) in enumerate(zip(text[len(before) :], draft, strict=False)):
                total[slot] += 1
                right[slot] += token == found
        return [hits / max(all_, 1) for hits, all_ in zip(right, total, strict=True)]
