"""The hashes of a model's files: remembered between starts, never for other bytes, never in the way."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from quickdraft.errors import ConfigError
from quickdraft.models import digest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setattr(digest, "cache_folder", lambda: folder)
    return folder


def sha256(data: bytes) -> list[bytes]:
    return [hashlib.sha256(data).digest()]


def test_a_file_is_hashed_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"weights")
    assert digest.files_digest([file]) == sha256(b"weights")
    monkeypatch.delattr(hashlib, "file_digest")
    assert digest.files_digest([file]) == sha256(b"weights")
    assert [path.name for path in cache.iterdir()] == ["hashes.json"]


def test_other_bytes_under_the_same_inode_size_and_time(cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"weights")
    stat = file.stat()
    digest.files_digest([file])
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    assert digest.files_digest([file]) == sha256(b"WEIGHTS")


def test_a_file_that_changes_while_it_is_read_has_no_hash(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, original = tmp_path / "model", hashlib.file_digest
    file.write_bytes(b"weights")

    def slow(opened, name: str):
        found = original(opened, name)
        file.write_bytes(b"other weights")
        return found

    monkeypatch.setattr(hashlib, "file_digest", slow)
    with pytest.raises(ConfigError, match="changed while it was read"):
        digest.files_digest([file])
    monkeypatch.setattr(hashlib, "file_digest", original)
    assert digest.files_digest([file]) == sha256(b"other weights")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "nothing in it": lambda memory: memory.write_bytes(b""),
    "half of it": lambda memory: memory.write_bytes(memory.read_bytes()[:20]),
    "a list": lambda memory: memory.write_bytes(b"[1]"),
    "deep": lambda memory: memory.write_bytes(b"[" * 100_000),
    "not text": lambda memory: memory.write_bytes(b"\xff\xfe"),
    "no hashes": lambda memory: memory.write_text(
        json.dumps(dict.fromkeys(json.loads(memory.read_bytes()), 5))
    ),
    "a folder": lambda memory: (memory.unlink(), memory.mkdir(), (memory / "x").touch()),
    "its folder a file": lambda memory: (memory.unlink(), memory.parent.rmdir(), memory.parent.touch()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_memory_that_is_of_no_use_costs_only_time(cache: Path, tmp_path: Path, damage: str) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"weights")
    digest.files_digest([file])
    DAMAGE[damage](cache / "hashes.json")
    for _ in range(2):
        assert digest.files_digest([file]) == sha256(b"weights")
    if cache.is_dir():
        assert [path.name for path in cache.iterdir()] == ["hashes.json"], "a temporary file stayed"
