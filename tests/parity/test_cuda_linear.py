"""The card's linear and embed in Triton's interpreter: against the oracle, and their bits across row
counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quickdraft.errors import UnsupportedError
from quickdraft.ops.cuda import linear, weights
from quickdraft.ops.cuda.weights import PackedGroups
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.ops.weights import Int4Groups, Stacked, Weight
from tests.parity.tolerances import chain
from tests.support.card import card
from tests.support.ops_cases import FORMATS, TWO_LEVEL, random_weight, step_of

OUTPUTS = 70  # a whole tile and a part of one


class Rows:
    def __init__(self, count: int) -> None:
        self.count = count


def inputs_of(name: str) -> int:
    return 512 if name in TWO_LEVEL else 480  # not a multiple of 128


def activations(rows: int, width: int) -> Any:
    """Normal numbers, with a spike, tiny, zero and large rows among them."""
    x = np.random.default_rng(width).standard_normal((rows, width)).astype(np.float32)
    for row in range(rows):
        if row % 7 == 1:
            x[row, : width // 2] = 0
        elif row % 7 == 2:
            x[row, row % width] = 300
        elif row % 7 == 3:
            x[row] *= 1e4
        elif row % 7 == 4:
            x[row] *= 1e-3
        elif row % 7 == 5:
            x[row] = 0
    return x


def multiply(
    ops: Any, x: Any, weight: Weight | Stacked, rows: int, bias: Any = None, residual: Any = None
) -> Any:
    given, out = ops.empty(rows + 1, x.shape[1]), ops.empty(rows + 1, weight.shape[0])
    given[:rows] = x[:rows]
    out[rows:] = 7
    if residual is not None:
        out[:rows] = residual[:rows]
    ops.linear(
        Rows(rows), given, ops.pack(weight), out,
        bias=None if bias is None else ops.constant(bias), residual=None if residual is None else out,
    )  # fmt: skip
    assert (out[rows:] == 7).all()
    return np.array(out[:rows])


def bounds(x: Any, weight: Weight | Stacked) -> Any:
    """Allowed error: of a float32 sum, relative to the sum of magnitudes."""
    return chain(x.shape[1]) * (np.abs(x) @ np.abs(weight.dequantised()).T) + 1e-30


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that sums of a few hundred inputs are cut as those of thousands are."""
    monkeypatch.setattr(weights, "LEAST_BLOCKS", 1)


@pytest.mark.parametrize("name", FORMATS)
def test_linear_agrees_with_the_oracle(name: str) -> None:
    weight, x = random_weight(name, OUTPUTS, inputs_of(name)), activations(6, inputs_of(name))
    packed: Any = card().pack(weight)
    assert packed.splits > 1
    got = multiply(card(), x, weight, 6)
    expected = multiply(ReferenceOps("sixteen"), x, weight, 6)
    assert (np.abs(got - expected) <= bounds(x, weight)).all()


@pytest.mark.parametrize(
    ("name", "outputs"),
    [("int4+zero+row", 33), ("int8", 33), ("q6_k", 33), ("q4_k", 128), ("int4", 128), ("bfloat16", 33)],
)
def test_a_row_does_not_depend_on_the_number_of_rows(
    name: str, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 16, 32 and (of 128 outputs) 64 rows, pieces added by a kernel of their own (to 64 rows) or
    inside one."""
    monkeypatch.setattr(linear, "MULTIPROCESSORS", 1)
    weight, x = random_weight(name, outputs, inputs_of(name)), activations(65, inputs_of(name))
    expected = multiply(card(), x, weight, 65)
    for rows in (1, 16, 17, 33):
        assert multiply(card(), x, weight, rows).tobytes() == expected[:rows].tobytes(), rows
    assert np.isfinite(expected).all()


def test_bias_residual_and_parts_side_by_side() -> None:
    parts = [
        random_weight(name, outputs, 96) for name, outputs in (("int4", 33), ("float16", 5), ("int8", 40))
    ]
    stack, x = Stacked(tuple(parts)), activations(6, 96)
    rng = np.random.default_rng(2)
    bias, residual = (rng.standard_normal(size).astype(np.float32) for size in ((78,), (6, 78)))
    got = multiply(card(), x, stack, 6, bias, residual)
    expected = multiply(ReferenceOps("sixteen"), x, stack, 6, bias, residual)
    room = np.abs(np.concatenate([bias[None], residual])).max() * 2**-22
    assert (np.abs(got - expected) <= bounds(x, stack) + room).all()
    alone = [multiply(card(), x, part, 6) for part in parts]
    plain = multiply(card(), x, stack, 6)
    assert plain.tobytes() == np.concatenate(alone, axis=1).tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_embed_gives_the_exact_values(name: str) -> None:
    table = random_weight(name, 50, inputs_of(name))
    results = []
    for ops in (card(), ReferenceOps()):
        batch, out = ops.batch(8, 1, 2, 2, 50), ops.empty(8, inputs_of(name))
        instead = (int(step_of([(0, 3)], 2).tokens[1]), ops.constant(np.ones(inputs_of(name), np.float32)))
        step_of([(0, 3)], 2).set_on(batch)
        ops.embed(batch, ops.pack(table), out, scale=1.5, instead=instead if name == "int4" else None)
        results.append(np.array(out[:3]))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_bytes_are_those_of_the_file(bits: int) -> None:
    weight = random_weight(f"int{bits}", 64, 2048)
    packed = card().pack(weight)
    assert isinstance(packed, PackedGroups)
    assert packed.nbytes == 64 * 2048 * bits // 8 + 64 * 2048 // 32 * 2


def test_numbers_beyond_half_precision_are_not_hidden() -> None:
    x = np.ones((2, 96), np.float32)
    x[1, 3] = 70_000
    got = multiply(card(), x, random_weight("int8", 20, 96), 2)
    assert np.isfinite(got[0]).all() and not np.isfinite(got[1]).any()


def test_groups_no_kernel_can_cut_are_refused() -> None:
    codes, scales = np.zeros((4, 48), np.uint8), np.ones((4, 6), np.float16)
    with pytest.raises(UnsupportedError, match="multiple of 16"):
        card().pack(Int4Groups(codes, scales, group_size=8))
