"""CPU kv_write and attention against the oracle, and their bits across rows, threads and kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from quickdraft.ops.cpu.backend import CpuOps
from quickdraft.ops.reference import int8_kv
from quickdraft.ops.reference.backend import ReferenceOps
from tests.parity.tolerances import TOLERANCES
from tests.support.objects import OBJECTS
from tests.support.ops_cases import Step, fill_kv, one_row, step_of

WIDTH = 50  # block table width: 800 positions, 4 spans
KINDS = ("float32", "float16", "bfloat16", "int8")


def fresh_kv(ops: Any, kv_heads: int, head_dim: int, kind: str, step: Step, fill: float = 0.0) -> Any:
    """A cache whose used slots hold the same random history on every backend; the rest holds `fill`."""
    sequences = len(step.row_starts) - 1
    kv = ops.kv_cache(2, sequences * WIDTH, kv_heads, head_dim, kind)
    fill_kv(kv, fill)
    rng = np.random.default_rng(9)
    for sequence in range(sequences):
        first = step.positions[step.row_starts[sequence]]
        keys = rng.standard_normal((WIDTH * 16, kv_heads, head_dim)).astype(np.float32)
        values = rng.standard_normal((WIDTH * 16, kv_heads, head_dim)).astype(np.float32)
        for position in range(first):
            block, slot = step.block_tables[sequence, position // 16], position % 16
            if kind == "int8":
                slots = kv.keys[1, block], kv.values[1, block], slot
                int8_kv.write(*slots, keys[position], values[position])
                continue
            kv.keys[1, block, :, :, slot] = keys[position].astype(kv.keys.dtype)
            kv.values[1, block, :, slot, :] = values[position].astype(kv.values.dtype)
    return kv


def attend(
    ops: Any,
    step: Step,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    kind: str,
    *,
    fill: float = 0.0,
    each_row: bool = False,
    unseen: float | None = None,
    **options: Any,
) -> Any:
    """kv_write, then attention, in layer 1: all rows at once, or row by row. `unseen` fills what lies before
    the step's seen_from, or below every window."""
    sequences, rows = len(step.row_starts) - 1, len(step.tokens)
    kv = fresh_kv(ops, kv_heads, head_dim, kind, step, fill)
    for sequence, first in enumerate(lowest_seen(step, options.get("window")) if unseen is not None else ()):
        for position in range(first):
            block, slot = step.block_tables[sequence, position // 16], position % 16
            if kind == "int8":  # codes hold no NaN, their scales do
                for part in (kv.keys, kv.values):
                    part[1, block].reshape(kv_heads, -1)[:, 16 * head_dim :].view(np.float32)[:, slot] = (
                        unseen
                    )
                continue
            kv.keys[1, block, :, :, slot] = kv.values[1, block, :, slot, :] = unseen
    batch = ops.batch(rows, sequences, WIDTH, sequences * WIDTH, 50)
    qkv = ops.empty(rows, (query_heads + 2 * kv_heads) * head_dim)
    qkv[...] = np.random.default_rng(3).standard_normal(qkv.shape)
    out = ops.empty(rows, query_heads * head_dim)
    if not each_row:
        step.set_on(batch)
        ops.kv_write(batch, qkv, query_heads, kv, 1)
        ops.attention(batch, qkv, query_heads, kv, 1, head_dim**-0.5, out, **options)
        return out, kv
    for row in range(rows):
        one_row(step, row).set_on(batch)
        this = ops.constant(qkv[row : row + 1])
        result = ops.empty(1, query_heads * head_dim)
        ops.kv_write(batch, this, query_heads, kv, 1)
        ops.attention(batch, this, query_heads, kv, 1, head_dim**-0.5, result, **options)
        out[row] = result[0]
    return out, kv


def lowest_seen(step: Step, window: int | None) -> list[int]:
    """Per sequence the first position any of its rows sees."""
    firsts = step.positions[step.row_starts[:-1]]
    seen = np.zeros_like(firsts) if step.seen_from is None else step.seen_from
    return [
        int(max(low, 0 if window is None else first - window + 1))
        for low, first in zip(seen, firsts, strict=True)
    ]


CASES = [  # spans (first position, rows) per sequence, query heads, kv heads, head dim
    ([(0, 1)], 3, 1, 16),
    ([(0, 33)], 4, 4, 8),
    ([(5, 7)], 9, 3, 64),
    ([(254, 4)], 6, 2, 32),
    ([(700, 1)], 9, 3, 64),
    ([(511, 2), (0, 1), (300, 16)], 4, 1, 40),
    ([(250, 65), (17, 1)], 5, 5, 128),
    ([(600, 3)], 2, 1, 256),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_agrees_with_the_oracle(case: Any, kind: str) -> None:
    spans, *heads = case
    step = step_of(spans, WIDTH)
    expected, expected_kv = attend(ReferenceOps(), step, *heads, kind)
    got, kv = attend(CpuOps(2), step, *heads, kind)
    assert kv.keys.tobytes() == expected_kv.keys.tobytes()
    assert kv.values.tobytes() == expected_kv.values.tobytes()
    if kind == "int8":
        largest, tolerance = 5.0, TOLERANCES["attention int8"]  # of a few thousand normal numbers
    else:
        largest, tolerance = np.abs(expected_kv.values.astype(np.float32)).max(), TOLERANCES["attention"]
    assert np.abs(got - expected).max() <= tolerance * largest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_threads_and_kernels_change_no_bit(case: Any, kind: str) -> None:
    spans, *heads = case
    step = step_of(spans, WIDTH)
    expected, expected_kv = attend(CpuOps(2), step, *heads, kind)
    for ops in (CpuOps(1), CpuOps(4), CpuOps(8), CpuOps(2, "scalar")):
        got, kv = attend(ops, step, *heads, kind)
        assert got.tobytes() == expected.tobytes(), ops.explain()
        assert kv.keys.tobytes() == expected_kv.keys.tobytes()
    alone, _ = attend(CpuOps(2), step, *heads, kind, each_row=True)
    assert alone.tobytes() == expected.tobytes()


@pytest.mark.parametrize("instructions", OBJECTS)
@pytest.mark.parametrize("kind", KINDS)
def test_unused_slots_may_hold_anything(kind: str, instructions: str) -> None:
    for spans, *heads in CASES:
        step = step_of(spans, WIDTH)
        clean, _ = attend(CpuOps(2, instructions), step, *heads, kind)
        for fill in (np.nan, np.inf, -np.inf):
            dirty, _ = attend(CpuOps(2, instructions), step, *heads, kind, fill=fill)
            assert dirty.tobytes() == clean.tobytes()


SEEN_FROM = [  # spans, per sequence the first position seen, heads
    ([(0, 1)], [0], 3, 1, 16),
    ([(1, 40)], [1], 4, 2, 32),
    ([(700, 3), (17, 20)], [16, 5], 6, 2, 32),
    ([(700, 3), (300, 9), (20, 1)], [700, 289, 20], 9, 3, 40),
    ([(600, 20)], [513], 5, 5, 128),
    ([(255, 3)], [255], 2, 1, 64),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", SEEN_FROM, ids=str)
def test_what_is_not_seen_changes_no_bit(case: Any, kind: str) -> None:
    """Positions before `seen_from`: as in the oracle, and they may hold NaN on any object and any threads."""
    spans, firsts, *heads = case
    step = dataclasses.replace(step_of(spans, WIDTH), seen_from=np.array(firsts, np.int32))
    expected, expected_kv = attend(ReferenceOps(), step, *heads, kind)
    got, _ = attend(CpuOps(2), step, *heads, kind)
    largest = np.abs(expected_kv.values.astype(np.float32)).max()
    assert np.abs(got - expected).max() <= TOLERANCES["attention"] * largest
    everything, _ = attend(CpuOps(2), step_of(spans, WIDTH), *heads, kind)
    assert (everything.tobytes() == got.tobytes()) == (not any(firsts))
    for ops in (CpuOps(1), CpuOps(8), *(CpuOps(2, name) for name in OBJECTS)):
        assert attend(ops, step, *heads, kind, unseen=np.nan)[0].tobytes() == got.tobytes()
        assert attend(ops, step, *heads, kind, each_row=True)[0].tobytes() == got.tobytes()


WINDOWS = [  # spans, per sequence the first position seen, window, heads
    ([(0, 8)], [0], 3, 3, 1, 16),
    ([(40, 8)], [0], 1, 4, 2, 32),
    ([(700, 16), (17, 20)], [0, 5], 32, 6, 2, 32),
    ([(700, 3), (300, 9), (20, 1)], [699, 0, 0], 290, 9, 3, 40),
    ([(520, 16)], [0], 300, 32, 4, 128),
    ([(255, 40)], [0], 17, 2, 1, 64),
    ([(767, 1)], [0], 600, 8, 8, 64),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [False, True], ids=["causal", "block"])
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_windows_and_blocks(case: Any, block: bool, kind: str) -> None:
    """As in the oracle, the same bits on any object, threads and neighbours; below the window may be NaN."""
    spans, firsts, window, *heads = case
    for seen, limit in (([0] * len(spans), None), (firsts, window)):
        options = {"window": limit, "block": block}
        step = dataclasses.replace(step_of(spans, WIDTH), seen_from=np.array(seen, np.int32))
        expected, expected_kv = attend(ReferenceOps(), step, *heads, kind, **options)
        got, _ = attend(CpuOps(2), step, *heads, kind, **options)
        largest = np.abs(expected_kv.values.astype(np.float32)).max() if kind != "int8" else 5.0
        tolerance = TOLERANCES["attention int8" if kind == "int8" else "attention"]
        assert np.abs(got - expected).max() <= tolerance * largest
        for ops in (CpuOps(1), CpuOps(8), *(CpuOps(2, name) for name in OBJECTS)):
            assert attend(ops, step, *heads, kind, unseen=np.nan, **options)[0].tobytes() == got.tobytes()
        if not block:
            alone, _ = attend(CpuOps(2), step, *heads, kind, each_row=True, **options)
            assert alone.tobytes() == got.tobytes()


@pytest.mark.parametrize("rows", [2, 5, 16])
def test_a_window_over_everything_changes_no_bit(rows: int) -> None:
    step = step_of([(500, rows), (3, 4)], WIDTH)
    plain, _ = attend(CpuOps(2), step, 9, 3, 64, "float16")
    for window in (500 + rows, 10**6):
        assert attend(CpuOps(2), step, 9, 3, 64, "float16", window=window)[0].tobytes() == plain.tobytes()
    one = step_of([(500, 1)], WIDTH)
    single, _ = attend(CpuOps(2), one, 9, 3, 64, "float16")
    assert attend(CpuOps(2), one, 9, 3, 64, "float16", block=True)[0].tobytes() == single.tobytes()
    blocks, _ = attend(CpuOps(2), step, 9, 3, 64, "float16", block=True)
    assert blocks[rows - 1].tobytes() == plain[rows - 1].tobytes()  # the last row sees no more than it did
    assert (blocks[: rows - 1] != plain[: rows - 1]).any(axis=1).all()


@pytest.mark.parametrize("ops", [CpuOps(1), ReferenceOps()], ids=["cpu", "reference"])
@pytest.mark.parametrize("first", [-1, 6])
def test_a_row_sees_itself(ops: Any, first: int) -> None:
    step = dataclasses.replace(step_of([(5, 2)], WIDTH), seen_from=np.array([first], np.int32))
    with pytest.raises(ValueError, match="seen from"):
        step.set_on(ops.batch(2, 1, WIDTH, WIDTH, 50))


def test_later_rows_of_the_same_step_stay_unseen() -> None:
    """Row 0 gives the same bits whatever the rows behind it hold."""
    step = step_of([(30, 5)], WIDTH)
    expected, _ = attend(CpuOps(2), step, 4, 2, 16, "float32")
    ops = CpuOps(2)
    kv = fresh_kv(ops, 2, 16, "float32", step)
    batch, qkv, out = ops.batch(5, 1, WIDTH, WIDTH, 50), ops.empty(5, 128), ops.empty(5, 64)
    qkv[...] = np.random.default_rng(3).standard_normal(qkv.shape)
    qkv[3:] = np.nan
    step.set_on(batch)
    ops.kv_write(batch, qkv, 4, kv, 1)
    ops.attention(batch, qkv, 4, kv, 1, 0.25, out)
    assert out[:3].tobytes() == expected[:3].tobytes()
    assert np.isnan(out[3:]).all()


def test_large_scores_neither_overflow_nor_vanish() -> None:
    for ops in (CpuOps(2), ReferenceOps()):
        step = step_of([(0, 40)], WIDTH)
        batch = ops.batch(40, 1, WIDTH, WIDTH, 50)
        step.set_on(batch)
        kv = ops.kv_cache(1, WIDTH, 1, 8, "float32")
        qkv, out = ops.empty(40, 24), ops.empty(40, 8)
        qkv[:, :8] = 100
        qkv[:, 8:16] = np.arange(40)[:, None]
        qkv[:, 16:] = np.arange(40)[:, None]
        ops.kv_write(batch, qkv, 1, kv, 0)
        ops.attention(batch, qkv, 1, kv, 0, 1.0, out)
        np.testing.assert_array_equal(out, np.repeat(np.arange(40, dtype=np.float32)[:, None], 8, axis=1))


@pytest.mark.parametrize("instructions", OBJECTS)
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_kv_write_rounds_like_numpy(kind: str, instructions: str) -> None:
    """Halfway cases, overflow to infinity, subnormal numbers, infinities and NaN."""
    ops = CpuOps(1, instructions)
    dtype = ops.kv_cache(1, 1, 1, 8, kind).keys.dtype  # type: ignore[arg-type]
    every = np.arange(0, 65536, dtype=np.uint16).view(dtype).astype(np.float32)
    every = every[np.isfinite(every)]
    above = np.nextafter(every, np.float32(np.inf), dtype=np.float32)
    with np.errstate(over="ignore"):
        middle = ((every.astype(np.float64) + np.roll(every, -1)) / 2).astype(np.float32)
    edge = np.array([65519.996, 65520, 65536, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan], np.float32)
    numbers = np.concatenate([every, above, middle, edge])
    numbers = numbers[(np.abs(numbers) >= np.finfo(np.float32).tiny) | (numbers == 0) | np.isnan(numbers)]
    numbers = np.resize(numbers, (-(-len(numbers) // 8), 8))
    rows = len(numbers)
    blocks = -(-rows // 16)
    batch, kv = ops.batch(rows, 1, blocks, blocks, 1), ops.kv_cache(1, blocks, 1, 8, kind)  # type: ignore[arg-type]
    positions, starts = np.arange(rows, dtype=np.int32), np.array([0, rows], np.int32)
    table = np.arange(blocks, dtype=np.int32)[None]
    batch.set(np.zeros(rows, np.int32), positions, starts, table, np.zeros(0, np.int32))
    qkv = ops.empty(rows, 24)
    qkv[:, 8:16] = qkv[:, 16:] = numbers
    ops.kv_write(batch, qkv, 1, kv, 0)
    with np.errstate(over="ignore"):
        expected = numbers.astype(dtype)
    for got in (
        kv.keys[0, :, 0].transpose(0, 2, 1).reshape(-1, 8)[:rows],
        kv.values[0, :, 0].reshape(-1, 8)[:rows],
    ):
        nan = np.isnan(expected)
        assert (np.isnan(got) == nan).all()
        assert (got.view(np.uint16)[~nan] == expected.view(np.uint16)[~nan]).all()


def test_wrong_shapes_are_refused() -> None:
    ops = CpuOps(1)
    batch, kv = ops.batch(4, 1, 8, 8, 10), ops.kv_cache(1, 8, 2, 16, "float16")
    step_of([(0, 4)], 8, vocabulary=10).set_on(batch)
    qkv, out = ops.empty(4, 128), ops.empty(4, 64)
    with pytest.raises(ValueError, match="multiple"):
        ops.attention(batch, qkv, 3, kv, 0, 1.0, out)
    with pytest.raises(ValueError, match="qkv rows"):
        ops.attention(batch, ops.empty(4, 100), 4, kv, 0, 1.0, out)
    with pytest.raises(ValueError, match="out is"):
        ops.attention(batch, qkv, 4, kv, 0, 1.0, ops.empty(4, 60))
    with pytest.raises(ValueError, match="pool"):
        ops.kv_write(batch, qkv, 4, ops.kv_cache(1, 7, 2, 16, "float16"), 0)
    with pytest.raises(ValueError, match="head dim"):
        ops.kv_write(batch, ops.empty(4, 96), 4, ops.kv_cache(1, 8, 2, 12, "float16"), 0)
    with pytest.raises(ValueError, match="4 rows in this step"):
        ops.kv_write(batch, ops.empty(3, 128), 4, kv, 0)
