"""best_output against linear and argmax, in bits: what it leaves unread cannot be the best."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quickdraft.ops.cpu.backend import CpuOps
from quickdraft.ops.interface import BEST_OUTPUT_ROWS
from quickdraft.ops.weights import Int8Groups
from tests.support.objects import OBJECTS, VARIANTS
from tests.support.ops_cases import awkward_rows, random_weight, step_of

GROUPS = 3
INPUTS = 32 * GROUPS


def a_head(outputs: int, seed: int = 0, scale: float = 0.01) -> Int8Groups:
    """Codes over their whole range, scales from subnormal ones to several times `scale`."""
    rng = np.random.default_rng([seed, outputs])
    scales = np.abs(rng.standard_normal((outputs, GROUPS)) * scale).astype(np.float16)
    scales.flat[:: 2 * GROUPS + 1] = np.float16(3e-7)
    return Int8Groups(rng.integers(-128, 128, (outputs, INPUTS)).astype(np.int8), scales)


class Head:
    """One head and both ways to the best output of the rows of `x`."""

    def __init__(self, ops: CpuOps, weight: Int8Groups) -> None:
        self.ops, self.packed = ops, ops.pack(weight)
        self.sketch = ops.sketch(self.packed)
        self.outputs = weight.shape[0]

    def run(self, x: Any) -> tuple[Any, Any, Any, Any]:
        """(ids, logits) of linear and argmax, then of best_output."""
        assert self.sketch is not None
        batch = self.ops.batch(len(x), 1, 8, 8, 10)
        step_of([(0, len(x))], 8, vocabulary=10).set_on(batch)
        logits, bounds = (self.ops.empty(len(x), self.outputs) for _ in range(2))
        expected, ids = self.ops.ints(len(x)), self.ops.ints(len(x))
        self.ops.linear(batch.rows, x, self.packed, logits)
        self.ops.argmax(batch.rows, logits, expected)
        self.ops.best_output(batch.rows, x, self.packed, self.sketch, bounds, ids)
        return expected, logits, ids, bounds


def check(head: Head, x: Any) -> int:
    """Ids are equal, the best logit is exact, no output is below its logit; how many were left as bounds."""
    expected, logits, ids, bounds = head.run(x)
    assert ids.tolist() == expected.tolist()
    for row, best in enumerate(expected):
        if best >= 0:
            assert bounds[row, best].tobytes() == logits[row, best].tobytes()
        if np.isfinite(logits[row]).all():
            assert (bounds[row] >= logits[row] - np.float32(1e-30)).all()
    return int(np.count_nonzero(bounds.view(np.int32) != logits.view(np.int32)))


@pytest.mark.parametrize("threads, instructions", VARIANTS)
def test_random_heads_and_awkward_rows(threads: int, instructions: str) -> None:
    ops = CpuOps(threads, instructions)
    for outputs in (1, 15, 16, 100, 1000):
        head, x = Head(ops, a_head(outputs)), awkward_rows(14, INPUTS)
        for rows in range(1, BEST_OUTPUT_ROWS + 1):
            for first in range(0, 14, rows):
                check(head, np.ascontiguousarray(x[first : first + rows]))


@pytest.mark.parametrize("instructions", OBJECTS)
def test_a_bound_that_equals_the_best_logit_is_not_taken_for_one(instructions: str) -> None:
    """All outputs have one upper bound, and one logit reaches it: in the first tile of the second thread,
    which is looked at first, so that the first thread knows it before it looks at its own."""
    weight, x = a_head(1000), np.random.default_rng(2).standard_normal((1, INPUTS)).astype(np.float32)
    weight.codes[:] = 8 * np.random.default_rng(3).integers(-15, 15, INPUTS)
    weight.scales[:] = np.float16(0.01)
    weight.codes[511] += np.where(x[0] > 0, 7, 0).astype(np.int8)
    head = Head(CpuOps(2, instructions), weight)
    check(head, x)
    assert head.run(x)[2].tolist() == [511]


@pytest.mark.parametrize("instructions", OBJECTS)
def test_an_output_that_stands_out_leaves_the_others_unread(instructions: str) -> None:
    rng = np.random.default_rng(0)
    weight = a_head(1000)
    x = rng.standard_normal((1, INPUTS)).astype(np.float32)
    weight.codes[777] = np.where(x[0] > 0, 127, -127)
    weight.scales[777] = np.float16(0.05)
    assert check(Head(CpuOps(2, instructions), weight), x) > 900


@pytest.mark.parametrize("instructions", OBJECTS)
def test_near_ties_that_the_high_bits_order_the_wrong_way(instructions: str) -> None:
    """Outputs equal but for low bits, and some wholly equal: the lowest id of the largest logit wins."""
    rng = np.random.default_rng(1)
    for seed in range(20):
        weight = a_head(300, seed)
        base = rng.integers(-15, 15, INPUTS) * 8
        weight.codes[:] = base + rng.integers(0, 8, (300, INPUTS))
        weight.scales[:] = np.float16(0.01)
        weight.codes[40:60] = weight.codes[40]
        weight.codes[200:220] = weight.codes[40]
        x = rng.standard_normal((2, INPUTS)).astype(np.float32)
        check(Head(CpuOps(2, instructions), weight), x)
        weight.codes[:] = weight.codes[40]
        assert Head(CpuOps(2, instructions), weight).run(x)[2].tolist() == [0, 0]


@pytest.mark.parametrize("instructions", OBJECTS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_rows_that_no_bound_holds_for(value: float, instructions: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, INPUTS)).astype(np.float32)
    x[1, 40] = value
    for scale in (0.01, 1000.0):  # with the larger one, sums overflow
        check(Head(CpuOps(2, instructions), a_head(200, scale=scale)), x)


def test_weights_that_have_no_sketch() -> None:
    ops, head = CpuOps(2), a_head(40)
    assert ops.sketch(ops.pack(head)) is not None
    for scale in (-0.01, 8200.0):  # eight times the second is no half
        head.scales[39, 2] = scale
        assert ops.sketch(ops.pack(head)) is None
    for name in ("q5_0", "int4+minimum", "float16"):
        assert ops.sketch(ops.pack(random_weight(name, 40, INPUTS))) is None


def test_more_rows_than_it_takes_and_a_sketch_of_another_weight_are_errors() -> None:
    ops = CpuOps(1)
    with pytest.raises(ValueError, match="3 rows in this step"):
        Head(ops, a_head(40)).run(awkward_rows(BEST_OUTPUT_ROWS + 1, INPUTS))
    head = Head(ops, a_head(40))
    head.sketch = Head(ops, a_head(41)).sketch
    with pytest.raises(ValueError, match="sketch is of another weight"):
        head.run(awkward_rows(1, INPUTS))
