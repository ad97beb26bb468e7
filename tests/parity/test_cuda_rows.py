"""The card's ops on rows, its choices among logits and its recurrent layers, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quickdraft.ops.cuda import choose
from quickdraft.ops.cuda.backend import CudaOps
from quickdraft.ops.cuda.batch import Count
from quickdraft.ops.cuda.launch import Launcher, Started
from quickdraft.ops.interface import MAX_TOP_ROWS, Noise
from quickdraft.ops.reference import gumbel
from quickdraft.ops.reference.backend import ReferenceOps
from tests.parity.tolerances import TOLERANCES
from tests.support.card import card
from tests.support.ops_cases import Shape, awkward_rows, random_weight, scenario, step_of
from tests.support.recurrent_cases import Heads, Part, World

SHAPE = Shape(query_heads=4, kv_heads=2, head_dim=16, model_dim=96, feed_forward=40)


class Rows:
    count = 7


def near(got: Any, expected: Any, tolerance: float) -> None:
    room = tolerance * np.abs(expected) + 1e-37
    assert (np.abs(np.asarray(got, np.float64) - expected) <= room).all()


def test_a_recorded_chain_of_ops_agrees_with_the_oracle() -> None:
    """Every dense op of a decoder, over steps that share a cache; recorded and eager give the same bits."""

    def recorded(ops: Any, function: Any) -> None:
        ops.record(function).run()

    steps = [
        step_of(spans, SHAPE.table_width, wanted=wanted, pool_blocks=4 * SHAPE.table_width)
        for spans, wanted in (([(0, 4), (0, 2)], [3, 5]), ([(4, 3)], []), ([(7, 1), (2, 1)], [0, 1]))
    ]
    got = scenario(card(), steps, SHAPE, kv_dtype="float32", run=recorded)
    eager = scenario(card(), steps[:1], SHAPE, kv_dtype="float32")
    expected = scenario(ReferenceOps("sixteen"), steps, SHAPE, kv_dtype="float32")
    for ours, theirs in zip(got, expected, strict=True):
        for name, values in theirs.items():
            if name == "ids":
                assert ours[name].tolist() == values.tolist()
            elif values.size:
                # an activation may be rounded to the other side where two backends differ in the last bit
                room = (1e-3 if name in ("dense_out", "picked", "logits") else 2e-5) * np.abs(values).max()
                assert np.abs(ours[name] - values).max() <= room, name
    assert all(got[0][name].tobytes() == eager[0][name].tobytes() for name in eager[0])


@pytest.mark.parametrize("width", [40, 3000])
def test_norms_and_gates(width: int) -> None:
    x, gate = awkward_rows(7, width), awkward_rows(7, width, 1)
    x[3], gate[3] = x[3] * np.float32(1e-3), gate[3] * np.float32(1e-3)
    weight = np.linspace(-1, 2, width, dtype=np.float32)
    results = []
    for ops in (card(), ReferenceOps()):
        a, b = ops.empty(9, width), ops.empty(9, width)
        both, out = ops.empty(9, 2 * width), [ops.empty(9, width) for _ in range(4)]
        a[:7], b[:7], both[:7] = x, gate, np.concatenate([gate, x], axis=1)
        ops.rms_norm(Rows, a, ops.constant(weight), 1e-6, out[0])
        ops.sigmoid_gate(Rows, a, b, out[1])
        ops.swiglu(Rows, both, out[2])
        ops.gated_norm(Rows, a, b, ops.constant(weight[: width // 4]), 1e-6, out[3])
        results.append([np.array(values[:7]) for values in out])
    for got, expected, tolerance in zip(*results, [2e-6, 2e-6, 2e-6, 4e-6], strict=True):
        near(got, expected, tolerance)


def test_grouped_conv() -> None:
    rng = np.random.default_rng(3)
    numbers = {"x": (9, 48), "base": (2, 48), "deltas": (9, 24)}
    values = {name: rng.standard_normal(size).astype(np.float32) for name, size in numbers.items()}
    results = []
    for ops in (card(), ReferenceOps()):
        batch = ops.batch(9, 3, 4, 12, 50)
        step_of([(0, 4), (3, 1), (9, 4)], 4).set_on(batch)
        buffers = {name: ops.constant(part) for name, part in values.items()}
        out, added = ops.empty(9, 48), ops.constant(values["x"])
        ops.grouped_conv(batch, buffers["x"], buffers["base"], buffers["deltas"], 12, out, residual=added)
        results.append(np.array(out[:]))
    np.testing.assert_allclose(*results, atol=1e-5)


def test_argmax_and_top_rows_with_ties_nan_and_few_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "PIECE", 64)
    monkeypatch.setattr(choose, "TOP_PIECE", 64)
    x = np.random.default_rng(4).integers(-9, 9, (7, 300)).astype(np.float32)  # many ties
    x[1] = -np.inf
    x[2, 200] = np.nan
    x[3] = np.nan
    x[4, 7:] = np.nan
    x[5, ::2], x[5, 1::2] = -0.0, 0.0
    x[6, 299] = np.inf
    results = []
    for ops in (card(), ReferenceOps()):
        given, ids, best = ops.empty(7, 300), ops.ints(7 * 12), ops.empty(7, 12)
        given[:] = x
        ops.argmax(Rows, given, ids)
        first = ids[:7].tolist()
        ops.top_rows(Rows, given, 12, ids, best)
        results.append((first, ids[:].tolist(), np.array(best[:])))
    assert results[0][:2] == results[1][:2]
    np.testing.assert_array_equal(results[0][2], results[1][2])


@pytest.mark.parametrize("seed", [0, 2**63 + 12345, 2**64 - 1])
def test_the_noise_has_the_oracles_bits(seed: int) -> None:
    """Every id's score, by asking for one survivor at a time against a fixed rival, and whole rows."""
    ops, row = card(), np.random.default_rng(1).normal(0, 3, 5000).astype(np.float32)
    for temperature, position in ((0.7, 3), (1.3, 2**33 + 7)):
        expected = gumbel.choice(row, temperature, seed, position)
        assert ops.gumbel_choice(row, temperature, seed, position) == expected
    names = np.array([248_319, 5, 77, 2**31 + 3], np.int64)
    lying = ops.empty(1, 4)
    for values in (
        np.zeros(4, np.float32),
        ops.rows(lying, 0, 1)[0],
    ):  # compared on the host, and on the card
        winner = ops.gumbel_choice(values, 1.0, seed, 9, names)
        assert winner == names[gumbel.gumbel(seed, 9, names).argmax()]


