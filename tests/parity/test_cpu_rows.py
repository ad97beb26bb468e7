"""CPU rms_norm, head_norm, swiglu, rope, gather_rows, argmax and top against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quickdraft.ops.cpu.backend import CpuOps
from quickdraft.ops.reference import attention as oracle_attention
from quickdraft.ops.reference import rows as oracle
from tests.parity.tolerances import TOLERANCES
from tests.support.objects import VARIANTS
from tests.support.ops_cases import ODD_ROWS, awkward_rows, step_of


def batch_of(ops: Any, rows: int, wanted: list[int] | None = None, first: int = 0) -> Any:
    batch = ops.batch(rows, 1, 16, 16, 50)
    step_of([(first, rows)], 16, wanted=wanted).set_on(batch)
    return batch


def same_on_all(run: Any) -> Any:
    """run(ops) on every variant; asserts equal bits and returns the first."""
    results = [run(CpuOps(*variant)) for variant in VARIANTS]
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    return results[0]


@pytest.mark.parametrize("width", [1, 7, 8, 9, 16, 23, 24, 31, 576])
@pytest.mark.parametrize("rows", ODD_ROWS)
def test_rms_norm(rows: int, width: int) -> None:
    x, weight = awkward_rows(rows, width), awkward_rows(1, width, seed=2)[0]

    def run(ops: CpuOps) -> Any:
        out = ops.empty(rows, width)
        ops.rms_norm(batch_of(ops, rows).rows, x, weight, 1e-5, out)
        return out

    np.testing.assert_allclose(
        same_on_all(run), oracle.rms_norm(x, weight, 1e-5), rtol=TOLERANCES["rms_norm"], atol=1e-37
    )


@pytest.mark.parametrize(("first", "heads", "head_dim"), [(0, 1, 8), (0, 5, 64), (4, 2, 24), (1, 3, 7)])
def test_head_norm(first: int, heads: int, head_dim: int) -> None:
    begin, end = first * head_dim, (first + heads) * head_dim
    weight = awkward_rows(1, head_dim, seed=2)[0]
    for rows in ODD_ROWS:
        x = awkward_rows(rows, end + 5)

        def run(ops: CpuOps, x: Any = x, rows: int = rows) -> Any:
            normed = x.copy()
            ops.head_norm(batch_of(ops, rows).rows, normed, first, heads, head_dim, weight, 1e-5)
            return normed

        got, expected = same_on_all(run), x.copy()
        oracle.head_norm(expected, first, heads, head_dim, weight, 1e-5)
        np.testing.assert_allclose(got, expected, rtol=TOLERANCES["rms_norm"], atol=1e-37)
        assert got[:, :begin].tobytes() == x[:, :begin].tobytes()
        assert got[:, end:].tobytes() == x[:, end:].tobytes()
    ops = CpuOps(1)
    with pytest.raises(ValueError, match="head_norm: heads"):
        ops.head_norm(batch_of(ops, 1).rows, ops.empty(1, end - 1), first, heads, head_dim, weight, 1e-5)


@pytest.mark.parametrize("width", [1, 7, 100, 129, 300])
@pytest.mark.parametrize("rows", ODD_ROWS)
def test_swiglu(rows: int, width: int) -> None:
    gate_up = awkward_rows(rows, 2 * width)
    gate_up[:, :width] *= 8
    gate_up[0, : min(width, 6)] = [90, -90, -200, 1e30, -1e30, 88.9][: min(width, 6)]

    def run(ops: CpuOps) -> Any:
        out = ops.empty(rows, width)
        ops.swiglu(batch_of(ops, rows).rows, gate_up, out)
        return out

    # e^x overflows above 88.72, so a gate below -88.7 gives 0 where the oracle still has a tiny number
    np.testing.assert_allclose(
        same_on_all(run), oracle.swiglu(gate_up), rtol=TOLERANCES["swiglu"], atol=1e-34
    )


def test_nan_passes_through_rms_norm_and_swiglu() -> None:
    ops = CpuOps(2)
    x = np.ones((2, 40), np.float32)
    x[1, 33] = np.nan
    out, half = ops.empty(2, 40), ops.empty(2, 20)
    ops.rms_norm(batch_of(ops, 2).rows, x, np.ones(40, np.float32), 1e-5, out)
    assert np.isnan(out[1]).all() and np.isfinite(out[0]).all()
    x[1, 3] = np.nan
    ops.swiglu(batch_of(ops, 2).rows, x, half)
    assert np.isnan(half[1]).nonzero()[0].tolist() == [3, 13]


@pytest.mark.parametrize("style", ["interleaved", "half"])
@pytest.mark.parametrize(("heads", "head_dim", "rotary"), [(1, 8, 8), (5, 64, 64), (3, 32, 20), (0, 16, 16)])
def test_rope(style: Any, heads: int, head_dim: int, rotary: int) -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((256, rotary)).astype(np.float32)
    for rows in ODD_ROWS:
        x = awkward_rows(rows, heads * head_dim + 5)

        def run(ops: CpuOps, x: Any = x, rows: int = rows) -> Any:
            turned = x.copy()
            ops.rope(batch_of(ops, rows, first=100), turned, heads, head_dim, table, style)
            return turned

        got, expected = same_on_all(run), x.copy()
        oracle_attention.rope(expected, np.arange(100, 100 + rows), heads, head_dim, table, style)
        largest = 2 * np.abs(table).max() * np.abs(x).max(axis=1, keepdims=True)
        assert (np.abs(got - expected) <= TOLERANCES["rope"] * largest + 1e-37).all()
        assert got[:, heads * head_dim :].tobytes() == x[:, heads * head_dim :].tobytes()


def test_rope_refuses_positions_beyond_its_table() -> None:
    ops = CpuOps(1)
    with pytest.raises(ValueError, match="beyond a table of 100"):
        ops.rope(batch_of(ops, 1, first=100), ops.empty(1, 8), 1, 8, ops.empty(100, 8), "half")
    with pytest.raises(ValueError, match="style"):
        ops.rope(batch_of(ops, 1), ops.empty(1, 8), 1, 8, ops.empty(100, 8), "spiral")  # type: ignore[arg-type]


def test_gather_rows() -> None:
    x = awkward_rows(33, 17)
    for wanted in ([], [0], [32], [0, 5, 31, 32]):

        def run(ops: CpuOps, wanted: list[int] = wanted) -> Any:
            out = ops.empty(4, 17)
            out[...] = 9
            ops.gather_rows(batch_of(ops, 33, wanted), x, out)
            return out

        got = same_on_all(run)
        assert got[: len(wanted)].tobytes() == x[wanted].tobytes()
        assert (got[len(wanted) :] == 9).all()
    ops = CpuOps(1)
    with pytest.raises(ValueError, match="3 rows in this step"):
        ops.gather_rows(batch_of(ops, 33, [0, 1, 2]), x, ops.empty(2, 17))


@pytest.mark.parametrize("width", [1, 5, 8, 33, 64, 1000])
def test_argmax(width: int) -> None:
    rng = np.random.default_rng(width)
    x = rng.integers(-3, 3, (65, width)).astype(np.float32)  # ties everywhere
    x[3] = -np.inf
    x[4, width // 2] = np.nan
    x[5] = np.nan
    x[6, -1] = np.inf
    x[7] = 0
    x[7, ::2] = -0.0
    x[8, -1] = np.nan

    def run(ops: CpuOps) -> Any:
        ids = ops.ints(65)
        ops.argmax(batch_of(ops, 65).rows, x, ids)
        return ids

    got = same_on_all(run)
    assert got.tolist() == oracle.argmax(x).tolist()
    assert (got[[4, 5, 8]] == -1).all()


@pytest.mark.parametrize("k", [0, 1, 2, 20, 999, 1000, 2000])
def test_top(k: int) -> None:
    rng = np.random.default_rng(k)
    for row in (rng.standard_normal(1000), rng.integers(-4, 4, 1000), np.zeros(1000), np.full(1000, np.nan)):
        row = row.astype(np.float32)
        row[rng.integers(0, 1000, 5)] = np.nan
        row[rng.integers(0, 1000, 5)] = -np.inf
        row[rng.integers(0, 1000, 2)] = np.inf
        row[:2] = [0.0, -0.0]
        row.flags.writeable = False
        ids, values = oracle.top(row, k)
        for variant in VARIANTS[1:]:
            got_ids, got_values = CpuOps(*variant).top(row, k)
            assert got_ids.dtype == np.int64 and got_values.dtype == np.float32
            assert got_ids.tolist() == ids.tolist()
            assert got_values.tobytes() == values.tobytes()
