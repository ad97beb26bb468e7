"""The simple rule: draft what pays, never much on text that does not repeat, within every limit."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from quickdraft.engine.drafters import DEFAULT_MAX_ROWS, Drafting
from quickdraft.errors import UnsupportedError
from quickdraft.speculate.costs import ROW_COST
from quickdraft.speculate.draft import Draft, Verdict
from quickdraft.speculate.odds import best_length
from quickdraft.types import Speculation

AUTO, OFF = Speculation(auto=True), Speculation()


@dataclass
class View:
    request_id: str = "r"
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3])
    prompt_length: int = 3


class Endless:
    """Always proposes `budget` tokens resting on a match of `match` tokens."""

    def __init__(self, source: str = "lookup", match: int = 12) -> None:
        self.source, self.match = source, match
        self.forgotten: list[str] = []
        self.observed = 0

    def propose(self, view, budget: int) -> Draft:
        return Draft(tuple(range(budget)), self.source, match_length=self.match)

    def observe(self, view, verdict, taps) -> None:
        self.observed += 1

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def steps(drafting: Drafting, count: int, accept, speculation: Speculation = AUTO) -> list[int]:
    """Lengths drafted over `count` steps; `accept(length)` of each draft are accepted."""
    lengths = []
    for _ in range(count):
        draft = drafting.propose(View(), speculation, 1000)
        lengths.append(len(draft.tokens))
        accepted = accept(len(draft.tokens))
        emitted = (*range(accepted), accepted if accepted == len(draft.tokens) else -1)
        drafting.observe(View(), Verdict(emitted, len(draft.tokens)))
    return lengths


def test_off_drafts_nothing() -> None:
    assert steps(Drafting([Endless()]), 5, lambda n: n, OFF) == [0] * 5


def test_copying_reaches_the_default_cap_of_fifteen_drafted_tokens() -> None:
    lengths = steps(Drafting([Endless()]), 12, lambda n: n)
    assert max(lengths) == lengths[-1] == DEFAULT_MAX_ROWS - 1 == 15


@pytest.mark.parametrize(("text", "longest"), [("lookup@4", 3), ("lookup@1", 0), ("lookup@64", 63)])
def test_the_row_cap_counts_the_last_tokens_row(text: str, longest: int) -> None:
    assert max(steps(Drafting([Endless()]), 60, lambda n: n, Speculation.parse(text))) == longest


def test_a_budget_clips() -> None:
    drafting = Drafting([Endless()])
    steps(drafting, 20, lambda n: n)
    assert len(drafting.propose(View(), AUTO, 2).tokens) == 2
    assert drafting.propose(View(), AUTO, 0) == Draft()


@pytest.mark.parametrize("speculation", [AUTO, Speculation.parse("lookup@16")])
@pytest.mark.parametrize("match", [3, 5, 12])
def test_refusals_back_off_and_probe_again(speculation: Speculation, match: int) -> None:
    lengths = steps(Drafting([Endless(match=match)]), 400, lambda n: 0, speculation)
    assert sum(lengths) <= 0.12 * 400, "text that never repeats pays for drafts"
    if match >= 5:
        assert any(lengths[200:]), "a request that starts to copy later would never be noticed"


def test_a_request_that_starts_to_copy_recovers() -> None:
    drafting = Drafting([Endless()])
    steps(drafting, 100, lambda n: 0)
    assert 15 in steps(drafting, 60, lambda n: n)


def test_requests_learn_apart() -> None:
    drafting = Drafting([Endless()])
    alone = steps(Drafting([Endless()]), 10, lambda n: n)
    for _ in range(50):
        other = View("other")
        draft = drafting.propose(other, AUTO, 1000)
        drafting.observe(other, Verdict((-1,), len(draft.tokens)))
    assert steps(drafting, 10, lambda n: n) == alone


def test_the_named_sources_in_their_order_and_only_those() -> None:
    drafting = Drafting([Endless("lookup"), Endless("corpus")])
    assert drafting.propose(View(), Speculation.parse("corpus+lookup"), 9).source == "corpus"
    assert drafting.propose(View(), Speculation.parse("lookup"), 9).source == "lookup"
    with pytest.raises(UnsupportedError, match="dflash2"):
        drafting.check(Speculation.parse("lookup+dflash2"))
    drafting.check(AUTO)


class Computing(Endless):
    """A model that drafts at most three tokens, and counts how often it ran."""

    longest, cold_tokens, in_auto = 3, 0, True

    def __init__(self) -> None:
        super().__init__("mtp", match=0)
        self.runs = 0

    def propose(self, view, budget: int) -> Draft:
        self.runs += 1
        return super().propose(view, budget)

    def resumed(self, view) -> None:
        self.observed += 1

    def leaving(self, view) -> None: ...


@pytest.mark.parametrize(("match", "source"), [(12, "lookup"), (3, "mtp")])
def test_auto_looks_up_strong_matches_and_runs_the_model_otherwise(match: int, source: str) -> None:
    model = Computing()
    drafting = Drafting([Endless(match=match), model])
    if source == "lookup":
        steps(drafting, 3, lambda n: n)
        model.runs = 0
    draft = drafting.propose(View(), AUTO, 1000)
    assert (draft.source, model.runs) == (source, int(source == "mtp"))


def test_a_model_that_is_mostly_wrong_hardly_runs() -> None:
    model = Computing()
    steps(Drafting([model]), 400, lambda n: 0)
    assert 10 < model.runs < 50
    model.runs = 0
    lengths = steps(Drafting([model]), 40, lambda n: n, Speculation.parse("mtp"))
    assert model.runs == 40 and max(lengths) == 3
    assert max(steps(Drafting([model]), 20, lambda n: n, Speculation.parse("mtp@2"))) == 1


def test_hidden_rows_and_starts_reach_the_model() -> None:
    model = Computing()
    drafting = Drafting([Endless(), model])
    drafting.read(View(), None)
    drafting.resumed(View())
    assert model.observed == 2 and drafting.cold_tokens == 0


def test_forget_reaches_every_drafter() -> None:
    drafters = [Endless("lookup"), Endless("corpus")]
    drafting = Drafting(drafters)
    fresh = steps(drafting, 3, lambda n: n)
    assert [drafter.observed for drafter in drafters] == [3, 3]
    drafting.forget("r")
    drafting.forget("never seen")
    assert [drafter.forgotten for drafter in drafters] == [["r", "never seen"]] * 2
    assert steps(drafting, 3, lambda n: n) == fresh


def test_best_length_maximises_expected_tokens_per_time() -> None:
    def best(odds: list[float]) -> int:
        return best_length(odds, lambda count: 1.0 + ROW_COST * count)[0]

    assert best([0.0] * 15) == 0
    assert best([1.0] * 15) == 15
    assert best([1.0] * 4) == 4
    lengths = [best([odds / 100] * 15) for odds in range(101)]
    assert lengths == sorted(lengths)
    for length in range(5):  # a token that is hardly ever right ends the draft
        assert best([1.0] * length + [0.1] * 3) == length


class Steep:
    """A machine on which every row after the second costs as much as four plain steps."""

    def step_cost(self, rows: int, context: int) -> float:
        return 1.0 + 0.1 * rows + 4.0 * max(0, rows - 2)

    def draft_cost(self, source: str) -> float:
        return 0.0 if source == "lookup" else 9.0


def test_measured_costs_decide() -> None:
    model = Computing()
    drafting = Drafting([Endless(match=12), model], Steep())
    assert steps(drafting, 9, lambda n: n) == [1] * 9
    assert steps(drafting, 9, lambda n: n, Speculation.parse("mtp")) == [0] * 9 and not model.runs
