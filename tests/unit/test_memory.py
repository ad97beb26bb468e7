"""Memory of an engine: taken when it is promised, and the context it carries, lowered and said where it is
less than the model's."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from quickdraft.config import Hardware
from quickdraft.engine.memory import SPARE_BYTES
from quickdraft.engine.memory_sizes import card_spare_bytes
from quickdraft.engine.opened import EngineConfig, Opened, open_model
from quickdraft.errors import ConfigError
from quickdraft.ops.cpu.backend import CpuOps
from quickdraft.ops.cpu.buffers import Buffers
from tests.support.tiny import write_tiny_llama

MODEL_TOKENS = 512  # of the tiny model, at 256 bytes of keys and values a token
TOKEN_BYTES = 256


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", quantisation="Q4_1")


def opened(path: Path, **changes: object) -> Opened:
    return open_model(path, EngineConfig(threads=1, **changes))


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(Hardware, "detect", classmethod(lambda cls: cls(1, size)))


def resident_bytes() -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def taken(size: int) -> tuple[int, int, int]:
    """Bytes that became resident when `size` were taken, the sum of what was there before, and how far from
    a 64-byte boundary it lies."""
    buffers = Buffers()
    array = buffers.zeros((size // 4,), np.int32)
    array[:1000] = 7
    dropped = buffers.zeros((size,), np.uint8)
    del dropped
    before = resident_bytes()
    buffers.take()
    return resident_bytes() - before, int(array.sum()), array.ctypes.data % 64


def test_taken_memory_is_resident_and_keeps_its_content() -> None:
    size = 64 << 20
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:  # this process may hold freed memory
        grown, total, offset = fresh.submit(taken, size).result()
    assert 0.8 * size < grown < 1.2 * size
    assert total == 7000 and offset == 0


@pytest.mark.parametrize("take", [False, True])
def test_the_context_is_what_the_blocks_carry(path: Path, take: bool) -> None:
    whole = opened(path, kv_memory_bytes=1 << 20, take_memory=take)
    assert (whole.max_context_tokens, whole.context.limited_by, whole.context.note) == (512, None, "")
    asked = opened(path, kv_memory_bytes=1 << 20, take_memory=take, max_context=100)
    assert (asked.max_context_tokens, asked.context.limited_by) == (100, "--context")
    small = opened(path, kv_memory_bytes=200 * TOKEN_BYTES, take_memory=take)
    assert (small.max_context_tokens, small.context.limited_by) == (192, "memory")
    (said,) = (line for line in small.explain() if "lowered" in line)
    assert "512 tokens to 192" in said
    with pytest.raises(ConfigError, match=r"300 tokens.*at most 192 tokens"):
        opened(path, kv_memory_bytes=200 * TOKEN_BYTES, take_memory=take, max_context=300)


def test_memory_that_is_not_free_is_not_promised(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, SPARE_BYTES + 100 * TOKEN_BYTES)
    monkeypatch.setattr(Hardware, "default_kv_memory_bytes", 1 << 20)
    less = opened(path, take_memory=True)
    assert (less.max_context_tokens, less.memory.blocks) == (96, 6)
    assert sum("lowered" in line for line in less.explain()) == 2, "the KV memory and the context"
    with pytest.raises(ConfigError, match=r"does not fit into memory.*got 1 MiB"):
        opened(path, take_memory=True, kv_memory_bytes=1 << 20)
    free(monkeypatch, 0)
    with pytest.raises(ConfigError, match="no block"):
        opened(path, take_memory=True)


def test_on_a_card_its_memory_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default what is left of it; and no more than that is promised, whatever the host has."""
    monkeypatch.setattr(CpuOps, "free_memory_bytes", lambda self: card_spare_bytes(8) + 64 * TOKEN_BYTES)
    found = opened(path)
    assert found.memory.blocks * 16 == found.max_context_tokens == 64
    assert "lowered" in found.context.note
    monkeypatch.setattr(CpuOps, "free_memory_bytes", lambda self: SPARE_BYTES + 64 * TOKEN_BYTES)
    with pytest.raises(ConfigError, match="beside the model"):
        opened(path, take_memory=True, kv_memory_bytes=80 * TOKEN_BYTES)
