"""Drafting that follows a script or a die instead of the odds: whatever it chooses, no token may change."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from quickdraft.engine.drafters import Asking, Drafting
from quickdraft.speculate.draft import Draft, Drafter, cut
from quickdraft.speculate.fusion import join
from quickdraft.types import Speculation


class OneByOne(Drafting):
    """The first request takes the rows it wants, then the next: `propose` alone decides."""

    def propose_all(self, asking: Sequence[Asking], rows: int) -> list[Draft]:
        drafts: list[Draft] = []
        for one in asking:
            budget = 0 if one.speculation.off else max(0, min(one.room, rows))
            drafts.append(self.propose(one.view, one.speculation, budget))
            rows -= len(drafts[-1].tokens)
        return drafts


class RandomDrafting(OneByOne):
    """At every step a source, or a model joined with the context, and a length at random; the same ones
    for the same tokens, whatever else runs."""

    def __init__(self, drafters: Sequence[Drafter], seed: int) -> None:
        super().__init__(drafters)
        self.seed, self.random = seed, random.Random(seed)
        self.drafted: dict[str, int] = {}  # source -> drafts of which at least a token was verified

    def propose(self, view: Any, speculation: Speculation, budget: int) -> Draft:
        self.random.seed(f"{self.seed} {list(view.tokens)}")
        draft = self._any(view, budget)
        draft = cut(draft, self.random.choice([0, 1, 2, 3, 7, 15, 63, len(draft.tokens)]))
        if draft.tokens:
            name = draft.source + "+" * (draft.extended > 0)
            self.drafted[name] = self.drafted.get(name, 0) + 1
        return draft

    def _any(self, view: Any, budget: int) -> Draft:
        """What a source proposes, or a branch of two sources."""
        one, other = self.random.choices(list(self._drafters.values()), k=2)
        draft = one.propose(view, budget)
        if one.source not in self._models or other.source in self._models or not draft.tokens:
            return draft
        context = other.propose(view, budget).tokens
        branch = self.random.choice(join(draft.tokens, context, [0.5] * 64, [0.5] * 64))
        own = len(branch.tokens) - branch.extended
        if not own:
            return Draft(branch.tokens, other.source)
        return Draft(branch.tokens, one.source, draft.scores[:own], extended=branch.extended)


class Counted:
    """A program that says when it runs."""

    def __init__(self, program: Any, name: str, ran: list[str]) -> None:
        self._program, self._name, self._ran = program, name, ran

    def run(self) -> None:
        self._ran.append(self._name)
        self._program.run()
