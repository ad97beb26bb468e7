"""The context an engine serves: what the file claims, what was asked for, what the KV memory holds."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from quickdraft.engine.llm import LLM
from quickdraft.errors import ContextTooLong
from quickdraft.types import SamplingParams
from tests.support.tiny import write_tiny_llama


def test_max_context_is_the_limit(tmp_path: Path) -> None:
    llm = LLM(write_tiny_llama(tmp_path / "t.gguf"), threads=1, kv_memory_bytes=1 << 20, max_context=64)
    assert llm.max_context_tokens == 64
    assert len(llm.generate([5] * 60, SamplingParams(temperature=0, ignore_eos=True)).ids) == 4
    with pytest.raises(ContextTooLong):
        llm.generate([5] * 64)


def test_a_huge_context_length_costs_no_memory(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "t.gguf", context=2**24)
    tracemalloc.start()
    llm = LLM(path, threads=1, kv_memory_bytes=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert llm.max_context_tokens == 2048 and peak < 32 << 20
