"""Statistics of paired arms on synthetic times: windows, the known ratio, the interval's coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quickdraft.bench.paired import Turn, paired_ratio, t_quantile, window_seconds


def test_turns_that_end_on_the_edges_are_the_windows() -> None:
    assert window_seconds([Turn(32, 1.0), Turn(32, 2.0), Turn(8, 0.5)], 32) == [1.0, 2.0, 0.5]


def test_a_turn_over_an_edge_is_divided_by_its_tokens() -> None:
    # 40 tokens in 4 s, 24 in 1.2 s: the first window gets 32/40 of the first turn
    assert window_seconds([Turn(40, 4.0), Turn(24, 1.2)], 32) == pytest.approx([3.2, 2.0])


def test_a_turn_may_span_several_windows_and_no_time_is_lost() -> None:
    turns = [Turn(70, 7.0), Turn(3, 0.6), Turn(60, 3.0)]
    seconds = window_seconds(turns, 32)
    assert len(seconds) == 5
    assert seconds[:2] == pytest.approx([3.2, 3.2])
    assert sum(seconds) == pytest.approx(10.6)


def test_no_turns_no_windows() -> None:
    assert window_seconds([], 32) == []


def test_the_ratio_is_that_of_total_times() -> None:
    ratio = paired_ratio([1.0, 1.0], [0.1, 1.0])
    assert ratio.value == pytest.approx(2.0 / 1.1)  # not (10 + 1) / 2, not sqrt(10)


def test_exact_ratio_gives_a_point_and_one_window_no_interval() -> None:
    exact = paired_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert (exact.value, exact.low, exact.high) == (2.0, 2.0, 2.0)
    one = paired_ratio([2.0], [1.0])
    assert (one.value, one.low, one.high) == (2.0, None, None)


def test_drift_common_to_both_arms_cancels() -> None:
    drift = [1.0, 1.5, 2.0, 3.0, 5.0, 2.0, 1.0, 0.7]
    ratio = paired_ratio([3.0 * d for d in drift], [2.0 * d for d in drift])
    assert ratio.value == pytest.approx(1.5)
    assert ratio.low == pytest.approx(1.5) and ratio.high == pytest.approx(1.5)


def coverage(windows: int, spread: float, trials: int) -> float:
    """Share of trials whose interval holds the true ratio; windows differ by exp(N(0, spread))."""
    random = np.random.default_rng(20)
    truth = 1.0 / math.exp(spread**2 / 2)
    hits = 0
    for _ in range(trials):
        noise = np.exp(random.normal(0, 0.05, (2, windows)))
        ratio = paired_ratio(
            noise[0].tolist(), (noise[1] * np.exp(random.normal(0, spread, windows))).tolist()
        )
        assert ratio.low is not None and ratio.high is not None
        hits += ratio.low <= truth <= ratio.high
    return hits / trials


@pytest.mark.parametrize("windows", [8, 16])
@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_the_interval_covers_the_true_ratio(windows: int, spread: float) -> None:
    assert 0.925 < coverage(windows, spread, 1500) < 0.975


def test_t_quantiles() -> None:
    assert t_quantile(1) == 12.706
    assert t_quantile(7) == 2.365
    assert t_quantile(15) == 2.131
    assert t_quantile(30) == t_quantile(39) == 2.042
    assert t_quantile(60) == t_quantile(119) == 2.000
    assert t_quantile(10**6) == 1.962
    values = [t_quantile(n) for n in range(1, 200)]
    assert values == sorted(values, reverse=True)
