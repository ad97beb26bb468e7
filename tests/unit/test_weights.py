"""take_rows and take_columns: parts of a weight of any format have the values they had."""

from __future__ import annotations

import io

import numpy as np
import pytest

from quickdraft.ops.weights import Blocks, Dense, Part, TwoLevel, take_columns, take_rows
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


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("first", "last"), [(0, 128), (128, 256), (8, 40)])
def test_columns_keep_their_format_where_whole_groups_are_taken(name: str, first: int, last: int) -> None:
    weight = random_weight(name, 24, 256)
    taken = take_columns(weight, first, last)
    assert (taken.dequantised() == weight.dequantised()[:, first:last]).all()
    grouped = not isinstance(weight, Dense) and weight.order is None
    plain = grouped and not isinstance(weight.scales, TwoLevel)
    plain = plain and first % weight.group_size == last % weight.group_size == 0
    assert (type(taken) is type(weight)) == (isinstance(weight, Dense) or plain)
