"""Captured programs: what is replayed has the bits of what is started one by one, whatever the rows,
sequences, contexts, slots and drafts of a step are beside those that were captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quickdraft.ops.cuda import program as program_module
from quickdraft.ops.cuda.batch import CudaBatch
from tests.support.card import card
from tests.support.fake_capture import capturing_card
from tests.support.golden import TARGET
from tests.support.model_steps import ModelSteps
from tests.support.ops_cases import random_weight, step_of
from tests.support.tiny_hybrid import write_tiny_hybrid

Logits = list[NDArray[np.float32]]
# tokens, how many are drafted, rows of the last step that are replayed
STEPS: tuple[tuple[Sequence[int], int, int], ...] = (
    ((5, 9, 14), 0, 0),  # met for the first time: 4 rows
    ((7, 8, 11, 12), 3, 0),  # captured, with drafts
    ((8, 11, 60), 2, 2),  # again: fewer rows and drafts, two rows of history, another context
    ((60, 3, 21, 22), 1, 1),
    ((61,), 0, 1),  # met: 1 row
    ((62,), 0, 0),  # captured
)


def logits_of(steps: ModelSteps, count: int = len(STEPS)) -> Logits:
    return [steps.step(list(tokens), drafted=drafted, replay=kept) for tokens, drafted, kept in STEPS[:count]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hybrid(tmp_path_factory.mktemp("hybrid") / "tiny")


@pytest.fixture(scope="module")
def plain(path: Path) -> tuple[Logits, bytes]:
    """Logits and state of a card that starts every kernel by itself."""
    steps = ModelSteps(path, card())
    return logits_of(steps), steps.state_bytes()


def test_replayed_steps_have_the_bits_of_started_ones(path: Path, plain: tuple[Logits, bytes]) -> None:
    ops, capture = capturing_card()
    ours = ModelSteps(path, ops)
    for found, wanted in zip(logits_of(ours), plain[0], strict=True):
        assert found.tobytes() == wanted.tobytes()
    assert ours.state_bytes() == plain[1]
    assert len(capture.starts) == 2 and min(capture.starts) > 20  # two shapes, each of them whole
    assert capture.replays == 3 + 1  # every step but the first of each shape


@pytest.mark.full
def test_the_golden_hybrid_replayed() -> None:
    ours, plain = ModelSteps(TARGET, capturing_card()[0]), ModelSteps(TARGET, card())
    for found, wanted in zip(logits_of(ours), logits_of(plain), strict=True):
        assert found.tobytes() == wanted.tobytes()


# of two sequences: (first position, rows) of each, and what they see from; a span is 64 positions
CONTEXTS: tuple[tuple[list[tuple[int, int]], list[int]], ...] = (
    ([(62, 4), (0, 2)], [0, 0]),  # met: 8 rows, 4 spans
    ([(10, 1), (100, 6)], [3, 70]),  # captured
    ([(200, 7), (2, 1)], [0, 0]),
    ([(66, 3), (101, 2)], [2, 0]),
)


def attended(ops: Any, kind: str, window: int | None, block: bool) -> list[bytes]:
    """What one program of kv_write and attention gives for each of CONTEXTS, one behind the other."""
    heads, kv_heads, dim, width = 4, 2, 16, 16
    batch = ops.batch(8, 3, width, 2 * width, 50)
    kv = ops.kv_cache(1, 2 * width, kv_heads, dim, kind)
    qkv, out = ops.empty(8, (heads + 2 * kv_heads) * dim), ops.empty(8, heads * dim)
    rng = np.random.default_rng(4)

    def step() -> None:
        ops.kv_write(batch, qkv, heads, kv, 0)
        ops.attention(batch, qkv, heads, kv, 0, 0.3, out, window=window, block=block)

    program, found = ops.record(step), []
    for places, firsts in CONTEXTS:
        qkv[:] = rng.standard_normal(qkv.shape)
        this = step_of(places, width, pool_blocks=2 * width)
        dataclasses.replace(this, seen_from=np.array(firsts, np.int32)).set_on(batch)
        program.run()
        found.append(out[: batch.rows.count].tobytes())
    return [*found, kv.keys.tobytes(), kv.values.tobytes()]


@pytest.mark.parametrize(
    ("kind", "window", "block"), [("float16", None, False), ("int8", 70, False), ("float16", 20, True)]
)
def test_replayed_attention_finds_its_rows_and_context(kind: str, window: int | None, block: bool) -> None:
    ops, capture = capturing_card()
    assert attended(ops, kind, window, block) == attended(card(), kind, window, block)
    assert capture.starts == [3] and capture.replays == len(CONTEXTS) - 1


def test_a_number_that_slips_into_a_capture_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured with the spans of one step alone, a longer context is not all seen: so the tests above can
    fail."""
    monkeypatch.setattr(CudaBatch, "padded_spans", lambda self, spans: 2)
    found, wanted = (
        attended(capturing_card()[0], "float16", None, False),
        attended(card(), "float16", None, False),
    )
    assert [one == other for one, other in zip(found, wanted, strict=True)][:3] == [True, True, False]


def test_the_shape_not_used_for_longest_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_module, "MOST_SHAPES", 2)
    ops, capture = capturing_card()
    batch, x = ops.batch(8, 1, 8, 8, 50), ops.empty(8, 32)
    program = ops.record(lambda: ops.rms_norm(batch.rows, x, ops.constant(np.ones(32)), 1e-6, x))
    for rows in (1, 1, 2, 2, 1, 4, 1, 2, 4):  # four rows put two out, two then four
        step_of([(0, rows)], 8).set_on(batch)
        program.run()
    assert len(capture.starts) == 2 and capture.replays == 4 and program.captured == 0


def test_a_run_that_makes_copies_is_not_the_one_before_a_capture() -> None:
    """A norm writes the 16-bit copies that a linear behind it made: another kernel from the second run on."""
    ops, capture = capturing_card()
    batch, x, out = ops.batch(4, 1, 8, 8, 50), ops.empty(4, 32), ops.empty(4, 16)
    norm, weight = ops.constant(np.ones(32)), ops.pack(random_weight("float16", 16, 32))

    def step() -> None:
        ops.rms_norm(batch.rows, x, norm, 1e-6, x)
        ops.linear(batch.rows, x, weight, out)

    program = ops.record(step)
    for captures in (0, 0, 1, 1):
        step_of([(0, 3)], 8).set_on(batch)
        program.run()
        assert len(capture.starts) == captures


def test_where_memory_is_short_a_capture_gives_way_to_another_and_what_has_none_runs_all_the_same() -> None:
    ops, capture = capturing_card()
    batch, x = ops.batch(8, 1, 8, 8, 50), ops.empty(8, 32)
    program = ops.record(lambda: ops.rms_norm(batch.rows, x, ops.constant(np.ones(32)), 1e-6, x))
    found = list[tuple[int, int, int]]()
    steps = [(1, True), (1, True), (1, False), (2, False), (2, True), (1, False), (4, True)]
    for rows, capture.full in steps:  # a step's rows, and whether memory is short then
        x[:] = 3.0
        step_of([(0, rows)], 8).set_on(batch)
        program.run()
        assert np.allclose(x[:rows], 1.0)
        found.append((program.captured, len(capture.starts), capture.replays))
    assert found == [(0, 0, 0), (0, 0, 0), (1, 1, 1), (1, 1, 1), (1, 2, 2), (1, 2, 2), (1, 2, 2)]
