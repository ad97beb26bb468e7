"""The Gumbel choice draws from the stated distribution: chi-square against exact probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from quickdraft.speculate.choose import Chooser
from quickdraft.types import SamplingParams
from tests.support.toy import ToyRow

LOGITS = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0], np.float32)
DRAWS = 20_000
CHI_SQUARE_7 = 29.9  # 0.9999 quantile at 7 degrees of freedom


def exact(params: SamplingParams) -> np.ndarray:
    """Probabilities by definition: temperature, top_k, top_p, min_p, renormalised."""
    weights = np.exp(LOGITS.astype(np.float64) / params.temperature)
    order = np.argsort(-LOGITS, kind="stable")
    keep = order[: params.top_k or None]
    if params.top_p < 1.0:
        total, kept = weights[keep].sum(), []
        for token in keep:
            kept.append(token)
            if weights[kept].sum() >= params.top_p * total:
                break
        keep = np.array(kept)
    keep = keep[weights[keep] >= params.min_p * weights[keep].max()]
    result = np.zeros(len(LOGITS))
    result[keep] = weights[keep] / weights[keep].sum()
    return result


def counts(params: SamplingParams, seed: int = 5) -> np.ndarray:
    """Draws at DRAWS positions of one request."""
    chooser, row = Chooser(params, seed, (), ()), ToyRow(LOGITS)
    found = np.zeros(len(LOGITS))
    for _ in range(DRAWS):
        token = chooser.choose(row)
        chooser.push(token)
        found[token] += 1
    return found


def chi_square(found: np.ndarray, probabilities: np.ndarray) -> float:
    assert (found[probabilities == 0] == 0).all(), "a token that was cut off was drawn"
    live = probabilities > 0
    expected = probabilities[live] * DRAWS
    return float(((found[live] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.3, min_p=0.2),
        SamplingParams(temperature=0.9, top_k=6, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(params: SamplingParams) -> None:
    assert chi_square(counts(params), exact(params)) < CHI_SQUARE_7


def test_the_test_can_fail() -> None:
    drawn = counts(SamplingParams(temperature=1.0))
    assert chi_square(drawn, exact(SamplingParams(temperature=1.1))) > CHI_SQUARE_7


def test_seeds_and_positions_are_independent() -> None:
    params = SamplingParams(temperature=1.0)
    joint = np.zeros((8, 8))
    one, two = Chooser(params, 1, (), ()), Chooser(params, 2, (), ())
    row = ToyRow(LOGITS)
    for _ in range(DRAWS):
        a, b = one.choose(row), two.choose(row)
        one.push(a)
        two.push(b)
        joint[a, b] += 1
    p = exact(params)
    expected = np.outer(p, p) * DRAWS
    statistic = ((joint - expected) ** 2 / expected)[expected > 5].sum()
    assert statistic < 110  # 0.9999 quantile at 63 degrees of freedom is 112


def test_a_point_mass_draft_is_accepted_as_often_as_its_probability() -> None:
    params = SamplingParams(temperature=1.0)
    assert abs(counts(params)[0] / DRAWS - exact(params)[0]) < 0.015
