"""EngineConfig: how to open a model. Checked values; knows nothing of what they become."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quickdraft.config import (
    DEFAULT_CACHE_BYTES,
    DEFAULT_CHECKPOINT_INTERVAL,
    DEFAULT_MAX_SEQUENCES,
    MAX_SEQUENCES,
    check_cache,
    check_checkpoint_interval,
    check_head_bits,
    check_range,
)
from quickdraft.ops.interface import KVDtype
from quickdraft.types import MAX_ROWS, Backend


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to open a model. None means: decide from the machine."""

    threads: int | None = None
    kv_dtype: KVDtype | None = None
    kv_memory_bytes: int | None = None
    max_sequences: int = DEFAULT_MAX_SEQUENCES
    chunk_rows: int = 256  # prompt rows computed per step
    max_context: int | None = None  # tokens; the model's own limit when that is lower
    prefix_cache: bool = True  # resume from what earlier requests computed
    cache_dir: Path | None = None  # keep the prefix cache on disk too
    cache_bytes: int = DEFAULT_CACHE_BYTES  # of the files in cache_dir, at most
    checkpoint_memory_bytes: int | None = None  # for recurrent states of the prefix cache
    checkpoint_interval: int = DEFAULT_CHECKPOINT_INTERVAL  # tokens between two of them; 0: no fixed distance
    head_bits: int | None = None  # of embedding and head of a folder: see models.loading.folder
    drafters: tuple[Path, ...] | None = None  # folders of models that draft; None: those shipped for the file
    draft_vocab: Path | None = None  # limits the head of the MTP module: see models.draft_vocab
    measure_costs: bool = False  # time steps here, or remember it; else a row costs what it usually does
    lookup_corpus: Path | None = None  # a file that `prepare lookup-corpus` made, as one more source
    frozen_costs: bool = False  # what was measured is not corrected by the times of steps
    explain_drafts: Path | None = None  # a line per step on how its drafts were chosen: see engine.explain
    backend: Backend = Backend.CPU
    # Drafted rows of a step, of models with recurrent layers, which keep their inputs: see engine.memory
    pending_rows: int | None = None
    take_memory: bool = False  # when the model is opened: see engine.memory
    own_mtp: bool = True  # read the MTP module that a checkpoint holds; a drafter's folder is another matter

    def __post_init__(self) -> None:
        check_cache(self.prefix_cache, self.cache_dir)
        check_checkpoint_interval(self.checkpoint_interval)
        check_head_bits(self.head_bits)
        check_range("max_sequences", self.max_sequences, 1, MAX_SEQUENCES)
        check_range("chunk_rows", self.chunk_rows, 1, 1 << 16)
        if self.pending_rows is not None:
            check_range("pending_rows", self.pending_rows, 1, MAX_ROWS - 1)
        if self.max_context is not None:
            check_range("max_context", self.max_context, 2, 2**31 - 1)
