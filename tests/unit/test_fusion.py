"""Fusion: the common beginning, then one branch; and what Drafting makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quickdraft.engine.drafters import Drafting
from quickdraft.speculate.draft import Draft, Verdict
from quickdraft.speculate.fusion import agreement, join
from quickdraft.types import Speculation

TOKENS = st.lists(st.integers(0, 2), max_size=8)
ODDS = st.floats(0.0, 1.0)


@given(TOKENS, TOKENS, st.lists(ODDS, min_size=8, max_size=8), st.lists(ODDS, min_size=8, max_size=8))
def test_the_branches_are_the_two_drafts_on_their_common_beginning(
    model: list[int], context: list[int], model_odds: list[float], context_odds: list[float]
) -> None:
    branches = join(model, context, model_odds, context_odds)
    agreed = agreement(model, context)
    assert [list(one.tokens) for one in branches] == [model, context][: 1 + (len(context) > agreed)]
    for branch, own in zip(branches, (model_odds, context_odds), strict=False):
        assert branch.agreed == agreed and len(branch.odds) == len(branch.tokens)
        assert list(branch.odds[agreed:]) == own[agreed : len(branch.tokens)]
        for index in range(agreed):
            assert branch.odds[index] == max(model_odds[index], context_odds[index])
    assert [one.extended for one in branches] == [0, len(context) - agreed][: len(branches)]


@dataclass
class View:
    request_id: str = "r"
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3])
    prompt_length: int = 3
    matcher: None = None


@dataclass
class Scripted:
    """Proposes what it is told; a model where `longest` is given."""

    source: str
    tokens: tuple[int, ...] = ()
    match: int = 0
    runs: int = 0

    def propose(self, view, budget: int) -> Draft:
        self.runs += 1
        return Draft(self.tokens[:budget], self.source, match_length=self.match)

    def observe(self, view, verdict, taps) -> None: ...
    def forget(self, request_id: str) -> None: ...


class Model(Scripted):
    longest, cold_tokens, in_auto = 7, 0, True

    def resumed(self, view) -> None: ...
    def leaving(self, view) -> None: ...


def step(drafting: Drafting, text: str, truth: Sequence[int]) -> Draft:
    """One step of a request whose next tokens are `truth`."""
    draft = drafting.propose(View(), Speculation.parse(text), 63)
    emitted = (*truth[: agreement(draft.tokens, truth)], truth[agreement(draft.tokens, truth)])
    drafting.observe(View(), Verdict(emitted, len(draft.tokens)))
    return draft


COPY = tuple(range(100, 164))


@pytest.mark.parametrize(("text", "rows"), [("8", 7), ("16", 15), ("64", 63)])
def test_copying_fills_the_rows_without_running_the_model(text: str, rows: int) -> None:
    lookup, model = Scripted("lookup", COPY, match=64), Model("dflash2", COPY[:7])
    drafting = Drafting([lookup, model])
    for _ in range(40):
        draft = step(drafting, f"dflash2+lookup@{text}", [*COPY, 0])
    model.runs = 0
    draft = step(drafting, f"dflash2+lookup@{text}", [*COPY, 0])
    assert draft.tokens == COPY[: len(draft.tokens)] and rows - 1 <= len(draft.tokens) <= rows
    assert draft.source == "lookup" and not model.runs


def test_a_match_that_misleads_leaves_the_block_to_the_model() -> None:
    truth = [*range(1, 9)]
    lookup, model = Scripted("lookup", (50,) * 64, match=12), Model("dflash2", tuple(truth[:7]))
    drafting = Drafting([lookup, model])
    drafts = [step(drafting, "dflash2+lookup@16", truth) for _ in range(12)]
    assert [draft.source for draft in drafts[4:]] == ["dflash2"] * 8
    assert drafts[-1].tokens == tuple(truth[:7]) and drafts[-1].extended == 0


def test_a_tail_counts_for_lookup_and_both_learn() -> None:
    truth = [*COPY, 0]
    lookup, model = Scripted("lookup", COPY, match=3), Model("dflash2", COPY[:7])
    drafting = Drafting([lookup, model])
    drafts = [step(drafting, "dflash2+lookup@16", truth) for _ in range(6)]
    first = next(draft for draft in drafts if draft.extended)
    assert first.source == "dflash2" and first.extended == len(first.tokens) - 7
    assert drafting._odds["r"].odds.context("lookup", 3, False, 1)[0] > 0.6, (
        "lookup's part of what was verified was right too"
    )


def test_named_alone_the_model_is_not_fused() -> None:
    lookup, model = Scripted("lookup", COPY, match=12), Model("dflash2", (1, 2, 3))
    draft = step(Drafting([lookup, model]), "dflash2", [*COPY, 0])
    assert draft.tokens == (1, 2, 3)[: len(draft.tokens)] and lookup.runs == 0
