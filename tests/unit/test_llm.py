"""LLM: settings that are wrong are named, limits are kept, and a closed one says so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from quickdraft.engine.llm import LLM
from quickdraft.errors import ConfigError, ContextTooLong, EngineError, UnsupportedError
from quickdraft.text.chat_prompt import ChatPrompt
from quickdraft.types import SamplingParams
from tests.support.tiny import write_tiny_llama
from tests.support.tiny_hybrid import write_tiny_hybrid

SMALL = {"kv_memory_bytes": 1 << 20, "threads": 1}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_sequences": 0}, "max_sequences"),
        ({"chunk_rows": 0}, "chunk_rows"),
        ({"max_context": 0}, "max_context"),
        ({"kv_dtype": "int4"}, "kv_dtype"),
        ({"kv_memory_bytes": 0}, "holds no block"),
        ({"kv_memory_bytes": 1 << 60}, "does not fit into memory"),
        ({"threads": 0}, "threads"),
        ({"prefix_cache": False, "cache_dir": Path("kv")}, "without a prefix cache"),
    ],
    ids=str,
)
def test_wrong_settings(path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(path, **{**SMALL, **settings})


def test_the_context_limit_is_kept(path: Path) -> None:
    llm = LLM(path, **SMALL, max_context=24)
    assert llm.max_context_tokens == 24
    assert len(llm.generate([5] * 20, SamplingParams(temperature=0, ignore_eos=True)).ids) == 4
    with pytest.raises(ContextTooLong):
        llm.generate([5] * 24)


def test_text_without_a_tokenizer_is_an_error_that_names_the_model(tmp_path: Path) -> None:
    llm = LLM(write_tiny_hybrid(tmp_path / "ids", tokenizer=False), **SMALL)
    for ask in (
        lambda: llm.generate("text"),
        lambda: llm.chat([{"role": "user", "content": "text"}]),
        lambda: llm.generate([5], SamplingParams(stop=("x",))),
    ):
        with pytest.raises(UnsupportedError, match="model ids has no tokenizer"):
            ask()
    assert llm.generate([5], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)).ids


def test_marks_of_a_chat_reach_the_request(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, seen = LLM(path, **SMALL), []
    add = llm.opened.engine.add
    monkeypatch.setattr(llm.opened.engine, "add", lambda request: (seen.append(request.marks), add(request)))
    params = SamplingParams(temperature=0, max_tokens=1)
    assert llm.generate(ChatPrompt([5, 6, 7], (2,)), params).ids == llm.generate([5, 6, 7], params).ids
    assert seen == [(2,), ()]


def test_a_closed_one_says_so(path: Path) -> None:
    llm = LLM(path, **SMALL)
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("a")


def test_the_start_lines_say_what_was_loaded(path: Path) -> None:
    first = LLM(path, **SMALL).opened.explain()[0]
    assert re.fullmatch(r"model tiny: tiny\.gguf, \d\.\d MB of weights, loaded in \d+\.\d\d s", first)
