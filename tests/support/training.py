"""Training on the tiny llama: a target without tokenizer, and a data folder it wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from quickdraft.engine.llm import LLM
from quickdraft.train.chat_rows import answered
from quickdraft.train.display import Display
from quickdraft.train.rows import append_rows
from quickdraft.train.run import Settings
from tests.support.tiny import write_tiny_llama

ROWS = 24
STEPS = 80


def tiny_target(folder: Path) -> Path:
    return write_tiny_llama(folder / "tiny.gguf", layers=6, tokenizer=False)


def tiny_data(folder: Path, target: Path) -> Path:
    """Rows of random prompts of few tokens with the target's own greedy answers."""
    random = np.random.default_rng(7)
    prompts = {
        index: [int(token) for token in random.integers(0, 40, 6)]
        for index in range(2 * ROWS)
        if index % 5 != 4  # those would be sampled
    }
    llm = LLM(target, threads=1, max_sequences=8, kv_memory_bytes=1 << 24)
    append_rows(folder, answered(llm, "prompt", dict(list(prompts.items())[:ROWS]), 0, 30))
    llm.close()
    return folder


def tiny_settings(kind: str, target: Path, out: Path, data: Path, **changes: Any) -> Settings:
    settings: dict[str, Any] = {
        "steps": STEPS, "texts": 2, "rate": 5e-3, "vocab_size": 200, "threads": 1, "anchors": 8, "bits": 16,
    }  # fmt: skip
    if kind == "dflash2":
        settings |= {"layers": 1, "block": 4, "window": 32, "mask_id": 1}
    return Settings(kind, str(target), out, data, **(settings | changes))


class Quiet(Display):
    """Keeps lines; `at` is called with the step of every line of the curve."""

    def __init__(self, at: Any = None) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._at = at

    def report(self, line: str) -> None:
        self.lines.append(line)

    @contextmanager
    def training(self, plan: Any) -> Iterator[Any]:
        with super().training(plan) as show:

            def both(line: Any) -> None:
                show(line)
                if self._at is not None:
                    self._at(line.step)

            yield both