def test_gumbel_scores_bit_for_bit() -> None:
    import torch

    ops, ids = card(), np.array([0, 1, 2, 17, 248_319], np.int64)
    row, heat = np.linspace(-4, 4, 5, dtype=np.float32), int(np.float64(0.9).view(np.int64))
    found, draws = [], torch.tensor([heat, -7, 41])
    for place in range(5):
        best, winner = torch.empty(1, dtype=torch.float64), torch.empty(1, dtype=torch.int64)
        one = torch.tensor(row[place : place + 1]), torch.tensor(ids[place : place + 1])
        numbers = {"PIECE": choose.NOISE_PIECE, "exact": True}
        ops.launcher.start(choose.gumbel_of_piece, (1, 1), *one, draws, best, winner, 1, **numbers)
        found.append(best.item())
    expected = row.astype(np.float64) / 0.9 + gumbel.gumbel(2**64 - 7, 41, ids)
    assert np.array(found).tobytes() == expected.tobytes()


def test_rows_are_drawn_together_as_one_by_one() -> None:
    """Some rows of a step with noise of their own, some without; and again, over what the first left."""
    results = []
    for ops in (card(), ReferenceOps()):
        x, best = ops.empty(5, 2500), ops.ints(5)
        x[:] = np.random.default_rng(3).normal(0, 2, (5, 2500))
        x[3, 1000:] = -np.inf
        best[:] = np.arange(5) + 40
        for noises in (
            (Noise(0.7, 2**64 - 3, 5), None, Noise(1.4, 1, 2**33), Noise(0.1, 9, 0), Noise(1.4, 1, 3)),
            (None, Noise(2.0, 2**63, 77)),
        ):
            results.append(ops.gumbel_rows(x, best, noises).tolist())
    assert results[:2] == results[2:] and results[1][0] == [40, 40]


def test_top_of_one_row_and_of_all() -> None:
    """Of numbers on the host, and of those on the card: alone, with a k that is sorted for, and together."""
    ops, width = card(), 300
    rows = np.random.default_rng(5).integers(-9, 9, (3, width)).astype(np.float32)
    rows[0, 5:], rows[1, ::3], rows[2, 7] = np.nan, np.nan, -np.inf
    lying = ops.empty(3, width)
    lying[:] = rows
    for k in (1, 10, MAX_TOP_ROWS, 290):
        together = ops.top_together(lying, 3, k)
        assert (together is None) == (k > MAX_TOP_ROWS)
        for index, row in enumerate(rows):
            ids, values = ReferenceOps().top(row, k)
            found = [ops.top(row, k), ops.top(ops.rows(lying, index, index + 1)[0], k)]
            if together is not None:
                there = together[0][index] >= 0
                found.append((together[0][index][there], together[1][index][there]))
            for got in found:
                assert got[0].tolist() == ids.tolist()
                np.testing.assert_array_equal(got[1], values)


