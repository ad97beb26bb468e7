"""take_rows: chosen outputs of a weight of any format have the values they had."""

from __future__ import annotations

import io

import numpy as np
import pytest

from quickdraft.ops.weights import Blocks, Part, take_rows
from tests.support.ops_cases import FORMATS, random_weight


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_taken_in_any_order(name: str) -> None:
    weight = random_weight(name, 24, 256)
    rows = np.random.default_rng(1).permutation(24)[:17]
    taken = take_rows(weight, rows)
    assert type(taken) is type(weight) and taken.shape == (17, 256)
    assert (taken.dequantised() == weight.dequantised()[rows]).all()


def test_rows_are_taken_out_of_a_file() -> None:
    weight = random_weight("float32", 6, 32)
    blocks = Blocks("F32", 32, tuple(Part(io.BytesIO(), 0, 6, lambda: weight) for _ in range(2)))
    assert (take_rows(blocks, np.array([7, 0])).dequantised() == weight.dequantised()[[1, 0]]).all()
