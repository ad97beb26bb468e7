"""Odds of a request, and the table of priors they start from: fitted, kept, and damaged."""

from __future__ import annotations

import json
import random

import pytest

from quickdraft.errors import ModelFormatError
from quickdraft.speculate.draft import Verdict
from quickdraft.speculate.odds import RequestOdds
from quickdraft.speculate.priors import (
    MARGIN_LEVELS,
    MATCHES,
    Judged,
    context_kind,
    fit_priors,
    from_json,
    model_kind,
    shipped,
    to_json,
)


def copied(odds: RequestOdds, right: int, count: int = 15, match: int = 12, in_output: bool = False) -> None:
    """A step whose continuation was right in its first `right` tokens."""
    odds.begin()
    odds.context_proposed("lookup", range(count), match, in_output)
    odds.observe(Verdict((*range(right), -1), count))


def test_longer_matches_and_later_tokens_are_likelier() -> None:
    odds = RequestOdds()
    first = [odds.context("lookup", match, False, 1)[0] for match in (3, 5, 8, 12, 30, 60)]
    assert first == sorted(first) and first[0] < 0.6 < 0.8 < first[-1]
    assert odds.context("lookup", 3, False, 63) == sorted(odds.context("lookup", 3, False, 63))
    for match in (1, 3, 11, 12, 48, 49, 64):
        together = odds.context("lookup", match, True, 20)
        assert together == [odds.context("lookup", match + index, True, 1)[0] for index in range(20)]


def test_a_long_perfect_run_raises_the_odds_at_once_and_refusals_lower_them() -> None:
    odds = RequestOdds()
    copied(odds, 15)
    copied(odds, 15, match=28)
    assert min(odds.context("lookup", 44, False, 15)) > 0.96
    other = odds.context("lookup", 44, True, 1)[0]
    assert other > RequestOdds().context("lookup", 44, True, 1)[0] - 1e-9, "the whole source fares well"
    for _ in range(12):
        copied(odds, 0, match=44)
    assert odds.context("lookup", 44, False, 1)[0] < 0.5
    for _ in range(4):
        copied(odds, 15, match=44)
    assert odds.context("lookup", 44, False, 1)[0] > 0.75, "old verdicts fade"


def test_a_source_is_judged_without_a_row_and_only_as_far_as_tokens_came() -> None:
    odds, before = RequestOdds(), RequestOdds().context("lookup", 12, False, 2)
    odds.begin()
    odds.context_proposed("lookup", (5, 6, 7), 12, False)
    odds.observe(Verdict((5,), 0))
    assert odds.context("lookup", 12, False, 1)[0] > before[0]
    odds.begin()
    odds.observe(Verdict((9,), 0))
    assert odds.context("lookup", 12, False, 1)[0] > before[0], "nothing was proposed, nothing is judged"


def test_margins_tell_a_model_that_knows_from_one_that_guesses() -> None:
    table = {"mtp": fit_priors(list(traces()), ["mtp"])["mtp"]}
    odds = RequestOdds(table)
    clear, close = odds.model("mtp", 3, (9.0, 9.0, 9.0)), odds.model("mtp", 3, (0.1, 0.1, 0.1))
    assert min(clear) > 0.8 > 0.4 > max(close)
    assert close[0] < odds.model("mtp", 1)[0] < clear[0]
    for _ in range(20):
        odds.begin()
        odds.model_proposed("mtp", (1, 2, 3), (9.0, 9.0, 9.0))
        odds.observe(Verdict((-1,), 3))
    assert odds.model("mtp", 3, (9.0, 9.0, 9.0))[0] < 0.3 and odds.model("mtp", 3)[0] < 0.3
    assert len(odds.model("mtp", 40)) == 40


def traces(requests: int = 40) -> list[Judged]:
    """Requests of two classes, in which lookup is nearly always right, or hardly ever."""
    chance, found = random.Random(1), []
    for number in range(requests):
        name, right = f"r{number}", 0.95 if number % 2 else 0.1
        for _ in range(50):
            match = chance.choice([3, 8, 20])
            found.append(Judged(name, "lookup", 0, chance.random() < right, match, match == 20))
            margin = chance.uniform(0.0, 10.0)
            found.append(Judged(name, "mtp", 0, chance.random() < margin / 10, margin=margin))
    return found


def test_fitted_odds_are_the_shares_and_weights_tell_how_much_requests_differ() -> None:
    table = fit_priors(traces(), ["mtp"])
    for match, in_output in ((3, False), (8, False), (20, True)):
        prior = table["lookup"].kinds[context_kind(match, in_output)]
        assert prior.odds == pytest.approx(0.525, abs=0.05) and prior.weight == 2.0, "two classes of requests"
    mtp, bounds = table["mtp"], table["mtp"].margins
    assert len(bounds) == MARGIN_LEVELS - 1 and bounds == pytest.approx((2.5, 5.0, 7.5), abs=0.7)
    by_margin = [mtp.kinds[model_kind(0, margin, bounds)].odds for margin in (1.0, 4.0, 6.0, 9.0)]
    assert by_margin == pytest.approx([0.125, 0.375, 0.625, 0.875], abs=0.06)
    assert mtp.kinds[model_kind(0, None, ())].weight == 6.0, "all requests alike"
    assert fit_priors(traces(), ["mtp"]) == table
    assert all(0 < prior.odds < 1 for one in table.values() for prior in one.kinds)


def test_the_table_comes_back_from_json_and_damage_is_named() -> None:
    table = fit_priors(traces(), ["mtp"])
    value = to_json(table)
    assert from_json(json.loads(json.dumps(value))) == table
    assert "lookup" in shipped() and from_json(to_json(shipped())) == shipped()
    kinds = value["sources"]["lookup"]["kinds"]
    for change in (
        {"schema": "other"}, {"sources": []}, {"sources": {"lookup": {"kinds": kinds[1:], "margins": []}}},
        {"sources": {"lookup": {"kinds": [[1.0, 2.0], *kinds[1:]], "margins": []}}},
        {"sources": {"lookup": {"kinds": kinds, "margins": [3.0, 2.0, 1.0]}}},
        {"sources": {"lookup": {"kinds": kinds}}},
    ):  # fmt: skip
        with pytest.raises(ModelFormatError, match="priors"):
            from_json({**value, **change})
    assert len({context_kind(n, o) for n in MATCHES for o in (False, True)}) == 2 * len(MATCHES)
