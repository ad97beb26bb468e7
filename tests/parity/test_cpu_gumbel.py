"""The CPU Gumbel choice is the oracle's, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from quickdraft.ops.cpu.backend import CpuOps
from quickdraft.ops.reference import gumbel as oracle
from tests.support.objects import VARIANTS

SEEDS = (0, 1, 2**32 - 1, 2**32, 2**63 + 12345, 2**64 - 1)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_choices_are_the_oracles(variant: tuple[int, str]) -> None:
    ops, rng = CpuOps(*variant), np.random.default_rng(0)
    for size in (1, 3, 4, 5, 50, 6001):
        row = rng.standard_normal(size).astype(np.float32)
        for seed in SEEDS:
            for position in (0, 7, 2**32 + 3):
                for temperature in (0.3, 1.0, 1.7):
                    want = oracle.choice(row, temperature, seed, position)
                    assert ops.gumbel_choice(row, temperature, seed, position) == want


@pytest.mark.parametrize("variant", VARIANTS[1:], ids=str)
def test_survivors_are_named_by_their_ids(variant: tuple[int, str]) -> None:
    ops, rng = CpuOps(*variant), np.random.default_rng(1)
    for size in (1, 5, 64, 3000):
        ids = np.sort(rng.choice(200_000, size, replace=False)).astype(np.int64)
        row = rng.standard_normal(size).astype(np.float32)
        for seed in SEEDS:
            want = oracle.choice(row, 0.8, seed, 11, ids)
            assert ops.gumbel_choice(row, 0.8, seed, 11, ids) == want
            assert ops.gumbel_choice(row, 0.8, seed, 11, ids.tolist()) == want
            order = rng.permutation(size)
            assert ops.gumbel_choice(row[order], 0.8, seed, 11, ids[order]) == want


def test_a_survivor_draws_the_noise_it_has_in_the_whole_row() -> None:
    row = np.random.default_rng(2).standard_normal(5000).astype(np.float32)
    ops = CpuOps(2)
    for position in range(20):
        chosen = ops.gumbel_choice(row, 1.0, 3, position)
        ids = np.unique([chosen, *range(0, 5000, 97)])
        assert ops.gumbel_choice(row[ids], 1.0, 3, position, ids) == chosen


@pytest.mark.parametrize("variant", VARIANTS[1:], ids=str)
def test_noise_agrees_to_the_last_bit(variant: tuple[int, str]) -> None:
    """Two tokens whose scores are moved through equality by steps of one unit in the last place: an error of
    one bit in any noise would change a choice. (Rows of 8, so that the vector code runs.)"""
    ops, flips = CpuOps(*variant), 0
    for token in range(0, 4000, 17):
        ids = np.array([token, token + 1, *range(90_000, 90_006)], np.int64)
        first, second = oracle.gumbel(5, token, ids[:2])
        row = np.full(8, -np.inf, np.float32)
        row[:2] = [0.0, np.sign(first - second)]
        middle = 1 / abs(first - second)
        temperatures = [middle + step * np.spacing(middle) for step in range(-6, 7)]
        want = [oracle.choice(row, t, 5, token, ids) for t in temperatures]
        assert [ops.gumbel_choice(row, t, 5, token, ids) for t in temperatures] == want
        flips += len(set(want)) == 2
    assert flips > 200  # the steps did cross equality


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_minus_infinity_never_wins(variant: tuple[int, str]) -> None:
    ops = CpuOps(*variant)
    row = np.full(5000, -np.inf, np.float32)
    for survivor in (0, 3, 4, 2500, 4999):
        alone = row.copy()
        alone[survivor] = -1e30
        assert ops.gumbel_choice(alone, 0.5, 9, 9) == survivor
    assert ops.gumbel_choice(row, 1.0, 0, 0) == oracle.choice(row, 1.0, 0, 0) == 0


def test_equal_scores_go_to_the_lowest_id() -> None:
    row = np.full(9, np.inf, np.float32)
    assert CpuOps(2).gumbel_choice(row, 1.0, 4, 4) == oracle.choice(row, 1.0, 4, 4) == 0
    ids = np.arange(9, 0, -1)
    assert CpuOps(2).gumbel_choice(row, 1.0, 4, 4, ids) == 1


def test_bad_arguments_are_refused() -> None:
    ops, row = CpuOps(1), np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="temperature"):
        ops.gumbel_choice(row, 0.0, 0, 0)
    with pytest.raises(ValueError, match="ids"):
        ops.gumbel_choice(row, 1.0, 0, 0, [1, 2])
    with pytest.raises(ValueError, match="empty"):
        ops.gumbel_choice(row[:0], 1.0, 0, 0)
    row[2] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        ops.gumbel_choice(row, 1.0, 0, 0)
