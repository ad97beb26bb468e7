"""CPU linear, embed and pack against the oracle, and their bits across rows, threads and kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quickdraft.errors import UnsupportedError
from quickdraft.ops.cpu.backend import CpuOps
from quickdraft.ops.reference import linear as oracle
from quickdraft.ops.weights import (
    Dense,
    Int4Groups,
    Int8Groups,
    TwoLevel,
    Weight,
    concat_rows,
    float32_numbers,
)
from tests.parity.tolerances import chain
from tests.support.objects import OBJECTS, VECTOR
from tests.support.ops_cases import DENSE, FORMATS, ODD_ROWS, TWO_LEVEL, awkward_rows, random_weight, step_of

SHAPES = ((1, 32), (7, 64), (9, 32), (16, 64), (100, 64), (33, 576))
LARGE_SHAPES = ((1, 256), (9, 512), (16, 256), (100, 256), (33, 768))  # for two levels


def a_width(name: str) -> int:
    return 512 if name in TWO_LEVEL else 96


def rows_of(ops: Any, count: int) -> Any:
    batch = ops.batch(max(count, 1), 1, 8, 8, 10)
    if count:
        step_of([(0, count)], 8, vocabulary=10).set_on(batch)
    return batch.rows


def run(ops: CpuOps, x: Any, weight: Weight, **more: Any) -> Any:
    out = ops.empty(len(x), weight.shape[0])
    ops.linear(rows_of(ops, len(x)), x, ops.pack(weight), out, **more)
    return out


def zero_point(weight: Any) -> float:
    """The largest one; 0 where the kernels take none off in floating point."""
    zeros = None if isinstance(weight, Dense) else weight.zeros
    return 0.0 if zeros is None else float(np.abs(zeros).max())


def check(got: Any, x: Any, weight: Weight) -> None:
    expected = oracle.linear(x, weight).astype(np.float64)
    with np.errstate(over="ignore"):
        values = np.abs(weight.dequantised().astype(np.float64))
    magnitudes = np.abs(x.astype(np.float64)) @ values.T
    if not isinstance(weight, Dense) and weight.minimums is not None:
        # scale * code and the minimum cancel: the sum runs over both
        groups = np.abs(x.astype(np.float64)).reshape(len(x), -1, weight.group_size).sum(axis=2)
        largest = np.abs(weight.codes.astype(np.float64)).max()
        magnitudes += largest * groups @ np.abs(float32_numbers(weight.scales).astype(np.float64)).T
        magnitudes += groups @ np.abs(float32_numbers(weight.minimums).astype(np.float64)).T
    elif point := zero_point(weight):
        # so do scale * code and scale * zero point
        groups = np.abs(x.astype(np.float64)).reshape(len(x), -1, weight.group_size).sum(axis=2)
        largest = (15.0 if isinstance(weight, Int4Groups) else 128.0) + point
        magnitudes += largest * groups @ np.abs(float32_numbers(weight.scales).astype(np.float64)).T
    allowed = chain(weight.shape[1]) * magnitudes + 1e-37  # results below fp32's normal numbers flush to 0
    worst = (np.abs(got - expected) / allowed).max()
    assert worst <= 1, f"error {worst:.2f} times the allowed one"


@pytest.mark.parametrize("instructions", OBJECTS)
@pytest.mark.parametrize("name", FORMATS)
def test_linear_agrees_with_the_oracle(name: str, instructions: str) -> None:
    ops = CpuOps(2, instructions)
    for outputs, inputs in LARGE_SHAPES if name in TWO_LEVEL else SHAPES:
        for rows in ODD_ROWS if instructions in VECTOR else (1, 7):
            x = awkward_rows(rows, inputs)
            weight = random_weight(name, outputs, inputs)
            check(run(ops, x, weight), x, weight)


@pytest.mark.parametrize("inputs", [1, 5, 50])
@pytest.mark.parametrize("name", DENSE)
def test_dense_weights_take_any_number_of_inputs(name: str, inputs: int) -> None:
    x, weight = awkward_rows(7, inputs), random_weight(name, 70, inputs)
    check(run(CpuOps(2), x, weight), x, weight)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_threads_and_kernels_change_no_bit(name: str) -> None:
    width = a_width(name)
    x, weight = awkward_rows(65, width), random_weight(name, 133, width)
    together = run(CpuOps(2), x, weight)
    alone = np.concatenate([run(CpuOps(1), x[i : i + 1].copy(), weight) for i in range(65)])
    assert together.tobytes() == alone.tobytes()
    for count in (2, 3, 4, 6, 16, 33, 64):
        assert run(CpuOps(2), x[:count].copy(), weight).tobytes() == together[:count].tobytes()
    for threads in (1, 4, 8):
        assert run(CpuOps(threads), x, weight).tobytes() == together.tobytes()
    assert run(CpuOps(2, "scalar"), x, weight).tobytes() == together.tobytes()


@pytest.mark.parametrize("code", [-128, -127, 127])
def test_int8_codes_at_the_ends_do_not_saturate(code: int) -> None:
    weight = Int8Groups(np.full((20, 64), code, np.int8), np.ones((20, 2), np.float16))
    for sign in (1.0, -1.0):
        x = np.full((3, 64), sign, np.float32)
        x[1, ::2] *= -1
        exact = (x @ weight.dequantised().T.astype(np.float64)).astype(np.float32)
        np.testing.assert_allclose(run(CpuOps(1), x, weight), exact, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize(("bits", "code"), [(5, 0), (5, 31), (6, -32), (6, 31)])
def test_codes_of_five_and_six_bits_at_the_ends_do_not_overflow(bits: int, code: int) -> None:
    codes = np.full((20, 256), code, np.int8)
    halves = np.full((20, 1), -0.5, np.float16)
    scales = TwoLevel(halves, np.full((20, 8 if bits == 5 else 16), 63 if bits == 5 else -128, np.int8))
    minimums = TwoLevel(halves, np.full((20, 8), 63, np.int8)) if bits == 5 else None
    weight = Int8Groups(codes, scales, minimums, 32 if bits == 5 else 16, bits)
    for sign in (1.0, -1.0):
        x = np.full((5, 256), sign, np.float32)
        x[1, ::2] *= -1
        exact = (x @ weight.dequantised().T.astype(np.float64)).astype(np.float32)
        np.testing.assert_allclose(run(CpuOps(1), x, weight), exact, rtol=1e-6, atol=1e-2)


@pytest.mark.parametrize("minimum", [None, -3.5])
def test_int4_codes_at_the_ends_do_not_overflow(minimum: float | None) -> None:
    minimums = None if minimum is None else np.full((20, 2), minimum, np.float16)
    for code in (0, 15):
        weight = Int4Groups(np.full((20, 64), code, np.uint8), np.ones((20, 2), np.float16), minimums)
        for sign in (1.0, -1.0):
            x = np.full((3, 64), sign, np.float32)
            exact = (x @ weight.dequantised().T.astype(np.float64)).astype(np.float32)
            np.testing.assert_allclose(run(CpuOps(1), x, weight), exact, rtol=1e-6)


def test_activations_round_to_nearest_even_and_clamp() -> None:
    """With a largest input of 127 the scale is 1, so codes can be read off an identity weight."""
    x = np.zeros((1, 32), np.float32)
    x[0, :8] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.6, 126.5]
    weight = Int8Groups(np.eye(32, dtype=np.int8), np.ones((32, 1), np.float16))
    got = run(CpuOps(1), x, weight)[0, :8]
    assert got.tolist() == [127, 0, 2, 2, 0, -2, -127, 126]


@pytest.mark.parametrize("name", FORMATS)
def test_nan_and_infinity_reach_the_output(name: str) -> None:
    width = 256 if name in TWO_LEVEL else 64
    weight = random_weight(name, 20, width)
    for broken in (np.nan, np.inf):
        for place in range(0, width, 9):
            x = np.ones((3, width), np.float32)
            x[1, place] = broken
            got = run(CpuOps(1), x, weight)
            assert not np.isfinite(got[1]).any()
            assert np.isfinite(got[[0, 2]]).all()


def test_bias_then_residual_are_added_once() -> None:
    x, weight = awkward_rows(5, 64), random_weight("int8", 100, 64)
    ops = CpuOps(2)
    plain = run(ops, x, weight)
    bias = ops.constant(np.arange(100, dtype=np.float32))
    residual = awkward_rows(5, 100, seed=3)
    got = run(ops, x, weight, bias=bias, residual=residual)
    assert got.tobytes() == ((plain + bias) + residual).tobytes()
    out = residual.copy()  # out may be residual
    ops.linear(rows_of(ops, 5), x, ops.pack(weight), out, bias=bias, residual=out)
    assert out.tobytes() == got.tobytes()


@pytest.mark.parametrize("instructions", OBJECTS)
def test_stacked_weights_are_their_parts_side_by_side(instructions: str) -> None:
    """Neighbours of one format are merged; every part gets its own columns, bias and residual."""
    ops = CpuOps(2, instructions)
    kinds = (("q4_k", 100), ("q4_k", 7), ("q6_k", 33), ("float16", 20), ("q5_k", 9))
    parts = [random_weight(name, outputs, 512) for name, outputs in kinds]
    weight = concat_rows(parts)
    assert [part.shape[0] for part in weight.parts] == [107, 33, 20, 9]
    assert weight.dequantised().tobytes() == b"".join(part.dequantised().tobytes() for part in parts)
    bias = ops.constant(awkward_rows(1, 169)[0])
    for rows in ODD_ROWS if instructions in VECTOR else (2, 7):
        x, residual = awkward_rows(rows, 512), awkward_rows(rows, 169, seed=4)
        together = run(ops, x, weight)
        alone = np.concatenate([run(ops, x, part) for part in parts], axis=1)
        assert together.tobytes() == alone.tobytes()
        np.testing.assert_allclose(
            oracle.linear(x, weight), np.concatenate([oracle.linear(x, part) for part in parts], axis=1)
        )
        with_both = run(ops, x, weight, bias=bias, residual=residual)
        assert with_both.tobytes() == ((together + bias) + residual).tobytes()


@pytest.mark.parametrize("name", ["int8+zero", "int4+zero"])
def test_a_group_is_a_chain_of_groups_of_32_with_its_numbers(name: str) -> None:
    """Scales of 64 and of 192 inputs give the bits of the same scales repeated; and so does an order, if
    x and the codes go through it first."""
    x, ops = awkward_rows(7, 192), CpuOps(2)
    once = random_weight(name, 37, 192)
    for group_size in (64, 192):
        groups = 192 // group_size
        scales, zeros = once.scales[:, :groups], once.zeros[:, :groups]
        wide = replace(once, scales=scales, zeros=zeros, group_size=group_size)
        narrow = replace(
            once, scales=scales.repeat(group_size // 32, axis=1), zeros=zeros.repeat(group_size // 32, axis=1)
        )
        assert run(ops, x, wide).tobytes() == run(ops, x, narrow).tobytes()
        order = np.random.default_rng(3).permutation(192).astype(np.int32)
        back = np.argsort(order)
        assert (
            run(ops, x[:, back].copy(), replace(wide, order=order)).tobytes() == run(ops, x, wide).tobytes()
        )


def test_weights_of_two_orders_are_not_merged() -> None:
    parts = [random_weight("int4+order", outputs, 64) for outputs in (20, 33)]
    same = replace(parts[1], order=parts[0].order)
    assert concat_rows([parts[0], same]).order is parts[0].order
    assert len(concat_rows(parts).parts) == 2


def test_only_the_first_rows_are_written() -> None:
    ops, weight = CpuOps(2), random_weight("float32", 20, 8)
    out = ops.empty(6, 20)
    out[...] = 7
    ops.linear(rows_of(ops, 3), awkward_rows(6, 8), ops.pack(weight), out)
    assert (out[3:] == 7).all()
    ops.linear(rows_of(ops, 0), awkward_rows(6, 8), ops.pack(weight), out)
    assert (out[3:] == 7).all()


@pytest.mark.parametrize("instructions", OBJECTS)
@pytest.mark.parametrize("name", [name for name in FORMATS if "+order" not in name])
def test_embed_gives_the_exact_values(name: str, instructions: str) -> None:
    width = a_width(name)
    ops, table = CpuOps(2, instructions), random_weight(name, 50, width)
    batch = ops.batch(64, 1, 8, 8, 50)
    step = step_of([(0, 64)], 8)
    step.set_on(batch)
    out = ops.empty(64, width)
    ops.embed(batch, ops.pack(table), out)
    assert out.tobytes() == oracle.embed(step.tokens, table).tobytes()


def test_every_half_precision_scale_is_read_exactly() -> None:
    """All finite fp16 values, subnormal ones included, as scales and minimums; both kernels."""
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    halves = np.resize(halves[np.isfinite(halves)], (2048, 32))
    codes = np.full((2048, 1024), 9, np.uint8)
    table = Int4Groups(codes, halves, halves[::-1].copy())
    for instructions in OBJECTS:
        ops = CpuOps(2, instructions)
        batch = ops.batch(2048, 1, 128, 128, 2048)
        tokens = np.arange(2048, dtype=np.int32)
        blocks = np.arange(128, dtype=np.int32)[None]
        batch.set(tokens, tokens, np.array([0, 2048], np.int32), blocks, np.zeros(0, np.int32))
        out = ops.empty(2048, 1024)
        ops.embed(batch, ops.pack(table), out)
        np.testing.assert_array_equal(out, table.dequantised())


def test_packed_weights_tell_what_they_are() -> None:
    ops = CpuOps(1)
    packed = ops.pack(random_weight("int4+minimum", 32, 64))
    assert (packed.shape, packed.format, packed.nbytes) == ((32, 64), "int4+minimum", 32 * 2 * 20)
    assert ops.pack(random_weight("int8", 32, 64)).nbytes == 32 * 2 * 34
    # bytes per 256 weights: codes, a byte per scale and minimum, and halves
    sizes = {name: ops.pack(random_weight(name, 32, 512)).nbytes / 64 for name in TWO_LEVEL}
    assert sizes == {"q4_k": 128 + 16 + 4, "q5_k": 160 + 16 + 4, "q6_k": 192 + 16 + 2}


def test_pack_refuses_what_it_cannot_hold() -> None:
    ops = CpuOps(1)
    with pytest.raises(UnsupportedError, match="8 bits, groups of 48"):
        ops.pack(Int8Groups(np.zeros((2, 96), np.int8), np.ones((2, 2), np.float16), group_size=48))
    two_level = TwoLevel(np.ones((2, 1), np.float16), np.ones((2, 16), np.int8))
    with pytest.raises(UnsupportedError, match="scales of 512, minimums of 0"):
        ops.pack(Int4Groups(np.zeros((2, 512), np.uint8), two_level))
    with pytest.raises(UnsupportedError, match="dense"):
        ops.pack(Dense(np.zeros((2, 4))))
    one = np.ones((2, 1), np.float16)
    with pytest.raises(ValueError, match=r"0\.\.15"):
        ops.pack(Int4Groups(np.full((2, 32), 16, np.uint8), one))
    for code in (-17, 16):
        with pytest.raises(ValueError, match=r"0\.\.31"):
            ops.pack(Int8Groups(np.full((2, 32), code, np.int8), one, bits=5))


def test_wrong_shapes_are_refused() -> None:
    ops = CpuOps(1)
    rows, weight = rows_of(ops, 4), ops.pack(random_weight("int8", 10, 64))
    x, out = ops.empty(4, 64), ops.empty(4, 10)
    with pytest.raises(ValueError, match="x is"):
        ops.linear(rows, ops.empty(4, 32), weight, out)
    with pytest.raises(ValueError, match="out is"):
        ops.linear(rows, x, weight, ops.empty(4, 11))
    with pytest.raises(ValueError, match="bias"):
        ops.linear(rows, x, weight, out, bias=np.zeros(9, np.float32))
    stacked = ops.pack(concat_rows([random_weight("int8", 10, 64), random_weight("float32", 4, 64)]))
    with pytest.raises(ValueError, match=r"out is \[4, 10\]; expected width 14"):
        ops.linear(rows, x, stacked, out)
    with pytest.raises(ValueError, match="4 rows in this step"):
        ops.linear(rows, ops.empty(3, 64), weight, out)
    with pytest.raises(TypeError):
        ops.linear(rows, np.zeros((4, 64)), weight, out)  # float64
    with pytest.raises(TypeError):
        ops.linear(rows, np.zeros((4, 128), np.float32)[:, ::2], weight, out)  # not contiguous
    read_only = np.zeros((4, 10), np.float32)
    read_only.flags.writeable = False
    with pytest.raises(TypeError):
        ops.linear(rows, x, weight, read_only)
