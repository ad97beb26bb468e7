"""Recurrent ops: CPU kernels equal the oracle, scalar equals AVX2 in bits, rows do not see each other, and
pending rows that are replayed leave what plain decoding leaves, in bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quickdraft.ops.cpu.backend import CpuOps
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.ops.reference.recurrent import delta_chunk, delta_row, split_rows
from tests.support.ops_cases import ODD_ROWS, assert_same_bits
from tests.support.recurrent_cases import Heads, Part, World

SHAPES = {"one tile and a rest": Heads(), "golden": Heads(2, 6, 16, 16), "full": Heads(1, 3, 128, 128)}
KERNELS = ["scalar", "avx2", "avx512"]


def cpu(instructions: str = "auto", threads: int = 2) -> CpuOps:
    try:
        return CpuOps(threads, instructions)
    except ValueError:
        pytest.skip(f"no {instructions} kernels here")


@pytest.mark.parametrize("rows", ODD_ROWS)
@pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES)
def test_ops_equal_the_oracle(heads: Heads, rows: int) -> None:
    ours, oracle = World(cpu(), heads), World(ReferenceOps(), heads)
    for world in (ours, oracle):
        world.step(Part(1, 0, 5), Part(2, 0, 3))
    drafted = min(rows - 1, 9)
    step = Part(1, 5, rows, drafted), Part(0, 0, 2)
    got, expected = ours.step(*step), oracle.step(*step)
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, rtol=2e-4, atol=2e-5, err_msg=name)
    ours.state.settle(1, drafted)
    oracle.state.settle(1, drafted)
    for slot in range(3):
        np.testing.assert_allclose(ours.floats_of(slot), oracle.floats_of(slot), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 7, 63, 64, 65, 150])
def test_the_chunk_form_of_the_oracle_equals_the_recurrent_form(rows: int) -> None:
    heads = Heads()
    world = World(ReferenceOps(), heads)
    qkv = world.x[0, :rows]
    parts = split_rows(qkv, world.gates[0, :rows], world.rate, world.bias, heads.spec)
    q, k, v, beta, log_keep = parts
    state = np.random.default_rng(3).standard_normal((heads.values, heads.key_dim, heads.value_dim))
    by_row, by_chunk, outputs = state, state, []
    for row in range(rows):
        by_row, out = delta_row(by_row, q[row], k[row], v[row], beta[row], np.exp(log_keep[row]))
        outputs.append(out)
    for first in range(0, rows, 64):
        chunk = [np.moveaxis(part[first : first + 64], 0, 1) for part in parts]
        by_chunk, out = delta_chunk(by_chunk, *chunk)
        np.testing.assert_allclose(out, np.moveaxis(outputs[first : first + 64], 0, 1), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(by_chunk, by_row, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("instructions", KERNELS[1:])
@pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES)
def test_scalar_and_vector_kernels_give_the_same_bits(heads: Heads, instructions: str) -> None:
    steps = [(Part(0, 0, 33, 8), Part(3, 0, 1)), (Part(0, 29, 7, 2, 4), Part(3, 1, 16, 15))]
    worlds = [World(cpu(name, threads), heads) for name, threads in (("scalar", 1), (instructions, 3))]
    for step in steps:
        one, other = (world.step(*step) for world in worlds)
        assert_same_bits(other, one)
    for world in worlds:
        world.state.settle(3, 15)
    for slot in (0, 3):
        assert worlds[0].bytes_of(slot) == worlds[1].bytes_of(slot)


@pytest.mark.parametrize("instructions", KERNELS[:2])
@pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES)
def test_rows_in_one_call_equal_rows_one_by_one(heads: Heads, instructions: str) -> None:
    alone, together = World(cpu(instructions), heads), World(cpu(instructions), heads)
    single = [alone.step(Part(2, t, 1)) for t in range(37)]
    got = together.step(Part(1, 0, 20), Part(2, 0, 37), Part(0, 0, 1))
    for name, values in got.items():
        one_by_one = np.concatenate([step[name] for step in single])
        assert values[20:57].tobytes() == one_by_one.tobytes(), name
    assert alone.bytes_of(2) == together.bytes_of(2)


@pytest.mark.parametrize("kept", range(16))
def test_replayed_rows_equal_plain_decoding(kept: int) -> None:
    """15 pending rows, `kept` accepted: the next step, or settle, and plain decoding leave equal bits."""
    plain, drafting, settled = (World(cpu()) for _ in range(3))
    other = Part(0, 0, 4)
    expected = [plain.step(Part(1, t, 1))["normed"] for t in range(10 + 1 + kept + 3)]
    for world in (drafting, settled):
        world.step(Part(1, 0, 10))
        rows = world.step(other, Part(1, 10, 16, 15))["normed"][4:]
        assert rows[: 1 + kept].tobytes() == np.concatenate(expected[10 : 11 + kept]).tobytes()
    settled.state.settle(1, kept)
    first = 11 + kept
    after = drafting.step(Part(1, first, 3, 2, kept), Part(3, 0, 1))["normed"][:3]
    assert after.tobytes() == np.concatenate(expected[first:]).tobytes()
    assert settled.step(Part(1, first, 3))["normed"].tobytes() == after.tobytes()
    drafting.state.settle(1, 2)
    assert drafting.bytes_of(1) == settled.bytes_of(1) == plain.bytes_of(1)


def test_pending_rows_alone_leave_the_slot_as_it_was() -> None:
    world = World(cpu())
    world.step(Part(0, 0, 3))
    before = world.bytes_of(0)
    world.step(Part(0, 3, 5, 5))
    assert world.bytes_of(0) == before


def test_slots_copy_clear_and_do_not_leak() -> None:
    """Every slot but those in use is NaN: outputs and states are what they are without."""
    clean, poisoned = World(cpu()), World(cpu())
    for slot in (0, 2, 3, 5):
        for view in poisoned.state.views(slot):
            np.frombuffer(view, np.float32)[:] = np.nan
    poisoned.state.clear(2)
    for world in (clean, poisoned):
        world.step(Part(1, 0, 9, 4), Part(2, 0, 2))
        world.state.settle(1, 3)
        world.state.copy(1, 4)
        world.state.copy(4, 2)
    one, other = (world.step(Part(2, 8, 6, 2), Part(1, 8, 1)) for world in (clean, poisoned))
    assert_same_bits(other, one)
    for slot in (1, 2, 4):
        assert clean.bytes_of(slot) == poisoned.bytes_of(slot)
        assert np.isfinite(poisoned.floats_of(slot)).all()
    assert clean.state.bytes_per_slot == len(clean.bytes_of(1)) == 2 * Heads().spec.bytes_per_sequence


@pytest.mark.parametrize("make", [ReferenceOps, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((Part(4, 0, 2, 1),), "pending rows"),  # a checkpoint's slot
        ((Part(6, 0, 1),), "slot 6"),
        ((Part(0, 0, 20, 16),), "16 pending rows"),
        ((Part(0, 0, 1, 0, 16),), "16 pending rows"),
        ((Part(0, 0, 1, 2),), "drafted"),
        ((Part(0, 0, 1, 0, -1),), "replay"),
        ((Part(0, 0, 1), Part(0, 1, 1)), "slot"),
        ((Part(-1, 0, 1),), "slot"),
    ],
)
def test_impossible_steps_are_refused(make: Any, parts: tuple[Part, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        World(make()).step(*parts)


def test_a_step_without_slots_is_refused() -> None:
    for ops in (ReferenceOps(), cpu()):
        world = World(ops)
        zero, one = np.zeros(1, np.int32), np.array([0, 1], np.int32)
        world.batch.set(zero, zero, one, np.zeros((1, 1), np.int32), zero[:0])
        with pytest.raises(ValueError, match="names no slots"):
            world.program.run()
        with pytest.raises(ValueError, match="without slots"):
            world.batch.set(zero, zero, one, np.zeros((1, 1), np.int32), zero[:0], None, zero, None)
