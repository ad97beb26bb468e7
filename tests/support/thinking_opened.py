"""A tiny random llama that thinks and calls tools: its tokenizer and template are those of thinking_model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from quickdraft.engine.grammar import Grammars
from quickdraft.engine.opened import EngineConfig, Opened, open_model
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.tokenizer import Tokenizer
from tests.support.thinking_model import thinking_tokenizer_data
from tests.support.tiny import write_tiny_llama

VOCABULARY = 320
# Tokens that lie across what grammars tell apart; Ċ is a newline, Ġ a space.
ACROSS = ('{"', '":', 'Ġ"', '",', '"}', ">Ċ", "Ċ</", "Ċ<", "}}", "1,", "Ã©", "aĊ", 'e"', "ĊĊ", "true")


def open_thinker(folder: Path, **settings: Any) -> Opened:
    """Every token is likely at some time, so nothing but its constraint keeps an answer in form."""
    data = thinking_tokenizer_data()
    more = (*ACROSS, *(f"w{n}" for n in range(VOCABULARY - len(data.tokens) - len(ACROSS))))
    data = dataclasses.replace(
        data, tokens=(*data.tokens, *more), token_types=(*data.token_types, *[1] * len(more))
    )
    path = write_tiny_llama(folder / "thinker.gguf", vocabulary_size=VOCABULARY, context=2048)
    opened = open_model(
        path, EngineConfig(**{"threads": 1, "kv_memory_bytes": 1 << 23, "drafters": ()} | settings)
    )
    opened.tokenizer, opened.chat_template = Tokenizer(data), ChatTemplate.of(data)
    opened.compiler = Grammars(opened.tokenizer, opened.eos_ids)
    return opened
