"""What the engine needs of a model, whatever its architecture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quickdraft.models.config import ModelConfig
from quickdraft.ops.interface import Batch, Buffer, KVCache, KVDtype, Program
from quickdraft.types import TokenizerData


class Model(Protocol):
    """Weights and activation buffers of one architecture over one backend."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def logits(self) -> Buffer: ...  # [max_wanted, V], the wanted rows of the last run
    @property
    def best(self) -> Buffer: ...  # int32 [max_wanted], their argmax, -1 for a row with NaN
    @property
    def weight_bytes(self) -> int: ...  # tensor bytes of the file

    def kv_cache(self, blocks: int, dtype: KVDtype) -> KVCache:
        """A cache of `blocks` blocks of 16 positions for all layers."""

    def program(self, batch: Batch, kv: KVCache) -> Program:
        """One forward pass of the rows in `batch`, recorded; R = 0 is fine (no logits)."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what else its file holds."""

    model: Model
    tokenizer: TokenizerData | None
    kv_dtype: KVDtype  # the one asked for, else the file's default
    files: tuple[Path, ...]  # the GGUF file, or config.json and the weight files: they determine the numbers,
    notes: tuple[str, ...] = ()  # together with what loading changed in them, in words
