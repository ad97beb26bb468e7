"""The disk store under kill -9: whatever the moment, what is left is whole."""

from __future__ import annotations

import multiprocessing
import random
import time
from contextlib import closing
from pathlib import Path

from tests.support.disk import Memory, numbers, opened, restore_all, segment_files, write_all

BUDGET = 16 << 20


class LargeMemory(Memory):
    """Blocks of 64 KiB, so that a write takes long enough to be killed in the middle."""

    REPEATS = 256

    def __init__(self) -> None:
        super().__init__()
        self.bytes_per_block *= self.REPEATS

    def views(self, block: int) -> list[memoryview]:
        return super().views(block) * self.REPEATS

    room = views

    def filled(self, block: int) -> None:
        pass


def write_for_ever(folder: Path, round_number: int, wrote) -> None:
    memory = LargeMemory()
    store = opened(folder, memory, budget=BUDGET)
    for number in range(1_000_000):
        write_all(store, memory, numbers(600, round_number * 1_000_000 + number))
        wrote.set()


def test_a_kill_at_any_moment_leaves_only_whole_segments(tmp_path: Path) -> None:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    dice, found, torn = random.Random(7), 0, 0
    for round_number in range(24):
        wrote = processes.Event()
        writer = processes.Process(target=write_for_ever, args=(tmp_path, round_number, wrote), daemon=True)
        writer.start()
        assert wrote.wait(60)
        time.sleep(dice.uniform(0, 0.03))
        writer.kill()
        writer.join()
        torn += len(list(tmp_path.glob("*/*.tmp")))
        memory = LargeMemory()
        with closing(opened(tmp_path, memory, budget=BUDGET)) as store:
            assert store.counters.rejected_files == 0, "something half-done had a segment's name"
            assert store.counters.bytes_on_disk == sum(p.stat().st_size for p in segment_files(tmp_path))
            assert store.counters.bytes_on_disk <= BUDGET
            for number in range(round_number * 1_000_000, round_number * 1_000_000 + 40):
                found += restore_all(store, memory, numbers(600, number))
            assert store.counters.rejected_files == 0
        assert not list(tmp_path.glob("*/*.tmp"))
    assert found, "nothing survived"
    assert torn, "no kill came in the middle of a write"
