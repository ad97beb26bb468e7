"""Checkpoints beside a card: in the host's memory, copied in the order of the card's stream."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from quickdraft.config import Hardware
from quickdraft.ops.cuda import host_states
from quickdraft.ops.cuda.backend import CudaOps
from quickdraft.ops.cuda.host_states import PINNED, HostStates
from quickdraft.ops.cuda.recurrent import CudaRecurrent
from quickdraft.state.spec import Recurrent
from tests.support import interpreter as interpreter

SHAPE = Recurrent(heads=2, key_dim=4, value_dim=4, channels=24, window=3)
LAYERS, SEQUENCES, SLOTS = 2, 2, 4


class Stream:
    """Copies that happen only when they are waited for, with all that were begun before them."""

    def __init__(self) -> None:
        self.begun: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0

    def start(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], None]:
        self.begun.append((source, target))
        count = len(self.begun)
        return lambda: self.run(count)

    def run(self, count: int) -> None:
        while self.done < count:
            source, target = self.begun[self.done]
            target.copy_(source)
            self.done += 1


def states(stream: Stream | None = None) -> CudaRecurrent:
    found = CudaOps().recurrent_cache(LAYERS, SLOTS, SEQUENCES, SHAPE, 3)
    assert isinstance(found, CudaRecurrent)
    if stream is not None:
        found.kept = HostStates(SLOTS - SEQUENCES, tuple(found.states.shape[1:]), torch.device("cpu"), stream)
    return found


def content(state: CudaRecurrent, slot: int) -> bytes:
    return b"".join(bytes(view) for view in state.views(slot))


def fill(state: CudaRecurrent, slot: int, number: int) -> bytes:
    """Write it as it comes from disk; what was written."""
    data = np.random.default_rng(number).integers(0, 256, state.bytes_per_slot, np.uint8)
    (view,) = state.room(slot)
    view[:] = data.data
    state.filled(slot)
    return data.tobytes()


def test_slots_of_both_sides_are_read_written_copied_and_cleared() -> None:
    state = states()
    assert len(state.states) == SEQUENCES, "checkpoints take no memory of the card"
    assert state.checkpoints_in == "host memory"
    written = [fill(state, slot, slot) for slot in range(SLOTS)]
    assert [content(state, slot) for slot in range(SLOTS)] == written
    for source, target in [(0, 2), (3, 1), (2, 3), (1, 0)]:  # to a checkpoint, back, and within each side
        state.copy(source, target)
        written[target] = written[source]
        assert [content(state, slot) for slot in range(SLOTS)] == written
    for slot in (0, 3):
        state.clear(slot)
        assert content(state, slot) == bytes(state.bytes_per_slot) != written[slot]


def test_the_host_touches_no_checkpoint_before_its_copies_are_done() -> None:
    stream = Stream()
    state = states(stream)
    first, second = fill(state, 0, 10), fill(state, 1, 11)
    state.copy(0, 2)
    state.copy(1, 3)
    assert (len(stream.begun), stream.done) == (2, 0), "the host did not wait"
    assert content(state, 2) == first and stream.done == 1, "it reads what the copy brought"
    state.copy(3, 0)
    third = fill(state, 3, 12)
    assert stream.done == 3 and content(state, 0) == second, "the copy read it before it was written again"
    state.copy(0, 2)
    state.copy(2, 3)
    assert content(state, 3) == second and stream.done == 4
    state.copy(2, 1)
    state.clear(2)
    assert content(state, 1) == second and third != second
    assert content(state, 2) == bytes(state.bytes_per_slot)


def test_a_step_names_slots_of_sequences_only() -> None:
    state = states()
    state.check(1, 3)
    for slot in (-1, 2, 4):
        with pytest.raises(ValueError, match=rf"slot {slot} .*0\.\.1"):
            state.check(slot, 0)
    with pytest.raises(ValueError, match="4 pending"):
        state.check(1, 4)


class Driver:
    """Pins unless it is told not to; where what was pinned lies."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.pinned = error, list[tuple[int, int]]()

    def cudaHostRegister(self, at: int, size: int, flags: int) -> int:
        self.pinned.append((at, size))
        return self.error

    def cudaHostUnregister(self, at: int) -> None:
        self.pinned = [one for one in self.pinned if one[0] != at]


@pytest.mark.parametrize(
    ("free", "error", "where"),
    [
        (1 << 20, 0, PINNED), (1 << 20, 2, "pageable host memory, as the driver pins none"),
        (1 << 10, 0, "pageable host memory, as more than half"),
    ],
)  # fmt: skip
def test_memory_that_cannot_be_pinned_is_pageable_and_said_to_be(
    free: int, error: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, forgotten = Driver(error), list[torch.device]()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host_states, "_forget_error", forgotten.append)
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda cls: cls(1, free)))
    found = HostStates(4, (2, 40), torch.device("cuda"))
    assert found.where.startswith(where) and (len(forgotten) == 1) is (error > 0)
    assert [size for _, size in driver.pinned] == ([4 * 2 * 40 * 4] if free > 1 << 10 else [])
    if found.where != PINNED:  # copies that are done when they return
        found.store(torch.ones(2, 40), 1)
        assert float(found.host(1).sum()) == 80.0
    else:
        del found
        assert driver.pinned == [], "given back with the memory"