def state_of(world: World, slot: int) -> Any:
    """The states [layers, Hv, Dk, Dv] and windows of a slot, as the oracle lays them out."""
    spec = world.heads.spec
    rows = world.floats_of(slot).reshape(2, -1)
    square = spec.heads * spec.key_dim * spec.value_dim
    states = rows[:, :square]
    if world.ops.name == "cuda":
        states = states.reshape(2, spec.heads, spec.value_dim, spec.key_dim).swapaxes(2, 3)
    return states.reshape(2, -1), rows[:, square:]


def test_recurrent_layers_agree_with_the_oracle() -> None:
    """Chunks, verify blocks, replays, several sequences, a checkpoint, and settling."""
    heads = Heads(keys=1, values=2, key_dim=12, value_dim=20)
    ours, oracle = World(card(), heads), World(ReferenceOps(), heads)
    steps = [
        [Part(0, 0, 18), Part(1, 0, 2)],
        [Part(0, 18, 5, drafted=4)],
        [Part(1, 2, 3, drafted=2), Part(0, 21, 2, drafted=1, replay=2)],
        [Part(0, 24, 1, replay=1), Part(1, 3, 1, replay=0)],
    ]
    for parts in steps:
        got, expected = ours.step(*parts), oracle.step(*parts)
        for name, values in expected.items():
            assert np.abs(got[name] - values).max() <= TOLERANCES["recurrent"] * np.abs(values).max(), name
    for world in (ours, oracle):
        world.step(Part(0, 25, 4, drafted=3))
        world.state.copy(1, 5)
        world.state.settle(0, 2)
        world.state.clear(1)
    for slot in (0, 1, 5):
        for got, values in zip(state_of(ours, slot), state_of(oracle, slot), strict=True):
            assert np.abs(got - values).max() <= TOLERANCES["recurrent"] * max(np.abs(values).max(), 1e-9)


def test_replayed_rows_leave_the_bits_of_plain_decoding() -> None:
    heads = Heads(keys=1, values=2, key_dim=8, value_dim=8)
    plain, drafting = World(card(), heads), World(card(), heads)
    for world in (plain, drafting):
        world.step(Part(0, 0, 5))
    block = drafting.step(Part(0, 5, 5, drafted=4))
    rows = [plain.step(Part(0, 5 + row, 1)) for row in range(4)]
    for name in ("mixed", "out"):
        assert block[name][:4].tobytes() == np.concatenate([row[name] for row in rows]).tobytes()
    last = drafting.step(Part(0, 9, 1, replay=3)), plain.step(Part(0, 9, 1))
    assert last[0]["out"].tobytes() == last[1]["out"].tobytes()
    assert drafting.bytes_of(0) == plain.bytes_of(0)
    with pytest.raises(ValueError, match="slot 4 is a checkpoint"):
        drafting.step(Part(4, 0, 3))


def test_what_a_norm_or_gate_wrote_is_not_cast_again_until_it_changes() -> None:
    """Bits are those of a cast; a write of any other kind makes the copy out of date."""

    class Counting(Launcher):
        casts = 0

        def begin(self, started: Started) -> None:
            self.casts += started.kernel.__name__ == "cast_rows"
            super().begin(started)

    launcher = Counting()
    ops = CudaOps(launcher=launcher)
    count, width = Count(), 96
    count.count = 3
    random = np.random.default_rng(5)
    x, normed, out = ops.empty(4, width), ops.empty(4, width), ops.empty(4, 40)
    weight = ops.pack(random_weight("int4", 40, width))
    factor = ops.constant(np.ones(width, np.float32))
    seen = []
    for step in range(3):
        x[...] = random.standard_normal((4, width))
        ops.rms_norm(count, x, factor, 1e-6, normed)
        ops.linear(count, normed, weight, out)
        seen.append((launcher.casts, out[:3].copy()))
        fresh, again = ops.empty(4, width), ops.empty(4, 40)
        fresh[...] = normed[:]
        ops.linear(count, fresh, weight, again)
        launcher.casts -= 1
        assert again[:3].tobytes() == seen[-1][1].tobytes(), step
    assert [casts for casts, _ in seen] == [1, 1, 1]
    normed[0] = 2.0
    ops.linear(count, normed, weight, out)
    assert launcher.casts == 2 and out[0].tobytes() != seen[-1][1][0].tobytes()
    ops.rms_norm(count, x, factor, 1e-6, normed)
    count.count = 4  # a row more than the norm wrote
    ops.linear(count, normed, weight, out)
    assert launcher.casts == 3
