"""The card's kv_write and attention in Triton's interpreter: against the oracle, and their bits across row
counts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from quickdraft.ops.cuda import attention
from quickdraft.ops.reference.backend import ReferenceOps
from tests.parity.test_cpu_attention import WIDTH, attend, fresh_kv
from tests.parity.tolerances import TOLERANCES
from tests.support.card import card
from tests.support.ops_cases import step_of

KINDS = ("float32", "float16", "bfloat16", "int8")
CASES = [  # spans (first position, rows) per sequence, query heads, kv heads, head dim; a span is 64
    ([(0, 1)], 3, 1, 64),
    ([(62, 4), (0, 2)], 6, 2, 40),
    ([(130, 17)], 8, 2, 16),  # more pairs than a tile has
    ([(100, 2)], 6, 1, 256),
    ([(200, 3), (5, 63), (66, 1)], 2, 1, 16),  # more rows than a captured step has
]


def largest(kv: Any, kind: str) -> float:
    return 5.0 if kind == "int8" else float(np.abs(kv.values.astype(np.float32)).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_agrees_with_the_oracle(case: Any, kind: str) -> None:
    """The cache's bytes equal the oracle's, whatever fills unused slots; values are near."""
    spans, *heads = case
    step = step_of(spans, 50)
    expected, expected_kv = attend(ReferenceOps(), step, *heads, kind)
    got, kv = attend(card(), step, *heads, kind)
    assert kv.keys.tobytes() == expected_kv.keys.tobytes()
    assert kv.values.tobytes() == expected_kv.values.tobytes()
    assert np.abs(got[:] - expected).max() <= TOLERANCES[f"card {kind}"] * largest(expected_kv, kind)


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_rows_neighbours_and_unused_slots_change_no_bit(kind: str) -> None:
    step = step_of([(120, 9), (3, 2)], 50)
    expected = attend(card(), step, 6, 2, 32, kind)[0][:]
    assert attend(card(), step, 6, 2, 32, kind, each_row=True)[0][:].tobytes() == expected.tobytes()
    assert attend(card(), step, 6, 2, 32, kind, fill=np.nan)[0][:].tobytes() == expected.tobytes()


def test_rows_in_several_starts_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of([(120, 9)], 50)
    expected = attend(card(), step, 6, 2, 32, "float16")[0][:]
    monkeypatch.setattr(attention, "PART_BYTES", 2 * 6 * 32 * 4 * 3)  # two rows at a time
    assert attend(card(), step, 6, 2, 32, "float16")[0][:].tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["float16", "int8"])
@pytest.mark.parametrize("block", [False, True], ids=["causal", "block"])
@pytest.mark.parametrize(("window", "firsts"), [(None, [90, 5]), (17, [0, 0]), (70, [0, 12])])
def test_windows_blocks_and_first_positions(
    window: int | None, firsts: list[int], block: bool, kind: str
) -> None:
    """As in the oracle; what no row sees may be NaN."""
    options = {"window": window, "block": block}
    step = dataclasses.replace(step_of([(126, 6), (17, 3)], 50), seen_from=np.array(firsts, np.int32))
    expected, expected_kv = attend(ReferenceOps(), step, 4, 2, 32, kind, **options)
    got, _ = attend(card(), step, 4, 2, 32, kind, unseen=np.nan, **options)
    assert np.abs(got[:] - expected).max() <= TOLERANCES[f"card {kind}"] * largest(expected_kv, kind)
    if not block:
        alone, _ = attend(card(), step, 4, 2, 32, kind, each_row=True, **options)
        assert alone[:].tobytes() == got[:].tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("part", "bad"), [("key", np.nan), ("value", np.nan), ("value", np.inf)])
def test_a_number_that_is_not_finite_reaches_its_row_and_later_ones_only(
    kind: str, part: str, bad: float
) -> None:
    """Of the other kv head nothing changes, as of the rows before."""
    ops, (heads, kv_heads, dim, rows) = card(), (4, 2, 32, 6)
    step = step_of([(62, rows)], 50)
    first = (heads + (kv_heads if part == "value" else 0)) * dim  # of kv head 0
    results = []
    for number in (0.5, bad):
        kv, batch = fresh_kv(ops, kv_heads, dim, kind, step, 0.0), ops.batch(rows, 1, WIDTH, WIDTH, 50)
        qkv, out = ops.empty(rows, (heads + 2 * kv_heads) * dim), ops.empty(rows, heads * dim)
        qkv[...] = np.random.default_rng(3).standard_normal(qkv.shape)
        qkv[3, first + 7] = np.float32(number)
        step.set_on(batch)
        ops.kv_write(batch, qkv, heads, kv, 1)
        ops.attention(batch, qkv, heads, kv, 1, 0.2, out)
        results.append(out[:].copy())
    good, got = results
    half = heads // kv_heads * dim
    assert np.isnan(got[3:, :half]).all()
    assert got[:3].tobytes() == good[:3].tobytes() and got[:, half:].tobytes() == good[:, half:].tobytes()


def test_wrong_shapes_are_refused() -> None:
    ops = card()
    batch, kv = ops.batch(4, 1, 8, 8, 10), ops.kv_cache(1, 8, 2, 16, "float16")
    with pytest.raises(ValueError, match="multiple"):
        ops.attention(batch, ops.empty(4, 112), 3, kv, 0, 1.0, ops.empty(4, 48))
    with pytest.raises(ValueError, match="qkv rows"):
        ops.kv_write(batch, ops.empty(4, 100), 4, kv, 0)
    with pytest.raises(ValueError, match="pool"):
        ops.kv_write(batch, ops.empty(4, 128), 4, ops.kv_cache(1, 7, 2, 16, "float16"), 0)
    with pytest.raises(TypeError, match="another backend"):
        ops.kv_write(batch, ops.empty(4, 128), 4, ReferenceOps().kv_cache(1, 8, 2, 16, "float16"), 0)
