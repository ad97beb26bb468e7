"""CPU grouped_conv, top_rows and embed with a row of its own, against the oracle; bits on every object."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quickdraft.ops.cpu.backend import CpuOps
from quickdraft.ops.interface import MAX_TOP_ROWS
from quickdraft.ops.reference.backend import ReferenceOps
from tests.parity.tolerances import TOLERANCES
from tests.support.objects import VARIANTS
from tests.support.ops_cases import random_weight, step_of


def on_all(run: Any) -> tuple[Any, Any]:
    """(the CPU's result, the same bits on every variant; the oracle's) of run(ops)."""
    results = [run(CpuOps(*variant)) for variant in VARIANTS]
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    return results[0], run(ReferenceOps())


@pytest.mark.parametrize(("width", "group"), [(64, 4), (48, 16), (60, 12), (33, 11), (7, 1), (576, 16)])
@pytest.mark.parametrize("counts", [[1], [8], [3, 1, 16, 2]], ids=str)
@pytest.mark.parametrize("kernel", [0, 1])
def test_grouped_conv(width: int, group: int, counts: list[int], kernel: int) -> None:
    step, rows, groups = step_of([(5, count) for count in counts], 8), sum(counts), width // group

    def run(ops: Any) -> Any:
        rng = np.random.default_rng(4)
        batch = ops.batch(rows, len(counts), 8, 8 * len(counts), 50)
        step.set_on(batch)
        x, deltas, out = ops.empty(rows, width), ops.empty(rows, 4 * groups), ops.empty(rows, width)
        base = ops.constant(rng.standard_normal((2, width)).astype(np.float32))
        for part in (x, deltas, out):
            part[...] = rng.standard_normal(part.shape)
        plain = ops.empty(rows, width)
        ops.grouped_conv(batch, x, base, deltas, 2 * groups * kernel, plain)
        ops.grouped_conv(batch, x, base, deltas, 2 * groups * kernel, out, residual=out)
        return np.stack([plain, out])

    got, expected = on_all(run)
    np.testing.assert_allclose(got, expected, rtol=TOLERANCES["rms_norm"], atol=1e-5)


def test_a_convolution_does_not_cross_sequences() -> None:
    """The first row of a sequence takes nothing of the row before it, be it NaN."""
    ops = CpuOps(2)
    batch, step = ops.batch(6, 2, 8, 16, 50), step_of([(0, 3), (16, 3)], 8)
    step.set_on(batch)
    x, deltas, out = ops.empty(6, 24), ops.empty(6, 12), ops.empty(6, 24)
    x[...], base = 1, ops.constant(np.ones((2, 24), np.float32))
    x[2] = np.nan
    ops.grouped_conv(batch, x, base, deltas, 0, out)
    assert np.isnan(out[2]).all()
    assert out[3:].tolist() == [[1] * 24, [2] * 24, [2] * 24]


def test_grouped_conv_refuses_wrong_shapes() -> None:
    ops = CpuOps(1)
    batch, x, out = ops.batch(4, 1, 8, 8, 50), ops.empty(4, 24), ops.empty(4, 24)
    base = ops.constant(np.ones((2, 24), np.float32))
    for deltas, first in ((ops.empty(4, 14), 0), (ops.empty(4, 12), 7), (ops.empty(4, 20), 0)):
        with pytest.raises(ValueError, match="grouped_conv"):
            ops.grouped_conv(batch, x, base, deltas, first, out)
    with pytest.raises(ValueError, match="out must be"):
        ops.grouped_conv(batch, x, base, ops.empty(4, 12), 0, x)
    with pytest.raises(ValueError, match="width 24"):
        ops.grouped_conv(batch, x, base, ops.empty(4, 12), 0, out, residual=ops.empty(4, 23))


@pytest.mark.parametrize("k", [1, 7, 16, 32])
@pytest.mark.parametrize("width", [32, 101, 4099])
def test_top_rows(width: int, k: int) -> None:
    rng = np.random.default_rng(width)
    logits = rng.integers(-40, 40, (9, width)).astype(np.float32)  # ties everywhere
    logits[1] = np.arange(width)
    logits[2] = -logits[1]
    logits[3] = np.nan
    logits[4, 3:] = np.nan
    logits[5, ::2], logits[5, 1::2] = np.inf, -np.inf
    logits[6] = 0

    def run(ops: Any) -> Any:
        batch = ops.batch(9, 1, 8, 8, 50)
        step_of([(0, 9)], 8).set_on(batch)
        ids, values = ops.ints(9 * k), ops.empty(9, k)
        ops.record(lambda: ops.top_rows(batch.rows, logits, k, ids, values)).run()
        return np.concatenate([ids.reshape(9, k).astype(np.float32), values])

    got, expected = on_all(run)
    assert got.tobytes() == expected.tobytes()
    assert (got[3] == -1).all() and (got[12] == -np.inf).all()
    assert got[6].tolist() == list(range(k))


def test_top_rows_refuses_more_than_there_is() -> None:
    ops = CpuOps(1)
    rows = ops.batch(2, 1, 8, 8, 50).rows
    for k, width in ((0, 40), (MAX_TOP_ROWS + 1, 40), (9, 8)):
        with pytest.raises(ValueError, match="top_rows: k is"):
            ops.top_rows(rows, ops.empty(2, width), k, ops.ints(80), ops.empty(2, max(k, 1)))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "q6_k"])
def test_a_row_in_an_embeddings_place(kind: str) -> None:
    width = 256
    table, step = random_weight(kind, 50, width), step_of([(0, 33)], 8)
    masks = step.tokens == step.tokens[7]
    row = np.random.default_rng(1).standard_normal(width).astype(np.float32)

    def run(ops: Any) -> Any:
        batch, x, plain = ops.batch(33, 1, 8, 8, 50), ops.empty(33, width), ops.empty(33, width)
        step.set_on(batch)
        packed = ops.pack(table)
        ops.embed(batch, packed, plain)
        ops.embed(batch, packed, x, scale=3.0, instead=(int(step.tokens[7]), ops.constant(row)))
        assert x[~masks].tobytes() == (plain[~masks] * np.float32(3)).tobytes()
        return x

    got, expected = on_all(run)
    assert got.tobytes() == expected.tobytes()
    assert (got[masks] == row * np.float32(3)).all() and 0 < masks.sum() < 33
