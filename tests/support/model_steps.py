"""Steps through a loaded model, without engine: rows of one sequence in, logits and taps out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quickdraft.models.interface import Taps
from quickdraft.models.registry import load_model

MAX_TOKENS = 256


class ModelSteps:
    """One model, one KV cache, two sequence slots; every row's logits are wanted."""

    def __init__(self, path: Path, ops: Any, taps: Taps | None = None, kv: str = "float32") -> None:
        self.loaded = load_model(path, ops, max_rows=MAX_TOKENS, max_wanted=MAX_TOKENS, taps=taps)
        self.model: Any = self.loaded.model
        self.blocks = MAX_TOKENS // 16
        self.kv = self.model.kv_cache(2 * self.blocks, kv)
        self.state: Any = self.model.recurrent_cache(3, 2, 15)
        self.batch = ops.batch(MAX_TOKENS, 2, self.blocks, 2 * self.blocks, self.model.config.vocabulary_size)
        self.program = self.model.program(self.batch, self.kv, self.state)
        self.done = [0, 0]  # certain tokens of each sequence

    def step(
        self, tokens: Sequence[int], *, drafted: int = 0, replay: int = 0, slot: int = 0
    ) -> NDArray[np.float32]:
        """Logits of these tokens behind what the sequence has and `replay` of its pending rows."""
        start, count = self.done[slot] + replay, len(tokens)
        table = np.arange(self.blocks, dtype=np.int32)[None] + slot * self.blocks
        numbers = ([0, count], table, range(count), [slot], [replay], [drafted])
        arrays = (tokens, range(start, start + count), *numbers)
        self.batch.set(*(np.array(array, np.int32) for array in arrays))
        self.program.run()
        self.done[slot] = start + count - drafted
        return np.array(self.model.logits[:count])

    def state_bytes(self, slot: int = 0) -> bytes:
        return b"".join(bytes(view) for view in self.state.views(slot))
