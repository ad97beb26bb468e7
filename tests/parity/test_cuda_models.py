"""Whole models through the card's kernels in Triton's interpreter: the golden hybrid and a tiny quantised
llama.

The interpreter takes milliseconds for each program of a kernel, so most of the golden prompt is read by
the oracle, whose cache and states then move to the card's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quickdraft.ops.cuda.backend import CudaOps
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.ops.select import select
from tests.support.card import card
from tests.support.golden import TARGET, TOLERANCE, expected, expected_tensors
from tests.support.model_steps import ModelSteps
from tests.support.tiny import write_tiny_llama, written_as

PROMPT: list[int] = expected()["prompt"]
GREEDY: list[int] = expected()["greedy_64"]


def moved(source: ModelSteps, ops: CudaOps) -> ModelSteps:
    """The same sequence on the card: keys and values as they are, states [Hv, Dk, Dv] turned to [Hv, Dv,
    Dk]."""
    target = ModelSteps(TARGET, ops)
    target.kv.keys[...], target.kv.values[...] = source.kv.keys, source.kv.values
    shape = source.state.shape
    rows: Any = source.state.states[0]
    square = shape.heads * shape.key_dim * shape.value_dim
    states = rows[:, :square].reshape(-1, shape.heads, shape.key_dim, shape.value_dim).swapaxes(2, 3)
    numbers = np.concatenate([states.reshape(len(rows), -1), rows[:, square:]], axis=1)
    target.state.room(0)[0][:] = numbers.tobytes()
    target.state.filled(0)
    target.done[0] = source.done[0]
    return target


def test_golden_values_of_the_first_rows() -> None:
    steps = ModelSteps(TARGET, card())
    logits = np.concatenate([steps.step(PROMPT[:3]), steps.step(PROMPT[3:4])])
    np.testing.assert_allclose(logits, expected_tensors()["prompt_logits"][:4], atol=TOLERANCE)


def test_golden_greedy_ids_with_drafts_and_rollback() -> None:
    """A verify block of which five drafts hold, the replay that follows, and plain decoding after it."""
    oracle = ModelSteps(TARGET, ReferenceOps())
    oracle.step(PROMPT)
    steps = moved(oracle, card())
    wrong = [(token + 1) % 101 for token in GREEDY[6:8]]
    chosen = steps.step([*GREEDY[:6], *wrong], drafted=7).argmax(axis=1)
    assert chosen[:6].tolist() == GREEDY[1:7]
    chosen = steps.step(GREEDY[6:9], replay=5, drafted=2).argmax(axis=1)
    assert chosen.tolist() == GREEDY[7:10]
    assert steps.step(GREEDY[9:10], replay=2).argmax(axis=1).tolist() == GREEDY[10:11]


@pytest.mark.full
def test_the_whole_golden_run() -> None:
    steps = ModelSteps(TARGET, card())
    chosen = int(steps.step(PROMPT)[-1].argmax())
    ids = [chosen]
    while len(ids) < 64:
        ids.append(int(steps.step([ids[-1]])[0].argmax()))
    assert ids == GREEDY


@pytest.mark.parametrize("quantisation", ["Q4_0", "mixed"])
def test_a_tiny_llama_chooses_as_the_cpu_does(tmp_path: Path, quantisation: str) -> None:
    """Weights of several formats, tokenizer and all; near the CPU's logits, whose activations are int8."""
    path = write_tiny_llama(tmp_path / "tiny.gguf", vocabulary_size=280, **written_as(quantisation))
    ours, theirs = (ModelSteps(path, ops, kv="float16") for ops in (card(), select(2)))
    tokens = [270, 3, 15, 16, 90]
    got, wanted = ours.step(tokens), theirs.step(tokens)
    assert np.abs(got - wanted).max() < 0.05 * np.ptp(wanted)
    assert got.argmax(axis=1).tolist() == wanted.argmax(axis=1).tolist()
    following = [ours.step([int(got[-1].argmax())]), theirs.step([int(wanted[-1].argmax())])]
    assert following[0].argmax() == following[1].argmax()
