"""The decision of a step: lengths, ties, credit, shared rows; and the most that drafts may cost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quickdraft.speculate.cost_curve import MeasuredCosts, StepTimes
from quickdraft.speculate.costs import ROW_COST, ConstantCosts
from quickdraft.speculate.decide import Decider
from quickdraft.speculate.draft import NOTHING, Draft, Verdict
from quickdraft.speculate.lookup import LookupDrafter
from quickdraft.speculate.policy import MIN_GAIN, TIE, Ask, Ledger, Option, Wish, burden, choose, share

# this CPU, and the same one measured while a neighbour was busy
CPU = MeasuredCosts(
    StepTimes((1, 2, 4, 8, 16), (0, 2048), ((3.78, 4.15, 4.31, 7.44, 14.2), (6.9, 7.9, 10.4, 17.8, 33.5)), {})
)
LOADED = MeasuredCosts(StepTimes((1, 2, 4, 8, 16), (0,), ((5.86, 13.0, 15.2, 24.7, 51.2),), {}))


def length(odds: list[float], costs=CPU, room: int = 63, **more) -> int:
    return choose(Ask([Option("lookup", odds, **more)], 100, room), costs).count


def test_the_length_maximises_expected_tokens_per_time() -> None:
    costs = ConstantCosts(ROW_COST)
    assert length([0.0] * 15, costs) == 0
    assert length([1.0] * 15, costs) == 15 and length([1.0] * 4, costs) == 4
    lengths = [length([odds / 100] * 15, costs) for odds in range(101)]
    assert lengths == sorted(lengths)
    for right in range(1, 5):  # a token that is hardly ever right ends the draft
        assert length([1.0] * right + [0.1] * 3, costs) == right
    assert length([0.95] * 63) < length([0.999] * 63)


def test_near_ties_go_to_the_longer_draft_of_a_text_that_is_copied() -> None:
    for costs in (CPU, LOADED):
        assert length([0.99] * 15, costs) >= 14, "eight rows and sixteen cost nearly the same a token"
        assert length([0.6] * 15, costs) < 6, "what is likely to be refused is no tie"
    for odds in (0.3, 0.6, 0.9, 0.97, 0.999):
        choice = choose(Ask([Option("lookup", [odds] * 63)], 100, 63), CPU)
        expected = list(itertools.accumulate([1.0] + [odds**n for n in range(1, 64)]))
        gains = [expected[n] / CPU.step_costs(100)[n + 1] for n in range(64)]
        assert choice.gains[0] == pytest.approx(max(gains)) and choice.gain >= (1 - TIE) * max(gains)


def test_a_model_pays_for_its_passes_and_a_draft_never_costs_more_than_its_credit() -> None:
    cheap, dear = Option("dflash2", [0.8] * 7, fixed=0.2), Option("dflash2", [0.8] * 7, fixed=4.0)
    chained = Option("mtp", [0.8] * 7, each=0.3)
    counts = [choose(Ask([one], 0, 63), CPU).count for one in (cheap, chained, dear)]
    assert counts[0] > counts[1] > counts[2] == 0
    for credit in (0.0, 0.05, 0.2, 0.5, 1.0, 2.0):
        for option in (Option("a", [1.0] * 15, credit), Option("b", [1.0] * 15, credit, fixed=0.3)):
            choice = choose(Ask([option], 100, 63), CPU)
            extra = CPU.step_costs(100)[1 + choice.count] + option.fixed - 1.0
            assert choice.count == 0 or extra <= credit
    assert choose(Ask([Option("a", [0.9], 0.0), cheap], 0, 63), CPU).option == 1


def test_what_a_model_took_is_spent_whatever_is_verified() -> None:
    odds = [0.5, 0.3]
    assert choose(Ask([Option("dflash2", odds)], 0, 63), ConstantCosts(0.49)).count == 0
    choice = choose(Ask([Option("dflash2", odds)], 0, 63, spent=1.0), ConstantCosts(0.49))
    assert choice.count == 1 and choice.gain == pytest.approx(1.5 / 2.49)


def test_a_probe_is_short_and_within_its_credit() -> None:
    options = [Option("lookup", [0.01] * 9), Option("mtp", [0.1] * 3, 0.5, each=0.1)]
    assert choose(Ask(options, 0, 63), CPU).option == -1
    probe = choose(Ask(options, 0, 63, probe="mtp"), CPU)
    assert (probe.option, probe.count, probe.probe) == (1, 2, True)
    assert choose(Ask([Option("mtp", [0.1] * 3, 0.1, each=0.1)], 0, 63, probe="mtp"), CPU).option == -1


@given(st.lists(st.lists(st.floats(0.01, 1.0), max_size=20), min_size=1, max_size=6), st.integers(0, 80))
def test_shared_rows_are_prefixes_within_the_rows(odds: list[list[float]], rows: int) -> None:
    for costs in (CPU, ConstantCosts()):
        counts = share([Wish(one, 100) for one in odds], costs, rows)
        assert len(counts) == len(odds) and sum(counts) <= rows
        assert all(0 <= count <= len(one) for count, one in zip(counts, odds, strict=True))


def test_few_requests_do_not_notice_each_other_while_rows_last() -> None:
    wishes = [Wish([0.95] * 15, 50), Wish([0.9] * 5, 900), Wish([], 10), Wish([0.97] * 15, 300)]
    assert share(wishes, ConstantCosts(), 60) == [15, 5, 0, 15]
    assert sum(share(wishes, ConstantCosts(), 20)) <= 20, "rows are short"
    copying = [Wish([0.995] * 15, 100 * number) for number in range(4)]
    assert share(copying, CPU, 60) == [15] * 4


def test_short_rows_go_where_they_bring_most() -> None:
    wishes = [Wish([0.5, 0.5, 0.5], 0), Wish([0.99] * 15, 0), Wish([0.8] * 4, 0)]
    for rows in range(1, 20):
        counts = share(wishes, ConstantCosts(0.05), rows)
        best = max(
            (sum(0.5**i for i in range(1, a + 1)) + sum(0.99**i for i in range(1, b + 1))
             + sum(0.8**i for i in range(1, c + 1)), a, b, c)
            for a in range(4) for b in range(16) for c in range(5) if a + b + c <= rows
        )  # fmt: skip
        found = [
            sum(wish.odds[0] ** i for i in range(1, n + 1)) for wish, n in zip(wishes, counts, strict=True)
        ]
        assert sum(found) == pytest.approx(best[0])


def test_rows_that_would_slow_a_full_step_down_are_not_taken() -> None:
    """Four rows of one request are nearly free here; of four requests they are not."""
    odds = [0.5] * 3
    assert length(odds) == 3
    assert share([Wish(odds, 100)] * 4, CPU, 60) == [0, 0, 0, 0]
    assert min(share([Wish([0.99] * 15, 100)] * 4, CPU, 60)) == 15


def test_waits_for_what_does_not_pay_grow_and_end_when_it_does() -> None:
    ledger, probes = Ledger(1.0, 0.01), []
    for token in range(1500):
        if ledger.due("mtp"):
            probes.append(token)
            ledger.tried("mtp", paid=False)
        ledger.settle(1, None)
    gaps = [after - before for before, after in itertools.pairwise(probes)]
    assert gaps == sorted(gaps) and gaps[0] == 16 and gaps[-1] == 256
    ledger.tried("mtp", paid=True)
    ledger.settle(4, None)
    assert ledger.due("mtp")


PHRASE = list(range(100, 130))


def adversary(kind: str, tokens: list[int], drafted: tuple[int, ...], step: int) -> int:
    """The next token of a text on which drafts do not pay."""
    if kind == "fresh":
        return 1000 + len(tokens)
    if kind == "changed endings":  # a phrase again and again, another end each time
        at = len(tokens) % 18
        return PHRASE[at] if at < 14 else 5000 + len(tokens)
    if kind == "teasing":  # right as long as nothing is drafted
        return drafted[0] + 1 if drafted else PHRASE[len(tokens) % 30]
    return PHRASE[len(tokens) % 30] if step % 7 else 9000 + step  # "interrupted"


@pytest.mark.parametrize("kind", ["fresh", "changed endings", "teasing", "interrupted"])
@pytest.mark.parametrize("costs", [CPU, LOADED, ConstantCosts(0.6)], ids=["cpu", "loaded", "constant"])
def test_drafting_and_refused_rows_take_under_three_per_cent(kind: str, costs) -> None:
    """Counted by the curve, of lookup and of a model that is always wrong, whatever text comes."""
    passes = {"dflash2": 0.9}
    costs = (
        ConstantCosts(costs.row_cost, passes)
        if isinstance(costs, ConstantCosts)
        else MeasuredCosts(
            StepTimes(costs.times.rows, costs.times.contexts, costs.times.seconds,
                      {"dflash2": 0.9 * costs.times.seconds[0][0]})
        )
    )  # fmt: skip
    decider, lookup, view, runs = Decider(costs), LookupDrafter(), View(list(PHRASE)), 0

    def run(source: str, count: int) -> Draft:
        nonlocal runs
        runs += 1
        return Draft((7,) * count, source)

    lost = plain = 0.0
    for step in range(600):
        contexts = [lookup.propose(view, 63)]
        draft = decider.decide(contexts, {"dflash2": 7}, len(view.tokens), 63, run).draft
        emitted: list[int] = []
        while len(emitted) <= len(draft.tokens):
            left = draft.tokens[len(emitted) :]
            token = adversary(kind, [*view.tokens, *emitted], left, step)
            emitted.append(token)
            if not left or token != left[0]:
                break
        cost = decider.observe(Verdict(tuple(emitted), len(draft.tokens)))
        view.tokens += emitted
        plain += len(emitted)
        lost += cost - len(emitted)
    assert lost < 0.03 * plain
    assert runs > 1, "a model that may start to be right is tried again"


class View:
    request_id = "r"
    matcher = None

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.prompt_length = tokens, len(tokens)


def test_copying_fills_sixteen_rows() -> None:
    """A text of 500 tokens is written again: at least 13 tokens a step at 16 rows, also by a bad curve."""
    for costs in (CPU, LOADED):
        decider, lookup = Decider(costs), LookupDrafter()
        view = View([*range(100, 600), *range(97, 103)])
        steps, end = 0, len(view.tokens) + 490
        while len(view.tokens) < end:
            draft = decider.decide(
                [lookup.propose(view, 15)], {}, len(view.tokens), 15, lambda *_: NOTHING
            ).draft
            emitted = tuple(view.tokens[-1] + 1 + index for index in range(len(draft.tokens) + 1))
            decider.observe(Verdict(emitted, len(draft.tokens)))
            view.tokens += emitted
            steps += 1
        assert 490 / steps >= 13


def test_plain_decoding_where_nothing_pays() -> None:
    assert length([0.05] * 9) == 0
    assert choose(Ask([], 10, 63), CPU).gain == 1.0
    assert MIN_GAIN > 1.0 and length([0.1] * 9, ConstantCosts(0.1)) == 0


class Followed(View):
    """A request of a toy engine: what it emitted, and what its decisions cost."""

    def __init__(self, tokens: list[int], costs) -> None:
        super().__init__(tokens)
        self.decider, self.lookup = Decider(costs), LookupDrafter()
        self.lost, self.plain, self.followed, self.runs = 0.0, 0, 0, 0

    def step(self, emit, draft=lambda count: (7,) * count) -> None:
        """One step alone; `emit(tokens, rest of the draft)` is the next token."""

        def run(source: str, count: int) -> Draft:
            self.runs += 1
            return Draft(draft(count), source)

        offered = [self.lookup.propose(self, 63)]
        made = self.decider.decide(offered, {"mtp": 3}, len(self.tokens), 63, run).draft
        follows = self.decider.follows("mtp")
        emitted: list[int] = []
        while len(emitted) <= len(made.tokens):
            left = made.tokens[len(emitted) :]
            emitted.append(emit([*self.tokens, *emitted], left))
            if not left or emitted[-1] != left[0]:
                break
        cost = self.decider.observe(Verdict(tuple(emitted), len(made.tokens)))
        self.tokens += emitted
        self.lost, self.plain = self.lost + cost - len(emitted), self.plain + len(emitted)
        self.followed += follows * len(emitted)


def with_upkeep(upkeep: float) -> ConstantCosts:
    return ConstantCosts(0.2, {"mtp": 0.1}, {"mtp": upkeep})


@pytest.mark.parametrize("upkeep", [0.005, 0.03, 0.13, 0.5])
def test_following_is_counted_and_ends_where_the_model_does_not_pay(upkeep: float) -> None:
    """A text the model is always wrong about: rows, passes and following together stay within the bound, and
    it is followed for probes only."""
    request = Followed(list(PHRASE), with_upkeep(upkeep))
    for _ in range(1200):
        request.step(lambda tokens, left: 1000 + len(tokens))
    assert request.lost < 0.03 * request.plain
    assert request.followed < 0.5 * request.plain, "it was left behind"
    free = Followed(list(PHRASE), with_upkeep(0.0))
    for _ in range(1200):
        free.step(lambda tokens, left: 1000 + len(tokens))
    assert free.followed == free.plain, "what costs nothing goes on"


def test_a_model_that_was_left_behind_is_used_again_where_it_pays() -> None:
    request, right = Followed(list(PHRASE), with_upkeep(0.01)), False

    def draft(count: int) -> tuple[int, ...]:
        at = len(request.tokens)
        return tuple(1000 + at + index for index in range(count)) if right else (7,) * count

    for _ in range(300):
        request.step(lambda tokens, left: 1000 + len(tokens), draft)
    assert not request.decider.follows("mtp")
    before, right = request.plain, True
    for _ in range(600):
        request.step(lambda tokens, left: 1000 + len(tokens), draft)
    assert request.decider.follows("mtp") and request.plain - before > 1.5 * 600, "three tokens of four"


def batch(costs, kinds: list[str], steps: int, alone: bool) -> tuple[list[list[int]], float]:
    """Accepted tokens per step of requests over texts of these kinds, decoded together or one by one; and
    what was lost of plain decoding's time."""
    accepted, lost, plain = [list[int]() for _ in kinds], 0.0, 0
    requests = [(index, Followed([*PHRASE, index], costs)) for index in range(len(kinds))]
    for group in [[one] for one in requests] if alone else [requests]:
        for step in range(steps):
            made = [
                one.decider.decide([one.lookup.propose(one, 15)], {}, len(one.tokens), 15, lambda *_: NOTHING)
                for _, one in group
            ]
            wishes = [Wish(each.odds, each.context) for each in made]
            counts = share(wishes, costs, 240)
            weight = burden(wishes, counts, costs)
            for (index, one), each, count in zip(group, made, counts, strict=True):
                drafted, emitted = each.draft.tokens[:count], list[int]()
                while len(emitted) <= count:
                    left = drafted[len(emitted) :]
                    emitted.append(adversary(kinds[index], [*one.tokens, *emitted], left, step))
                    if not left or emitted[-1] != left[0]:
                        break
                lost += one.decider.observe(Verdict(tuple(emitted), count), weight) - len(emitted)
                plain += len(emitted)
                one.tokens += emitted
                accepted[index].append(len(emitted) - 1)
    return accepted, lost / plain


FLAT = MeasuredCosts(StepTimes((1, 16, 64), (0, 2048), ((1.0, 1.02, 1.1), (1.5, 1.53, 1.65)), {}))
KINDS = ["changed endings", "interrupted", "fresh", "copy"]


@pytest.mark.parametrize("costs", [ConstantCosts(), FLAT], ids=["not measured", "nearly free rows"])
def test_accept_counts_do_not_depend_on_neighbours_within_the_budget(costs) -> None:
    together, _ = batch(costs, KINDS, 200, alone=False)
    alone, _ = batch(costs, KINDS, 200, alone=True)
    assert together == alone and max(map(max, together)) >= 8


@pytest.mark.parametrize(
    "kinds", [["changed endings"] * 4, ["fresh"] * 4, ["teasing"] * 4, [*KINDS[:3], "fresh"]]
)
@pytest.mark.parametrize("costs", [CPU, LOADED], ids=["cpu", "loaded"])
def test_a_batch_on_which_drafts_do_not_pay_loses_under_three_per_cent(costs, kinds: list[str]) -> None:
    """Counted by what the steps of the batch take beyond those of plain decoding."""
    _, lost = batch(costs, kinds, 400, alone=False)
    assert lost < 0.03
