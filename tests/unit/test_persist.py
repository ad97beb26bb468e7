"""The disk store when all goes well: contents, matches, growth, budget, recency, other models."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from quickdraft.errors import ConfigError
from quickdraft.ops.cpu.backend import CpuOps
from quickdraft.state import persist
from quickdraft.state.draft_rows import KVBlocks
from quickdraft.state.persist import DiskStore
from quickdraft.state.sequence import blocks_for
from tests.support.disk import (
    KEY,
    Memory,
    file_bytes,
    numbers,
    opened,
    restore_all,
    segment_files,
    write_all,
)

OTHER_KEY = bytes(32)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 255, 256, 257, 700])
def test_what_was_written_comes_back_also_after_a_restart(tmp_path: Path, count: int) -> None:
    memory, tokens = Memory(), numbers(count)
    with closing(opened(tmp_path, memory)) as store:
        assert write_all(store, memory, tokens)
        assert restore_all(store, memory, [*tokens, 7]) == count
    with closing(opened(tmp_path, memory)) as store:
        assert store.match([*tokens, 7]) == store.missing(tokens) == count
        assert restore_all(store, memory, tokens) == count
        last = blocks_for(count) - 1  # a part of a segment, into any block
        assert store.restore(tokens, last, [50]) == 1
        memory.assert_right(tokens, count, last, [50])
        counters = store.counters
    assert (counters.hits, counters.restored_tokens) == (2, count + count - 16 * last)
    assert counters.restored_bytes == (last + 2) * memory.bytes_per_block
    sizes = [path.stat().st_size for path in segment_files(tmp_path)]
    assert sorted(sizes) == sorted(file_bytes(min(256, count - at), memory) for at in range(0, count, 256))
    assert (counters.bytes_on_disk, counters.segments) == (sum(sizes), len(sizes))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_cpu_cache_gets_its_bits_back(tmp_path: Path, dtype) -> None:
    kv = CpuOps(1).kv_cache(layers=3, blocks=40, kv_heads=2, head_dim=24, dtype=dtype)
    random = np.random.default_rng(1)
    for part in (kv.raw_keys, kv.raw_values):  # any bits, NaNs included
        part.view(np.uint8)[...] = random.integers(0, 256, part.view(np.uint8).shape, np.uint8)
    places = random.permutation(40).tolist()
    source, target, tokens = places[:16], places[16:32], numbers(250)
    others = [block for block in range(40) if block not in target]
    before = [part[:, others].copy() for part in (kv.raw_keys, kv.raw_values)]
    with closing(DiskStore(tmp_path, KEY, KVBlocks(kv), 1 << 30)) as store:
        assert store.write(tokens, 0, source)
        assert store.restore(tokens, 0, target) == 16
    for part, kept in zip((kv.raw_keys, kv.raw_values), before, strict=True):
        assert part[:, target].tobytes() == part[:, source].tobytes()
        assert part[:, others].tobytes() == kept.tobytes(), "a block nobody asked for was written"


def test_children_attach_inside_a_segment_and_siblings_share_tokens(tmp_path: Path) -> None:
    memory, document = Memory(), numbers(300)
    first = [*document, 1, 2, 3, 4, 5]
    second = [*document[:100], 1, 2, 3, 6]  # leaves in the middle of the document's first segment
    third = document[:100] + [1, 2, 9] * 20  # and shares 102 tokens with the second
    with closing(opened(tmp_path, memory)) as store:
        for question in (first, second, third):
            assert write_all(store, memory, question)
    with closing(opened(tmp_path, memory)) as store:
        for question in (first, second, third):
            assert restore_all(store, memory, question) == len(question)
        for question, matched in [
            ([*document[:100], 1, 2, 3, 5], 103),
            ([*document[:100], 1, 2, 8], 102),
            (document[:99], 99),
            ([document[0] + 1, *document[1:]], 0),
            ([], 0),
        ]:
            assert restore_all(store, memory, question) == matched
        assert store.counters.segments == 4


def test_nothing_is_written_twice_and_a_longer_end_replaces_a_shorter(tmp_path: Path) -> None:
    memory, tokens, longest = Memory(), numbers(60), 0
    with closing(opened(tmp_path, memory)) as store:
        for count, written in [(5, 5), (9, 9), (9, 9), (4, 9), (16, 16), (40, 24), (60, 28), (60, 28)]:
            before = store.counters.written_bytes
            held = store.match(tokens[:count])
            blocks = list(range(blocks_for(count)))
            memory.compute(tokens[:count], 0, blocks)
            assert store.write(tokens[:count], 0, blocks)  # from the start: only the rest is written
            expected = 0 if held == count else file_bytes(written, memory)
            assert store.counters.written_bytes - before == expected
            longest = max(longest, count)
            assert restore_all(store, memory, tokens) == longest
        sizes = sorted(path.stat().st_size for path in segment_files(tmp_path))
        assert sizes == sorted(file_bytes(count, memory) for count in (16, 24, 28))


def test_what_has_nothing_before_it_or_no_room_is_refused(tmp_path: Path) -> None:
    memory, tokens = Memory(), numbers(600)
    budget = file_bytes(256, memory) + file_bytes(100, memory) + file_bytes(16, memory)
    with closing(opened(tmp_path, memory, budget=budget)) as store:
        assert not store.write(tokens, 256, list(range(16))), "an orphan was written"
        assert store.write(tokens, 0, list(range(16)))
        assert write_all(store, memory, numbers(16, 1))
        assert not store.write(tokens, 256, list(range(16))), "its own beginning was evicted for it"
        assert [store.match(tokens), store.match(numbers(16, 1))] == [256, 16], "evicted for nothing"
        assert store.write(tokens, 256, list(range(6)))
        assert store.counters.evicted_segments == 0
    with closing(opened(tmp_path / "small", memory, budget=file_bytes(256, memory) - 1)) as store:
        assert not store.write(tokens, 0, list(range(16)))
    assert not segment_files(tmp_path / "small")


def test_eviction_keeps_what_is_used_also_after_a_restart(tmp_path: Path) -> None:
    memory = Memory()
    chains = [numbers(300, seed) for seed in range(4)]
    pair = file_bytes(256, memory) + file_bytes(44, memory)
    budget = 4 * pair
    with closing(opened(tmp_path, memory, budget=budget)) as store:
        for chain in chains:
            assert write_all(store, memory, chain)
        assert restore_all(store, memory, chains[0]) == 300
    with closing(opened(tmp_path, memory, budget=budget)) as store:
        assert write_all(store, memory, numbers(40, 9))
        assert store.counters.bytes_on_disk <= budget
        assert [store.match(chain) for chain in chains] == [300, 256, 300, 300], "leaves go first"
        assert write_all(store, memory, numbers(300, 10))
        assert [store.match(chain) for chain in chains] == [300, 0, 256, 300]
        assert store.counters.evicted_segments == 3
    with closing(opened(tmp_path, memory, budget=2 * pair)) as store:  # a smaller budget holds at once
        assert store.counters.bytes_on_disk <= 2 * pair
        assert [store.match(chain) for chain in chains] == [256, 0, 0, 0]
        assert store.match(numbers(300, 10)) == 300


def test_a_shared_beginning_keeps_the_branch_used_last(tmp_path: Path) -> None:
    memory, branches = Memory(), [[5] * 10 + [branch] * 6 for branch in (1, 2)]
    budget = 2 * file_bytes(16, memory)
    with closing(opened(tmp_path, memory, budget=budget)) as store:
        assert all(write_all(store, memory, branch) for branch in branches)
        assert restore_all(store, memory, branches[1]) == 16
        assert restore_all(store, memory, [5] * 10) == 10  # in both
        assert write_all(store, memory, numbers(16))
        assert [store.match(branch) for branch in branches] == [10, 16]


@pytest.mark.parametrize("lost", ["equal", "reversed"])
def test_times_lost_in_a_copy_do_not_evict_what_others_need(tmp_path: Path, lost: str) -> None:
    memory, chain = Memory(), numbers(700)
    with closing(opened(tmp_path, memory)) as store:
        assert write_all(store, memory, chain)
    for age, path in enumerate(segment_files(tmp_path)):  # the deepest first
        stamp = 10**18 - (age if lost == "reversed" else 0)
        os.utime(path, ns=(stamp, stamp))
    with closing(opened(tmp_path, memory, budget=2 * file_bytes(256, memory))) as store:
        assert restore_all(store, memory, chain) == 512


def test_a_clock_that_was_set_back_does_not_confuse_recency(tmp_path: Path) -> None:
    memory, budget = Memory(), 2 * file_bytes(16, Memory())
    with closing(opened(tmp_path, memory, budget=budget)) as store:
        assert all(write_all(store, memory, numbers(16, seed)) for seed in (0, 1))
    for path in segment_files(tmp_path):
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**18))
    with closing(opened(tmp_path, memory, budget=budget)) as store:
        assert restore_all(store, memory, numbers(16, 0)) == 16
        assert write_all(store, memory, numbers(16, 2))
        assert [store.match(numbers(16, seed)) for seed in range(3)] == [16, 0, 16]


def test_a_time_that_no_clock_shows_does_not_end_the_order(tmp_path: Path) -> None:
    memory = Memory()
    with closing(opened(tmp_path, memory)) as store:
        assert write_all(store, memory, numbers(16, 0))
    [first] = segment_files(tmp_path)
    os.utime(first, ns=(0, (2**63 - 1) * 10**9))  # some file systems keep this, some the latest they can
    with closing(opened(tmp_path, memory)) as store:
        assert restore_all(store, memory, numbers(16, 0)) == 16
        assert write_all(store, memory, numbers(16, 1)) and write_all(store, memory, numbers(16, 2))
        times = [path.stat().st_mtime_ns for path in segment_files(tmp_path)]
        assert segment_files(tmp_path)[0] == first and len(set(times)) == 3


def test_a_shorter_end_left_by_a_kill_is_removed(tmp_path: Path) -> None:
    memory, tokens = Memory(), numbers(9)
    with closing(opened(tmp_path, memory)) as store:
        assert write_all(store, memory, tokens[:5])
        [short] = segment_files(tmp_path)
        data = short.read_bytes()
        assert write_all(store, memory, tokens)
    short.write_bytes(data)
    with closing(opened(tmp_path, memory)) as store:
        assert (store.counters.segments, store.counters.rejected_files) == (1, 1)
        assert restore_all(store, memory, tokens) == 9
    assert len(segment_files(tmp_path)) == 1


def test_other_models_count_and_the_oldest_files_of_all_go_first(tmp_path: Path) -> None:
    memory, size = Memory(), file_bytes(16, Memory())
    with closing(opened(tmp_path, memory, key=OTHER_KEY)) as other:
        assert write_all(other, memory, numbers(16, 0))
        assert write_all(other, memory, numbers(16, 1))
    with closing(opened(tmp_path, memory, budget=3 * size)) as store:
        assert store.match(numbers(16, 0)) == 0, "KV of another model was found"
        assert store.counters.bytes_on_disk == 2 * size
        assert write_all(store, memory, numbers(16, 2))
        assert write_all(store, memory, numbers(16, 3))
        assert (store.counters.bytes_on_disk, store.counters.evicted_segments) == (3 * size, 1)
        with closing(opened(tmp_path, memory, key=OTHER_KEY)) as other:
            assert [other.match(numbers(16, seed)) for seed in (0, 1)] == [0, 16]
            assert write_all(store, memory, numbers(16, 4))
            assert other.match(numbers(16, 1)) == restore_all(other, memory, numbers(16, 1)) == 16
        assert store.match(numbers(16, 2)) == 0, "its process runs, so our oldest had to go"


@pytest.mark.parametrize("used", [False, True])
def test_of_another_model_the_deepest_go_first(tmp_path: Path, used: bool) -> None:
    memory, chain = Memory(128), numbers(8 * 256)
    with closing(opened(tmp_path, memory, key=OTHER_KEY)) as other:
        assert write_all(other, memory, chain)
        assert not used or restore_all(other, memory, chain) == len(chain)
    for left in range(7, 0, -1):
        opened(tmp_path, memory, budget=left * file_bytes(256, memory)).close()
        with closing(opened(tmp_path, memory, key=OTHER_KEY)) as other:
            assert other.match(chain) == left * 256
            assert other.counters.rejected_files == 0, "one was left with nothing before it"


def test_one_process_at_a_time(tmp_path: Path) -> None:
    memory = Memory()
    store = opened(tmp_path, memory)
    with pytest.raises(ConfigError, match=r"in use by another process.*hint: stop"):
        opened(tmp_path, memory)
    store.close()
    store.close()
    opened(tmp_path, memory).close()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o700}


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.* cannot be used.*not a folder"):
        opened(tmp_path / "file", Memory())
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / KEY.hex()[:16]).symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"link.* cannot be used"):
        opened(tmp_path / "link", Memory())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"cannot be used.*ermission"):
        opened(tmp_path, Memory())


def test_a_disk_nobody_reads_from_is_left_alone_until_somebody_does(tmp_path: Path, monkeypatch) -> None:
    memory, size = Memory(), file_bytes(16, Memory())
    monkeypatch.setattr(persist, "UNPAID_BYTES", 3 * size)
    with closing(opened(tmp_path, memory, budget=2 * size)) as store:
        wrote = [write_all(store, memory, numbers(16, seed)) for seed in range(6)]
        assert wrote == [True] * 4 + [False] * 2
        assert f"{4 * size} bytes" in store.counters.not_writing
        assert restore_all(store, memory, numbers(16, 3)) == 16
        assert store.counters.not_writing == ""
        assert write_all(store, memory, numbers(16, 5))
