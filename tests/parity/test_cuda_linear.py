"""The card's linear and embed in Triton's interpreter: against the oracle, and their bits across row
counts.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from quickdraft.errors import UnsupportedError
from quickdraft.ops.cuda import linear, weights
from quickdraft.ops.cuda.weights import PackedGroups
from quickdraft.ops.interface import Sixteen
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.ops.weights import Int4Groups, Int8Groups, Stacked, Weight
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


@pytest.mark.parametrize(
    ("name", "kind"),
    [*product(FORMATS, ["float16"]), *product(FORMATS[3:], ["bfloat16"])],
)
def test_linear_agrees_with_the_oracle(name: str, kind: Sixteen) -> None:
    weight, x = random_weight(name, OUTPUTS, inputs_of(name)), activations(6, inputs_of(name))
    ours, oracle = card(), ReferenceOps("sixteen")
    if kind == "bfloat16":
        x[3] *= 10  # 1e5 and more
    for ops in (ours, oracle):
        ops.set_activations(kind)
    packed: Any = ours.pack(weight)
    assert packed.splits > 1
    got, expected = multiply(ours, x, weight, 6), multiply(oracle, x, weight, 6)
    assert (np.abs(got - expected) <= bounds(x, weight)).all()


@pytest.mark.parametrize(
    ("name", "outputs", "kind"),
    [
        ("int4+zero+row", 33, "float16"),
        ("int8", 33, "bfloat16"),
        ("q6_k", 33, "float16"),
        ("q4_k", 128, "bfloat16"),
        ("int4", 128, "float16"),
        ("bfloat16", 33, "float16"),
    ],
)
def test_a_row_does_not_depend_on_the_number_of_rows(
    name: str, outputs: int, kind: Sixteen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces added by a kernel of their own (to 64 rows) or inside one; or, of 128 outputs, sums that are not
    cut, in tiles of 16, 32 and 64 rows."""
    if outputs == 128:
        monkeypatch.setattr(linear, "MULTIPROCESSORS", 1)
        monkeypatch.setattr(weights, "WANTED_PROGRAMS", 1)
    weight, x = random_weight(name, outputs, inputs_of(name)), activations(65, inputs_of(name))
    ops = card()
    ops.set_activations(kind)
    expected = multiply(ops, x, weight, 65)
    for rows in (1, 16, 17, 33):
        assert multiply(ops, x, weight, rows).tobytes() == expected[:rows].tobytes(), rows
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


@pytest.mark.parametrize(("name", "bits_of_a_weight"), [("q4_k", 4.625), ("q5_k", 5.625), ("q6_k", 6.5625)])
def test_k_quants_take_the_bytes_of_their_file(name: str, bits_of_a_weight: float) -> None:
    packed: Any = card().pack(random_weight(name, 64, 2048))
    assert packed.nbytes * 8 == 64 * 2048 * bits_of_a_weight


def test_numbers_beyond_half_precision_are_not_hidden_and_bfloat16_holds_them() -> None:
    x, weight, ops = np.ones((2, 96), np.float32), random_weight("int8", 20, 96), card()
    x[1, 3] = 1e5
    got = multiply(ops, x, weight, 2)
    assert np.isfinite(got[0]).all() and not np.isfinite(got[1]).any()
    ops.set_activations("bfloat16")
    rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.abs(rounded - x).max() < 300
    got = multiply(ops, x, weight, 2)
    assert (np.abs(got - rounded @ weight.dequantised().T) <= bounds(x, weight)).all()


@pytest.mark.parametrize("zero", [0, 1, 8, 128, 255, 256])
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_as_bfloat16_are_exact(bits: int, zero: int) -> None:
    """Every code under every kind of zero point, by one activation of 1 for each input."""
    inputs, most = 1 << bits, 1 << bits
    zero = min(zero, 16) if bits == 4 else zero
    codes = np.arange(most)[None]
    ops, x = card(), np.eye(inputs, dtype=np.float32)
    ops.set_activations("bfloat16")
    scales, group = np.ones((1, 1), np.float16), inputs
    zeros = np.array([[zero - (0 if bits == 4 else 128)]], np.int16)
    weight: Weight = (
        Int4Groups(codes.astype(np.uint8), scales, None, group, zeros)
        if bits == 4
        else Int8Groups((codes - 128).astype(np.int8), scales, None, group, 8, zeros)
    )
    np.testing.assert_array_equal(multiply(ops, x, weight, inputs)[:, 0], codes[0] - zero)


def test_groups_no_kernel_can_cut_are_refused() -> None:
    codes, scales = np.zeros((4, 48), np.uint8), np.ones((4, 6), np.float16)
    with pytest.raises(UnsupportedError, match="multiple of 16"):
        card().pack(Int4Groups(codes, scales, group_size=8))
