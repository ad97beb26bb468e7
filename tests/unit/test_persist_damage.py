"""The disk store when the disk is wrong: damage, strange files, errors. Never a wrong byte."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from quickdraft.errors import ConfigError
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

TOKENS = numbers(256 + 100)
OWN = KEY.hex()[:16]
FIXED, TABLE = 92, 92 + 4 * 256  # where tokens and checksums of the first segment begin
DIGEST = TABLE + 4 * 16
PAYLOAD = DIGEST + 32


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """A cache folder with a segment of 256 tokens and its child of 100."""
    folder = tmp_path_factory.mktemp("pristine")
    memory = Memory()
    with closing(opened(folder, memory)) as store:
        assert write_all(store, memory, TOKENS)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "cache")
    return tmp_path / "cache"


def parent_and_child(folder: Path) -> tuple[Path, Path]:
    parent, child = sorted(segment_files(folder), key=lambda path: -path.stat().st_size)
    return parent, child


@pytest.mark.parametrize(
    ("first", "end"),
    [(0, FIXED), (FIXED, TABLE), (TABLE, DIGEST), (DIGEST, PAYLOAD), (PAYLOAD, file_bytes(256, Memory()))],
    ids=["header", "tokens", "checksums", "digest", "payload"],
)
def test_no_flipped_bit_is_served(folder: Path, first: int, end: int) -> None:
    memory, dice = Memory(), random.Random(first)
    parent, child = parent_and_child(folder)
    whole = {path: path.read_bytes() for path in (parent, child)}
    for _ in range(60):
        at, bit = dice.randrange(first, end), 1 << dice.randrange(8)
        damaged = bytearray(whole[parent])
        damaged[at] ^= bit
        good = max(0, at - PAYLOAD) // memory.bytes_per_block * 16
        parent.write_bytes(damaged)
        with closing(opened(folder, memory)) as store:
            if at < PAYLOAD:  # found when the store opens
                assert (store.match(TOKENS), store.counters.rejected_files) == (0, 2)
            else:
                assert restore_all(store, memory, TOKENS) == good
                assert (store.match(TOKENS), store.counters.rejected_files) == (0, 2)
            assert store.counters.bytes_on_disk == 0
            assert not segment_files(folder)
            assert write_all(store, memory, TOKENS)
            parent.write_bytes(damaged)  # and again, under a store that is open
            restored = restore_all(store, memory, TOKENS)
            assert restored == (len(TOKENS) if at < PAYLOAD else good)
        for path, data in whole.items():
            path.write_bytes(data)


def test_no_torn_file_is_served(folder: Path) -> None:
    memory = Memory()
    parent, child = parent_and_child(folder)
    whole, kept = parent.read_bytes(), child.read_bytes()
    edges = [8, FIXED, TABLE, DIGEST, *range(PAYLOAD, len(whole) + 1, memory.bytes_per_block)]
    sizes = {0, *(edge + by for edge in edges for by in (-1, 0, 1))} - {len(whole)}
    for size in sorted(sizes):
        torn = (whole + b"\0")[:size]
        parent.write_bytes(torn)
        with closing(opened(folder, memory)) as store:
            assert (store.match(TOKENS), store.counters.rejected_files) == (0, 2)
            assert write_all(store, memory, TOKENS)
            parent.write_bytes(torn)
            good = max(0, size - PAYLOAD) // memory.bytes_per_block * 16
            assert restore_all(store, memory, TOKENS) == (good if good < 256 else len(TOKENS))
        parent.write_bytes(whole)
        child.write_bytes(kept)


def sealed(data: bytes, at: int, new: bytes) -> bytes:
    """A header changed and its digest made right again, as another version would write it."""
    head = data[:at] + new + data[at + len(new) : DIGEST]
    return head + hashlib.sha256(head).digest() + data[PAYLOAD:]


@pytest.mark.parametrize(
    ("at", "new", "left"),
    [
        (8, (2).to_bytes(4, "little"), 0),  # version
        (12, (7).to_bytes(4, "little"), 0),  # start in the middle of a block
        (16, (0).to_bytes(4, "little"), 0),  # no tokens
        (16, (1 << 31).to_bytes(4, "little"), 0),  # far too many
        (16, (255).to_bytes(4, "little"), 0),  # not what the digest covers
        (20, (64).to_bytes(8, "little"), 0),  # bytes per block
        (28, bytes(32), 1),  # compatibility key: somebody else's, so it stays
        (60, bytes(32), 0),  # what it follows
        (FIXED, (1).to_bytes(4, "little"), 0),  # tokens that do not give its name
    ],
)
def test_a_header_with_a_right_digest_is_still_not_trusted(folder: Path, at, new, left) -> None:
    parent, _ = parent_and_child(folder)
    parent.write_bytes(sealed(parent.read_bytes(), at, new))
    with closing(opened(folder, Memory())) as store:
        assert (store.match(TOKENS), store.counters.segments) == (0, 0)
        assert store.counters.rejected_files == 2, "the child has nothing before it"
    assert len(segment_files(folder)) == left


def test_strange_files_are_ignored_or_removed(folder: Path, tmp_path: Path) -> None:
    own, memory, dice = folder / OWN, Memory(), random.Random(5)
    parent, child = parent_and_child(folder)
    outside = tmp_path / "outside"
    outside.write_bytes(parent.read_bytes())
    names = [hashlib.sha256(bytes([n])).hexdigest() + ".kv" for n in range(7)]
    (own / names[0]).mkdir()
    (own / names[1]).symlink_to(outside)
    os.mkfifo(own / names[2])
    (own / names[3]).write_bytes(b"")
    (own / names[4]).write_bytes(dice.randbytes(5000))
    (own / names[5]).write_bytes(parent.read_bytes())  # right but for its name
    (own / (names[6] + ".tmp")).write_bytes(b"half")
    (own / "notes.txt").write_text("mine")
    (folder / "elsewhere").mkdir()
    with closing(opened(folder, memory)) as store:
        assert (store.counters.segments, store.counters.rejected_files) == (2, 6)
        assert restore_all(store, memory, TOKENS) == len(TOKENS)
    assert {path.name for path in own.iterdir()} == {*names[:3], "notes.txt", parent.name, child.name}
    assert outside.exists()


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "absent"])
def test_something_else_under_the_name_of_a_known_file(folder: Path, kind: str, tmp_path: Path) -> None:
    memory = Memory()
    _, child = parent_and_child(folder)
    shutil.copy(child, tmp_path / "copy")
    with closing(opened(folder, memory)) as store:
        child.unlink()
        if kind == "folder":
            child.mkdir()
        elif kind == "link":
            child.symlink_to(tmp_path / "copy")
        elif kind == "pipe":
            os.mkfifo(child)
        assert restore_all(store, memory, TOKENS) == 256
        assert (store.match(TOKENS), store.counters.rejected_files) == (256, 1)
        assert restore_all(store, memory, TOKENS) == 256


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_file_that_may_not_be_read_is_a_miss(folder: Path) -> None:
    parent_and_child(folder)[1].chmod(0)
    with closing(opened(folder, Memory())) as store:
        assert (store.match(TOKENS), store.counters.rejected_files) == (256, 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_leaves_nothing_and_ends_writing(folder: Path, monkeypatch, code: int) -> None:
    memory, real, calls = Memory(), os.pwritev, []

    def fails(file, views, position):
        calls.append(position)
        if len(calls) > 3:
            raise OSError(code, os.strerror(code))
        return real(file, views, position)

    with closing(opened(folder, memory)) as store:
        before = store.counters.bytes_on_disk
        monkeypatch.setattr(os, "pwritev", fails)
        assert not write_all(store, memory, numbers(200, 8))
        monkeypatch.undo()
        assert len(calls) == 4
        assert os.strerror(code) in store.counters.not_writing
        assert not write_all(store, memory, numbers(200, 8))
        assert restore_all(store, memory, TOKENS) == len(TOKENS)
        assert store.counters.bytes_on_disk == before
    assert len(list((folder / OWN).iterdir())) == 2


def test_a_failed_read_is_a_miss(folder: Path, monkeypatch) -> None:
    memory = Memory()

    def fails(file, views, position):
        raise OSError(errno.EIO, "input/output error")

    with closing(opened(folder, memory)) as store:
        monkeypatch.setattr(os, "preadv", fails)
        assert store.restore(TOKENS, 16, [0, 1]) == 0
        monkeypatch.undo()
        assert restore_all(store, memory, TOKENS) == 256
        assert (store.counters.rejected_files, len(segment_files(folder))) == (1, 1)


def test_a_process_out_of_descriptors_loses_nothing(folder: Path, monkeypatch) -> None:
    memory = Memory()

    def fails(*arguments, **options):
        raise OSError(errno.EMFILE, "too many open files")

    with closing(opened(folder, memory)) as store:
        monkeypatch.setattr(os, "open", fails)
        assert store.restore(TOKENS, 0, [0, 1]) == 0
        assert not write_all(store, memory, numbers(20, 8))
        monkeypatch.undo()
        assert restore_all(store, memory, TOKENS) == len(TOKENS)
        assert write_all(store, memory, numbers(20, 8))
    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(ConfigError, match="too many open files"):
        opened(folder, memory)
    monkeypatch.undo()
    with closing(opened(folder, memory)) as store:
        assert restore_all(store, memory, TOKENS) == len(TOKENS)


def test_a_folder_that_refuses_deletions_does_not_lose_the_rest(folder: Path, monkeypatch) -> None:
    memory = Memory()

    def fails(*arguments, **options):
        raise OSError(errno.EROFS, "read-only file system")

    with closing(opened(folder, memory, budget=file_bytes(256, memory) * 2)) as store:
        before = store.counters.bytes_on_disk
        monkeypatch.setattr(os, "unlink", fails)
        assert not write_all(store, memory, numbers(256, 8))
        assert "read-only" in store.counters.not_writing
        assert store.counters.bytes_on_disk == before
        assert restore_all(store, memory, TOKENS) == 256, "more than one segment was given up"


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch) -> None:
    memory, tokens = Memory(), numbers(70)
    reads, writes = os.preadv, os.pwritev

    def short(move):
        return lambda file, views, position: move(file, [views[0][:5]], position)

    monkeypatch.setattr(os, "preadv", short(reads))
    monkeypatch.setattr(os, "pwritev", short(writes))
    with closing(opened(tmp_path, memory)) as store:
        assert write_all(store, memory, tokens)
        assert restore_all(store, memory, tokens) == 70
    monkeypatch.undo()
    with closing(opened(tmp_path, memory)) as store:
        assert restore_all(store, memory, tokens) == 70


def test_what_cannot_be_deleted_is_not_counted_as_evicted(tmp_path: Path) -> None:
    memory = Memory()
    with closing(opened(tmp_path, memory, budget=file_bytes(16, memory))) as store:
        assert write_all(store, memory, TOKENS[:16])
        [file] = segment_files(tmp_path)
        file.unlink()
        file.mkdir()
        assert not write_all(store, memory, TOKENS[16:32])
        assert "deleting" in store.not_writing
        assert (store.counters.evicted_segments, store.counters.written_segments) == (0, 1)
        assert store.counters.bytes_on_disk == file_bytes(16, memory), "it may still take its room"
