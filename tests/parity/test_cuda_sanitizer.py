"""The card's kernels under the sanitizer: programs in any order, addresses inside tensors, no two programs at
one address, and garbage wherever nothing is promised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from quickdraft.engine.llm import LLM
from quickdraft.ops import select
from quickdraft.ops.cuda.launch import Launcher, Started, Watching
from quickdraft.types import Backend
from tests.lossless.test_cuda_engine import DRAFTS, GREEDY, OPENING, PROMPT, InTurn
from tests.parity import test_cuda_bytes as byte_cases
from tests.parity.test_cpu_attention import attend
from tests.parity.test_cuda_attention import CASES
from tests.parity.test_cuda_programs import STEPS
from tests.support.card import card
from tests.support.fake_capture import FakeCapture, Recorder
from tests.support.golden import TARGET
from tests.support.model_steps import ModelSteps
from tests.support.ops_cases import step_of
from tests.support.recurrent_cases import Heads, Part
from tests.support.recurrent_cases import World as Recurrences
from tests.support.sanitizer import SanitizedOps, Sanitizer, Unsound
from tests.support.tiny_hybrid import write_tiny_hybrid


class Seen(Watching):
    """Writes starts down and gives them to a sanitizer."""

    def __init__(self) -> None:
        super().__init__()
        self.sanitizer = Sanitizer()

    def begin(self, started: Started) -> None:
        super().begin(started)
        self.sanitizer.begin(started)


@triton.jit
def shift(x, out, count, by, every, WIDTH: tl.constexpr):
    """out[i // every] = x[i + by]."""
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out + i // every, tl.load(x + i + by, mask=i < count, other=0.0), mask=i < count)


@pytest.mark.parametrize(
    ("by", "every", "source", "target", "said"),
    [
        (0, 1, slice(0, 32), slice(32, 64), None),
        (0, 1, slice(0, 32), slice(0, 32), None),  # in place
        (1, 1, slice(33, 64), slice(0, 32), "reads 2 numbers of no tensor"),
        (0, 1, slice(0, 32), slice(32, 63), "writes 1 numbers of no tensor"),
        (8, 1, slice(0, 40), slice(0, 32), "read what others write"),
        (0, 32, slice(0, 32), slice(32, 33), "write the same"),
    ],
)
def test_it_finds_what_it_looks_for(
    by: int, every: int, source: slice, target: slice, said: str | None
) -> None:
    memory = torch.zeros(64)
    arguments = shift, (2,), memory[source], memory[target], 32, by, every
    if said is None:
        Sanitizer().start(*arguments, WIDTH=16)
        return
    with pytest.raises(Unsound, match=said):
        Sanitizer().start(*arguments, WIDTH=16)


def test_a_column_beside_a_view_is_no_part_of_it() -> None:
    memory = torch.zeros(4, 8)
    with pytest.raises(Unsound, match="reads 12 numbers"):
        Sanitizer().start(shift, (1,), memory[:, :4], torch.zeros(32), 28, 0, 1, WIDTH=32)


@pytest.mark.parametrize("name", sorted(byte_cases.CASES))
def test_every_kernel_in_a_padded_step(name: str) -> None:
    world = byte_cases.World(5, Seen())
    shape = world.batch.shape()
    assert shape is not None
    with world.batch.padded(shape):
        byte_cases.CASES[name](world)
    assert world.launcher.sanitizer.started


@pytest.mark.parametrize(("case", "kind"), [(CASES[1], "int8"), (CASES[4], "float16")], ids=str)
def test_attention_of_several_sequences(case: Any, kind: str) -> None:
    """Blocks that no sequence has hold NaN; programs in another order give the same bits."""
    spans, *heads = case
    step = step_of(spans, 50)
    expected = attend(card(), step, *heads, kind)[0][:]
    got = attend(SanitizedOps(Sanitizer(seed=3)), step, *heads, kind)[0][:]
    assert got.tobytes() == expected.tobytes()


PARTS = (  # of one step each; a sequence of more than 16 rows has several programs of the convolution
    (Part(0, 0, 18, drafted=2),),
    (Part(0, 17, 8, drafted=7, replay=1), Part(1, 0, 2, drafted=1)),
    (Part(1, 1, 1), Part(0, 20, 1, replay=2)),
)


def test_recurrent_layers_of_several_sequences() -> None:
    """Slots and histories hold NaN until their sequence has written them."""

    def run(ops: Any) -> list[bytes]:
        world, found = Recurrences(ops, Heads(1, 2, 16, 24)), list[bytes]()
        for slot in (0, 1):
            world.state.clear(slot)
        for parts in PARTS:
            found += [values.tobytes() for values in world.step(*parts).values()]
        world.state.settle(0, 0)
        return [*found, world.bytes_of(0), world.bytes_of(1)]

    assert run(SanitizedOps(Sanitizer())) == run(card())


def steps_of(path: Path, launcher: Launcher, count: int) -> tuple[list[bytes], bytes]:
    """Logits of steps with drafts and replay, and the state behind them; nothing lasts from step to step
    but keys, values, states and histories."""
    ops = SanitizedOps(launcher)
    steps, found = ModelSteps(path, ops), []
    steps.state.clear(0)
    for tokens, drafted, replay in STEPS[:count]:
        ops.spoil()
        found.append(steps.step(list(tokens), drafted=drafted, replay=replay).tobytes())
    return found, steps.state_bytes()


def plain_steps(path: Path, count: int) -> tuple[list[bytes], bytes]:
    steps = ModelSteps(path, card())
    logits = [
        steps.step(list(tokens), drafted=drafted, replay=kept) for tokens, drafted, kept in STEPS[:count]
    ]
    assert not any(np.isnan(one).any() for one in logits)
    return [one.tobytes() for one in logits], steps.state_bytes()


def test_steps_with_drafts_and_replay(tmp_path: Path) -> None:
    path, sanitizer = write_tiny_hybrid(tmp_path / "tiny"), Sanitizer()
    assert steps_of(path, sanitizer, 3) == plain_steps(path, 3)
    assert len(sanitizer.started) > 12


@pytest.mark.full
@pytest.mark.parametrize("seed", [None, 1])
def test_steps_of_the_golden_hybrid(seed: int | None) -> None:
    assert steps_of(TARGET, Sanitizer(seed), len(STEPS)) == plain_steps(TARGET, len(STEPS))


class SanitizedRecorder(Recorder, Sanitizer):
    """Starts and replays kernels under the sanitizer."""

    def __init__(self) -> None:
        Sanitizer.__init__(self, seed=2)
        self.seen, self.compiled = None, set()


@pytest.mark.full
def test_captured_steps_with_every_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine over the golden hybrid, with drafts of MTP, of DFlash2 and of a script."""
    cpu = LLM(TARGET, **OPENING, backend=Backend.CPU)
    expected = tuple(cpu.generate(PROMPT, GREEDY).ids)
    cpu.close()
    launcher = SanitizedRecorder()
    ops = SanitizedOps(launcher)
    ops.capture = capture = FakeCapture(launcher)
    monkeypatch.setattr(select, "_cuda", lambda: ops)
    llm = LLM(TARGET, **OPENING, backend=Backend.CUDA)
    turns = InTurn(llm, expected, ["script", "mtp", "dflash2"])
    found = llm.generate(PROMPT, replace(GREEDY, speculation=DRAFTS))
    assert tuple(found.ids) == expected and min(turns.proposed.values()) > 0 and capture.replays > 0
    llm.close()
