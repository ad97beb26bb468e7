"""Drafting over scripted sources: draft what pays, never much on text that does not repeat, within limits."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from quickdraft.engine.drafters import DEFAULT_MAX_ROWS, Asking, Drafting
from quickdraft.errors import UnsupportedError
from quickdraft.speculate.cost_curve import MeasuredCosts, StepTimes
from quickdraft.speculate.costs import BatchCosts, ConstantCosts
from quickdraft.speculate.draft import Draft, Verdict
from quickdraft.types import Speculation

AUTO, OFF = Speculation(auto=True), Speculation()


@dataclass
class View:
    request_id: str = "r"
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3])
    prompt_length: int = 3
    matcher: None = None


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
    """Lengths drafted over `count` steps; `accept(length)` of each draft are accepted, and where nothing is
    drafted the next token is what would have been if `accept(1)`."""
    lengths = []
    for _ in range(count):
        draft = drafting.propose(View(), speculation, 1000)
        lengths.append(len(draft.tokens))
        accepted = accept(len(draft.tokens))
        right = accepted == len(draft.tokens) and accept(1) > 0
        emitted = (*range(accepted), accepted if right else -1)
        drafting.observe(View(), Verdict(emitted, len(draft.tokens)))
    return lengths


class Untouched:
    """Costs, or a drafter, that nobody may ask for anything."""

    source = "lookup"

    def observe(self, view, verdict, taps) -> None: ...

    def __getattr__(self, name: str):
        raise AttributeError(f"asked for {name}")


def test_off_drafts_nothing_and_asks_for_nothing() -> None:
    drafting = Drafting([Untouched()], Untouched())
    assert steps(drafting, 5, lambda n: n, OFF) == [0] * 5
    assert drafting.propose_all([Asking(View(str(n)), OFF, 9) for n in range(4)], 99) == [Draft()] * 4
    assert not drafting._odds, "nothing is kept of a request that may not draft"


def test_a_request_without_any_proposal_decides_nothing_and_runs_nothing() -> None:
    """Sources that never propose cost a question each, and no look at what steps cost."""

    class Silent(Endless):
        def propose(self, view, budget: int) -> Draft:
            return Draft()

    class Costs(Steep):
        def step_costs(self, context: int) -> list[float]:
            raise AssertionError("nothing is to be decided")

    assert steps(Drafting([Silent("lookup"), Silent("prediction")], Costs()), 5, lambda n: 0) == [0] * 5


def test_copying_reaches_the_cap_of_named_sources_and_more_with_auto() -> None:
    lengths = steps(Drafting([Endless()]), 10, lambda n: n, Speculation.parse("lookup"))
    assert lengths[5:] == [DEFAULT_MAX_ROWS - 1] * 5 == [15] * 5
    assert steps(Drafting([Endless()]), 30, lambda n: n)[-1] > 30


@pytest.mark.parametrize(("text", "longest"), [("lookup@4", 3), ("lookup@1", 0), ("lookup@64", 63)])
def test_the_row_cap_counts_the_last_tokens_row(text: str, longest: int) -> None:
    assert max(steps(Drafting([Endless(match=64)]), 60, lambda n: n, Speculation.parse(text))) == longest


def test_a_budget_clips() -> None:
    drafting = Drafting([Endless()])
    steps(drafting, 20, lambda n: n)
    assert len(drafting.propose(View(), AUTO, 2).tokens) == 2
    assert drafting.propose(View(), AUTO, 0) == Draft()


@pytest.mark.parametrize("speculation", [AUTO, Speculation.parse("lookup@16")])
@pytest.mark.parametrize("match", [3, 5, 12, 64])
def test_text_that_never_repeats_pays_for_no_drafts(speculation: Speculation, match: int) -> None:
    lengths = steps(Drafting([Endless(match=match)]), 400, lambda n: 0, speculation)
    assert sum(lengths) <= 0.02 * 400


def test_a_request_that_starts_to_copy_is_noticed_without_a_row_spent() -> None:
    drafting = Drafting([Endless()])
    steps(drafting, 100, lambda n: 0)
    assert not any(steps(drafting, 10, lambda n: 0))
    copying = steps(drafting, 60, lambda n: n)
    assert max(copying) > 15 and sum(length == 0 for length in copying) < 20


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
    drafting._priors = {}  # both promise the same
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

    def publishing(self, view) -> None: ...


@pytest.mark.parametrize(("match", "source"), [(40, "lookup"), (3, "mtp")])
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
    costs = ConstantCosts(0.1, {"mtp": 0.2})
    lengths = steps(Drafting([model], costs), 600, lambda n: 0)
    assert 5 < model.runs < 30, "never stuck at off, and hardly ever tried"
    assert 0.1 * sum(lengths) + 0.2 * 3 * model.runs < 0.03 * 600
    model.runs = 0
    lengths = steps(Drafting([model]), 40, lambda n: n, Speculation.parse("mtp"))
    assert model.runs == 40 and max(lengths) == 3
    assert max(steps(Drafting([model]), 20, lambda n: n, Speculation.parse("mtp@2"))) == 1


class Blocks(Computing):
    """A block drafter that notes what it is asked for."""

    longest = 7

    def __init__(self) -> None:
        super().__init__()
        self.source, self.asked = "dflash2", list[int]()

    def propose(self, view, budget: int) -> Draft:
        self.asked.append(budget)
        return super().propose(view, budget)


@pytest.mark.parametrize(
    ("right", "passes", "asked"),
    [
        (1, {3: 0.1, 5: 0.5, 7: 0.9}, 3),
        (7, {3: 0.1, 5: 0.2, 7: 0.3}, 7),  # all of it is right: the dearest block pays most
        (4, {3: 0.2, 5: 0.22, 7: 2.0}, 5),
        (7, {}, 7),  # nothing tells the lengths apart
    ],
)
def test_a_block_drafter_is_asked_for_the_length_that_pays(
    right: int, passes: dict[int, float], asked: int
) -> None:
    steps_of = tuple(1.0 + 0.05 * rows for rows in range(64))
    blocks = {"dflash2": passes} if passes else {}
    times = StepTimes(
        tuple(range(1, 65)), (0,), (steps_of,), {"dflash2": max(passes.values(), default=0.1)}, {}, blocks
    )
    model = Blocks()
    drafting = Drafting([model], MeasuredCosts(times))
    lengths = steps(drafting, 60, lambda n: min(n, right), Speculation.parse("dflash2"))
    late = model.asked[-30:]
    assert late.count(asked) > 20 and max(lengths) <= 7
    assert set(model.asked) <= {3, 5, 7}


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


class Steep:
    """A machine on which every row after the second costs as much as four plain steps."""

    def step_costs(self, context: int) -> list[float]:
        return [1.0 + 0.1 * (rows - 1) + 4.0 * max(0, rows - 2) for rows in range(65)]

    def batch_costs(self) -> BatchCosts:
        raise AssertionError("one request alone")

    def draft_cost(self, source: str) -> float:
        return 0.0 if source == "lookup" else 9.0

    def block_costs(self, source: str) -> list[tuple[int, float]]:
        return []

    def upkeep_cost(self, source: str) -> float:
        return 0.0


def test_measured_costs_decide() -> None:
    model = Computing()
    drafting = Drafting([Endless(match=12), model], Steep())
    assert steps(drafting, 9, lambda n: n) == [1] * 9
    assert steps(drafting, 9, lambda n: n, Speculation.parse("mtp")) == [0] * 9 and not model.runs
