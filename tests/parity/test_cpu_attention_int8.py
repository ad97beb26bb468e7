"""int8 keys and values: what the other types' tests in test_cpu_attention do not reach."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quickdraft.ops.cpu.backend import CpuOps
from quickdraft.ops.reference import int8_kv
from quickdraft.ops.reference.backend import ReferenceOps
from tests.parity.tolerances import TOLERANCES
from tests.support.objects import OBJECTS
from tests.support.ops_cases import ODD_ROWS, awkward_rows, fill_kv, step_of

WIDTH = 40


def attend(
    ops: Any, first: int, qkv: np.ndarray, heads: tuple[int, int, int], fill: float, chunk: int = 1000
) -> tuple[np.ndarray, Any]:
    """Rows after `first` rows of the same kind, `chunk` at a time; a scale that keeps scores moderate."""
    query_heads, kv_heads, head_dim = heads
    kv, total = ops.kv_cache(1, WIDTH, kv_heads, head_dim, "int8"), len(qkv)
    fill_kv(kv, fill)
    batch, rows = ops.batch(total, 1, WIDTH, WIDTH, 50), ops.empty(total, qkv.shape[1])
    out, result = ops.empty(total, query_heads * head_dim), []
    sizes = [first] * (first > 0) + [min(chunk, total - at) for at in range(first, total, chunk)]
    at = 0
    for size in sizes:
        step_of([(at, size)], WIDTH).set_on(batch)
        rows[:size] = qkv[at : at + size]
        ops.kv_write(batch, rows, query_heads, kv, 0)
        ops.attention(batch, rows, query_heads, kv, 0, 0.1, out)
        result.append(out[:size].copy())
        at += size
    return np.concatenate(result), kv


def awkward(rows: int, heads: tuple[int, int, int]) -> np.ndarray:
    """Zero rows, spikes and tiny rows among queries, keys and values alike; huge values only."""
    query_heads, kv_heads, head_dim = heads
    qkv = awkward_rows(rows, (query_heads + 2 * kv_heads) * head_dim)
    queries_and_keys = (query_heads + kv_heads) * head_dim
    huge = np.abs(qkv[:, :queries_and_keys]).max(axis=1) > 1e6
    qkv[huge, :queries_and_keys] *= np.float32(1e-15)
    return qkv


@pytest.mark.parametrize("rows", ODD_ROWS)
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 24), (7, 1, 8)], ids=str)
def test_awkward_rows_follow_the_oracle_and_change_no_bit(heads: tuple[int, int, int], rows: int) -> None:
    first = 230
    qkv = awkward(first + rows, heads)
    expected, expected_kv = attend(ReferenceOps(), first, qkv, heads, 0.0)
    got, kv = attend(CpuOps(2), first, qkv, heads, 0.0)
    assert kv.keys.tobytes() == expected_kv.keys.tobytes()
    assert kv.values.tobytes() == expected_kv.values.tobytes()
    error = np.abs(got - expected)
    assert error.max() <= TOLERANCES["attention int8"] * np.abs(expected).max()
    for other in (CpuOps(1), CpuOps(5), *(CpuOps(2, name) for name in OBJECTS)):
        for chunk in (1000, 1, 5):
            for fill in (0.0, np.nan):
                bits, _ = attend(other, first, qkv, heads, fill, chunk)
                assert bits.tobytes() == got.tobytes(), (other.explain(), chunk, fill)


@pytest.mark.parametrize("instructions", OBJECTS)
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_at_the_edge_of_int32(instructions: str, sign: int) -> None:
    """Codes of 127 against codes of 32767 everywhere: 256 dims in q.k, 256 positions of equal weight."""
    heads, rows = (2, 1, 256), 512
    qkv = np.full((rows, 4 * 256), 3.0, np.float32)
    qkv[:, 3 * 256 :] = 0.5 * sign
    out, kv = attend(CpuOps(2, instructions), 0, qkv, heads, 0.0)
    codes = kv.values.reshape(WIDTH, -1)[:, : 256 * 16].view(np.int8)
    assert (codes == 127 * sign).sum() == rows * 256
    np.testing.assert_allclose(out, 0.5 * sign, rtol=1e-6)


@pytest.mark.parametrize("instructions", OBJECTS)
def test_codes_reach_127_and_zero_rows_are_zero(instructions: str) -> None:
    ops = CpuOps(1, instructions)
    x = np.array([[0.0] * 8, [1, -1, 0.5, -0.25, 0.003, 0.004, 1 / 254, -3 / 254], [1e-39] * 8], np.float32)
    batch, kv = ops.batch(3, 1, 1, 1, 50), ops.kv_cache(1, 1, 1, 8, "int8")
    step_of([(0, 3)], 1).set_on(batch)
    qkv = ops.empty(3, 24)
    qkv[:, 8:16], qkv[:, 16:] = x, -x
    ops.kv_write(batch, qkv, 1, kv, 0)
    expected = [[0] * 8, [127, -127, 64, -32, 0, 1, 0, -2], [0] * 8]
    for part, places, sign in (
        (kv.keys, lambda slot, d: (d // 2 * 16 + slot) * 2 + d % 2, 1),
        (kv.values, lambda slot, d: (slot // 2 * 8 + d) * 2 + slot % 2, -1),
    ):
        data = part.tobytes()
        stored = np.frombuffer(data, np.int8)
        scales = np.frombuffer(data, np.float32)[32:35]
        assert [[sign * stored[places(s, d)] for d in range(8)] for s in range(3)] == expected
        assert scales.tolist() == [0, np.float32(1) / np.float32(127), 0]


def test_int8_keeps_what_it_stores_to_half_a_step() -> None:
    x = np.random.default_rng(4).standard_normal((50, 64)).astype(np.float32)
    codes, scales = int8_kv.quantise(x)
    assert np.abs(codes * scales[:, None] - x).max() <= 0.5001 * scales.max()
    assert (np.abs(codes).max(axis=1) == 127).all()


def test_a_cache_of_another_type_is_refused() -> None:
    ops = CpuOps(1)
    batch, kv = ops.batch(1, 1, 1, 1, 50), ops.kv_cache(1, 1, 1, 8, "int8")
    qkv = ops.empty(1, 24)
    step_of([(0, 1)], 1).set_on(batch)
    kv.dtype = "float16"
    with pytest.raises(ValueError, match="element type"):
        ops.kv_write(batch, qkv, 1, kv, 0)
    kv.dtype, kv.raw_values = "int8", kv.raw_values[:, :, :, :8]
    with pytest.raises((ValueError, TypeError)):
        ops.kv_write(batch, qkv, 1, kv, 0)
