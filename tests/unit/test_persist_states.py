"""Recurrent states on disk: found by exact tokens, never without their KV, within the one budget."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from quickdraft.state.persist import DiskStore
from tests.support.disk import KEY, Memory, numbers, write_all

TOKENS = numbers(100, seed=1)


class States:
    """A RecurrentCache of 40 bytes a slot, in two views, whose content follows from a number."""

    bytes_per_slot, slots, sequences, max_pending = 40, 8, 0, 0
    checkpoints_in = "memory"

    def __init__(self) -> None:
        self.data = np.zeros((self.slots, 40), np.uint8)

    def fill(self, slot: int, number: int) -> None:
        self.data[slot] = np.random.default_rng(number).integers(0, 256, 40)

    def holds(self, slot: int, number: int) -> bool:
        return bool((self.data[slot] == np.random.default_rng(number).integers(0, 256, 40)).all())

    def views(self, slot: int) -> list[memoryview]:
        return [self.data[slot, :24].data, self.data[slot, 24:].data]

    room = views

    def filled(self, slot: int) -> None:
        pass


MEMORY, STATES = Memory(), States()


def opened(
    folder: Path, budget: int = 1 << 20, states: States | None = STATES, key: bytes = KEY
) -> DiskStore:
    return DiskStore(folder, key, MEMORY, budget, states)


def write(store: DiskStore, tokens: Sequence[int], *positions: int) -> None:
    assert write_all(store, MEMORY, tokens)
    for position in positions:
        STATES.fill(0, position)
        assert store.write_state(tokens, position, 0)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*/*.state")}


@pytest.mark.parametrize("restart", [False, True])
def test_a_state_is_found_after_exactly_its_tokens(tmp_path: Path, restart: bool) -> None:
    store, positions = opened(tmp_path), (1, 15, 16, 17, 64, 99, 100)
    write(store, TOKENS, *positions)
    if restart:
        store.close()
        store = opened(tmp_path)
    with closing(store):
        for most in range(101):
            assert store.last_state(TOKENS, most) == max((p for p in positions if p <= most), default=0)
        assert store.last_state([*TOKENS[:70], 1, 2], 72) == 64
        assert store.last_state([*TOKENS[:7], 1, 2], 72) == 1
        for position in positions:
            assert store.restore_state(TOKENS[:position], 3) and STATES.holds(3, position)
        assert not store.restore_state(TOKENS[:98], 3)
        counters = store.counters
        assert (counters.states, counters.restored_states, counters.rejected_files) == (7, 7, 0)
        assert counters.bytes_on_disk == sum(path.stat().st_size for path in tmp_path.glob("*/*"))


def test_without_its_kv_nothing_is_written(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as store:
        write(store, TOKENS[:40])
        assert not store.write_state(TOKENS, 41, 0) and store.write_state(TOKENS, 40, 0)
        written = store.counters.written_bytes
        assert store.write_state(TOKENS, 40, 1) and store.counters.written_bytes == written
        assert store.counters.states == 1


def test_a_state_outlives_the_segment_that_a_longer_one_replaces(tmp_path: Path) -> None:
    store = opened(tmp_path)
    write(store, TOKENS[:24])  # a segment of a block and a half
    write(store, [*TOKENS[:16], *TOKENS[16:20]])
    write(store, TOKENS[:20], 20)
    other = [*TOKENS[:16], 7, 8]
    write(store, other, 18)
    write(store, [*other, 9], 19)  # takes the place of the segment of `other`
    store.close()
    with closing(opened(tmp_path)) as store:
        assert store.counters.rejected_files == 0 and store.counters.states == 3
        assert store.restore_state(other, 1) and STATES.holds(1, 18)


def test_states_go_with_their_tokens_and_before_them(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as store:
        write(store, TOKENS, 50, 100)
        full = store.counters.bytes_on_disk
    other = numbers(100, seed=2)
    with closing(opened(tmp_path, full + 300)) as store:
        write(store, other[:16])  # the older of the two states makes room, not their KV
        assert (store.last_state(TOKENS, 99), store.last_state(TOKENS, 100)) == (0, 100)
        assert store.match(TOKENS) == 100
        write(store, other)
        assert store.match(TOKENS) == 0 and names(tmp_path) == set()
        assert store.counters.bytes_on_disk <= full + 300


def test_later_states_on_the_way_are_not_evicted_for_earlier_ones(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as store:
        write(store, TOKENS, 100)
        full = store.counters.bytes_on_disk
    with closing(opened(tmp_path, full + 100)) as store:
        assert not store.write_state(TOKENS, 50, 0)
        assert store.last_state(TOKENS, 100) == 100
        assert not store.not_writing


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(opened(tmp_path)) as store:
        write(store, TOKENS)
        monkeypatch.setattr(os, "pwritev", lambda *arguments: 0)
        assert not store.write_state(TOKENS, 100, 0)
        monkeypatch.undo()
        assert "failed" in store.not_writing and store.last_state(TOKENS, 100) == 0
    assert len(list(tmp_path.glob("*/*"))) == 1


def test_what_the_folder_may_hold_at_the_start(tmp_path: Path) -> None:
    with closing(opened(tmp_path)) as store:
        write(store, TOKENS, 50, 100)
    (folder,) = tmp_path.iterdir()
    (folder / ("a" * 64 + ".state.tmp")).write_bytes(b"x" * 50)
    kept = sorted(names(tmp_path))
    os.rename(folder / kept[0], folder / ("b" * 64 + ".state"))
    with closing(opened(tmp_path)) as store:
        assert store.counters.rejected_files == 1 and store.counters.states == 1
    assert len(list(folder.glob("*.state*"))) == 1
    with closing(opened(tmp_path, states=None)) as store:  # a model without recurrent layers, same key
        assert store.counters.rejected_files == 1 and store.match(TOKENS) == 100
    assert not names(tmp_path)


def test_other_models_states_count_and_make_room(tmp_path: Path) -> None:
    with closing(opened(tmp_path, key=bytes(32))) as store:
        write(store, TOKENS, 50, 100)
        full = store.counters.bytes_on_disk
    with closing(opened(tmp_path, full)) as store:
        assert store.counters.bytes_on_disk == full and store.last_state(TOKENS, 100) == 0
        write(store, TOKENS, 50)
        assert store.counters.bytes_on_disk <= full and store.counters.evicted_segments > 0


def test_any_thread_may_ask_for_the_counters(tmp_path: Path) -> None:
    """/metrics is answered while the engine's thread writes."""
    store, tokens = opened(tmp_path), numbers(400, seed=2)
    asked, over = list[int | Exception](), threading.Event()
    assert write_all(store, MEMORY, tokens)

    def ask() -> None:
        while not over.is_set():
            try:
                asked.append(store.counters.states)
            except RuntimeError as error:
                asked.append(error)

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=ask)
    thread.start()
    for position in range(1, 401):
        assert store.write_state(tokens, position, 0)
    over.set()
    thread.join()
    sys.setswitchinterval(usual)
    assert not [each for each in asked if isinstance(each, Exception)] and len(set(asked)) > 10
    store.close()
