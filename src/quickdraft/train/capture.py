"""What a target computes of texts: hidden states for training, read through quickdraft's own kernels.

Rows are read one text at a time in one pass, so a drafter is trained on exactly the numbers it will be
given. Knows no drafter and no loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import ConfigError
from quickdraft.models.interface import Taps
from quickdraft.models.registry import load_model
from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.ops.select import select

Rows = NDArray[np.float32]


class Capture:
    """A target that hands out, for every position of a text, the residual stream after `layers` (in this
    order) and the final hidden state: float32 [tokens, (len(layers) + 1) * C]."""

    def __init__(
        self, path: Path, layers: Sequence[int], *, longest: int, threads: int | None = None
    ) -> None:
        self._ops = select(threads)
        loaded = load_model(
            path, self._ops, max_rows=longest, max_wanted=1, taps=Taps(tuple(layers), hidden=True)
        )
        self.loaded, self._model, self.longest = loaded, loaded.model, longest
        self.layers = tuple(layers)
        blocks = -(-longest // BLOCK_TOKENS)
        kv = self._model.kv_cache(blocks, loaded.kv_dtype)
        config = self._model.config
        if config.recurrent is not None:
            raise ConfigError("capture of a model with recurrent layers", expected="a dense target")
        self.width, self.vocabulary = config.width, config.vocabulary_size
        self._batch = self._ops.batch(longest, 1, blocks, blocks, config.vocabulary_size)
        self._table = np.arange(blocks, dtype=np.int32)[None]
        self._program = self._model.program(self._batch, kv)

    def read(self, tokens: Sequence[int]) -> Rows:
        """Hidden states of one text of at most `longest` tokens."""
        count = len(tokens)
        if not 0 < count <= self.longest:
            raise ConfigError("a text of the wrong length", got=count, expected=f"1..{self.longest} tokens")
        self._batch.set(
            np.array(tokens, np.int32),
            np.arange(count, dtype=np.int32),
            np.array([0, count], np.int32),
            self._table,
            np.array([], np.int32),
        )
        self._program.run()
        hidden: Any = self._model.hidden
        parts = [self._model.taps[layer] for layer in self.layers] + [hidden]
        return np.concatenate([np.asarray(part)[:count] for part in parts], axis=1)
