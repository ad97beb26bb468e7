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
from quickdraft.speculate.policy import MIN_GAIN, TIE, Ask, Ledger, Option, Wish, choose, share

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
    assert choose(Ask([Option("dflash2", odds)], 0, 63), ConstantCosts(0.45)).count == 0
    choice = choose(Ask([Option("dflash2", odds)], 0, 63, spent=1.0), ConstantCosts(0.45))
    assert choice.count == 1 and choice.gain == pytest.approx(1.5 / 2.45)


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
