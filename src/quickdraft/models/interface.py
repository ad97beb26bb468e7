"""What the engine needs of a model, whatever its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quickdraft.models.config import ModelConfig
from quickdraft.models.loading.inventory import TensorFile
from quickdraft.models.mtp import MTPModule, TargetParts
from quickdraft.ops.interface import Batch, Buffer, KVCache, KVDtype, Program, RecurrentCache
from quickdraft.types import TokenizerData


@dataclass(frozen=True, slots=True)
class Taps:
    """Hidden states to keep of every row of a step; buffers exist only for what is asked."""

    layers: tuple[int, ...] = ()  # the residual stream after these layers
    hidden: bool = False  # after the final norm


class Model(Protocol):
    """Weights and activation buffers of one architecture over one backend."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def logits(self) -> Buffer: ...  # [max_wanted, V], the wanted rows of the last run
    @property
    def best(self) -> Buffer: ...  # int32 [max_wanted], their argmax, -1 for a row with NaN
    @property
    def taps(self) -> Mapping[int, Buffer]: ...  # layer -> [max_rows, C]; those of Taps.layers
    @property
    def hidden(self) -> Buffer | None: ...  # [max_rows, C], where Taps.hidden
    @property
    def parts(self) -> TargetParts: ...  # what drafters share
    @property
    def weight_bytes(self) -> int: ...  # tensor bytes of the file

    def kv_cache(self, blocks: int, dtype: KVDtype) -> KVCache:
        """A cache of `blocks` blocks of 16 positions for all layers that have keys and values."""

    def recurrent_cache(self, slots: int, sequences: int, max_pending: int) -> RecurrentCache | None:
        """States of all recurrent layers, None for a model that has none."""

    def program(self, batch: Batch, kv: KVCache, recurrent: RecurrentCache | None = None) -> Program:
        """One forward pass of the rows in `batch`, recorded; R = 0 is fine (no logits)."""

    def best_programs(self, batch: Batch, kv: KVCache) -> tuple[Program, Program] | None:
        """The same for 1 to BEST_OUTPUT_ROWS wanted rows in two parts: the first gives `best`; the second,
        run after it for the same batch, `logits`. None where the first alone would save nothing."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what else its file holds."""

    model: Model
    tokenizer: TokenizerData | None
    kv_dtype: KVDtype  # the one asked for, else the file's default
    tensors: TensorFile  # what the model left is still there
    eos_ids: tuple[int, ...]  # known even where there is no tokenizer
    files: tuple[Path, ...]  # the GGUF file, or config.json and the weight files: they determine the numbers,
    notes: tuple[str, ...] = ()  # together with what loading changed in them, in words
    mtp: MTPModule | None = None  # where it was asked for and the file has one
