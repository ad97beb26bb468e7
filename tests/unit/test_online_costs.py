"""Costs corrected by the times of steps: a curve measured under load heals, a burst does not stick."""

from __future__ import annotations

import random

import pytest

from quickdraft.speculate.cost_curve import MeasuredCosts, StepTimes
from quickdraft.speculate.online_costs import OnlineCosts

ROWS = (1, 2, 4, 8, 16)
QUIET = StepTimes(
    ROWS, (0, 2048), ((3.78, 4.15, 4.31, 7.44, 14.2), (6.9, 7.9, 10.4, 17.8, 33.5)), {"mtp": 0.4}
)
TRUE = MeasuredCosts(QUIET)
LOADED = StepTimes(ROWS, (0, 2048), ((3.78, 4.15, 4.31, 15.0, 29.0), QUIET.seconds[1]), {"mtp": 0.8})


def curve(costs, context: int = 100) -> list[float]:
    return [costs.step_costs(context)[rows] for rows in (1, 2, 4, 8, 16, 32, 64)]


def run(costs: OnlineCosts, steps: int, seed: int = 0, slow: float = 1.0, rows=(1, 1, 4, 8, 16)) -> None:
    """Steps as a request takes them, some of which something else held up."""
    chance = random.Random(seed)
    for _ in range(steps):
        count = chance.choice(rows)
        late = chance.choice([1.0, 1.0, 1.0, 1.05, 5.0])
        costs.observe_step(count, 100, TRUE.seconds(count, 100) * slow * late)


def test_a_curve_measured_under_load_heals_and_is_kept() -> None:
    costs = OnlineCosts(MeasuredCosts(LOADED))
    assert costs.corrected is None and costs.times == LOADED
    run(costs, 3000)
    assert curve(costs) == pytest.approx(curve(TRUE), rel=0.12)
    for _ in range(400):
        costs.observe_pass("mtp", 0.4, 1)
    kept = costs.corrected
    assert kept is not None and kept.rows[:5] == ROWS and kept.contexts == (0, 2048)
    again = MeasuredCosts(kept)
    assert curve(again) == pytest.approx(curve(costs))
    assert again.draft_cost("mtp") == pytest.approx(TRUE.draft_cost("mtp"), rel=0.15)


def test_a_right_curve_stays_and_is_not_written_again() -> None:
    costs = OnlineCosts(TRUE)
    run(costs, 2000)
    assert curve(costs) == pytest.approx(curve(TRUE), rel=0.06) and costs.corrected is None


@pytest.mark.parametrize("rows", [(16,), (1,), (1, 4, 16)])
def test_a_neighbours_burst_does_not_stick(rows: tuple[int, ...]) -> None:
    costs = OnlineCosts(TRUE)
    run(costs, 300)
    run(costs, 60, slow=4.0, rows=rows)
    assert curve(costs) == pytest.approx(curve(TRUE), rel=0.25), "already while it lasts"
    run(costs, 2000, seed=1)
    assert curve(costs) == pytest.approx(curve(TRUE), rel=0.06)


def test_a_machine_that_is_slower_at_everything_changes_nothing() -> None:
    costs = OnlineCosts(TRUE)
    run(costs, 1500, slow=3.0)
    assert curve(costs) == pytest.approx(curve(TRUE), rel=0.06)


def test_more_rows_never_cost_less_whatever_is_observed() -> None:
    chance, costs = random.Random(2), OnlineCosts(TRUE)
    for _ in range(3000):
        costs.observe_step(
            chance.choice(range(1, 65)), chance.choice([0, 3000]), chance.choice([1e-9, 1.0, 1e9])
        )
        costs.observe_pass("mtp", chance.choice([1e-9, 1e9]), 1)
    for context in (0, 500, 5000):
        costs_by_rows = list(costs.step_costs(context)[1:])
        assert costs_by_rows == sorted(costs_by_rows) and costs_by_rows[0] == 1.0
    for nonsense in (0.0, -1.0, float("nan")):
        costs.observe_step(1, 0, nonsense)


def test_frozen_costs_learn_nothing() -> None:
    costs = OnlineCosts(MeasuredCosts(LOADED), frozen=True)
    run(costs, 1000)
    costs.observe_pass("mtp", 9.0, 1)
    assert curve(costs) == curve(MeasuredCosts(LOADED)) and costs.corrected is None
    assert costs.draft_cost("mtp") == MeasuredCosts(LOADED).draft_cost("mtp")
