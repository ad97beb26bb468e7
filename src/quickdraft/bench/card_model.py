"""A random model on the card, in the engine that serves: step times, prefixes, captures and memory.

The folder it is opened from has names and shapes and holes for large tensors; quantised weights are drawn on
the card, other large ones are zero: what a step costs does not depend on what it computes. Knows no output
form.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from quickdraft.bench.workloads import RANDOM_SEED
from quickdraft.engine.engine_config import EngineConfig
from quickdraft.engine.measured_costs import Scratch, time_step
from quickdraft.engine.opened import Opened, open_model
from quickdraft.errors import EngineError
from quickdraft.models.describe_hybrid import HybridSizes
from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.prepare.random_model import write_outline
from quickdraft.types import MAX_ROWS, SamplingParams

CHUNK_ROWS: Final = 256
SPARE_BLOCKS: Final = 8
CHECKPOINT_BYTES: Final = 1 << 29  # three states of the 27B


@dataclass(frozen=True, slots=True)
class StepTime:
    """Steps of one sequence, all rows wanted: the median in seconds; `first` and `second` also compile
    kernels and make captures, where this shape is met for the first time."""

    rows: int
    context: int
    seconds: float
    first: float
    second: float


@dataclass(frozen=True, slots=True)
class Prefix:
    """Seconds to the first token of a prompt: nothing cached, and all but its end cached."""

    tokens: int
    cold_seconds: float
    warm_seconds: float
    cached_tokens: int


@contextmanager
def opened_random(sizes: HybridSizes, ops: Any, context: int) -> Iterator[Opened]:
    """The model with room for one sequence of `context` tokens and little else, to fit a card of 24 GB."""
    per_block = sizes_block_bytes(sizes)
    with tempfile.TemporaryDirectory(prefix="quickdraft-card-") as folder:
        write_outline(sizes, "compressed-tensors", Path(folder))
        config = EngineConfig(
            kv_dtype="bfloat16", kv_memory_bytes=(context // BLOCK_TOKENS + SPARE_BLOCKS) * per_block,
            max_sequences=1, chunk_rows=CHUNK_ROWS, max_context=context, drafters=(),
            checkpoint_memory_bytes=CHECKPOINT_BYTES, pending_rows=MAX_ROWS - 1,
        )  # fmt: skip
        opened = open_model(folder, config, ops)
        try:
            yield opened
        finally:
            opened.close()


def sizes_block_bytes(sizes: HybridSizes) -> int:
    """Bytes of a block of bfloat16 keys and values, the MTP layer's included."""
    layers = sizes.layer_types.count("full_attention") + 1
    return layers * 2 * sizes.kv_heads * sizes.head_dim * BLOCK_TOKENS * 2


def step_times(
    opened: Opened, rows: Sequence[int], contexts: Sequence[int], repeats: int, enough: Callable[[], bool]
) -> Iterator[StepTime]:
    """Of every row count after every context, until there is `enough`; `repeats` behind the first two."""
    scratch = Scratch(opened.runner, opened.memory.blocks, opened.memory.slots, opened.max_context_tokens)
    opened.runner.kv.take(opened.memory.blocks)
    for context in contexts:
        for count in rows:
            if count > scratch.most_rows or enough():
                continue
            first, second, *times = (time_step(scratch, context, count) for _ in range(2 + repeats))
            yield StepTime(count, context, statistics.median(times), first, second)


def prefix(opened: Opened, tokens: int) -> Prefix:
    """Two prompts of `tokens` ids that differ in the last one, after another that compiles their kernels."""
    vocabulary = opened.runner.model.config.vocabulary_size
    first, ids = np.random.default_rng(RANDOM_SEED).integers(0, vocabulary, (2, tokens)).tolist()
    _first_token(opened, first)
    cold, _ = _first_token(opened, ids)
    warm, cached = _first_token(opened, [*ids[:-1], (ids[-1] + 1) % vocabulary])
    return Prefix(tokens, cold, warm, cached)


def _first_token(opened: Opened, ids: list[int]) -> tuple[float, int]:
    """Seconds, and how many tokens were cached."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    request = opened.request(opened.next_id(), ids, params)
    started = time.perf_counter()
    opened.engine.add(request)
    while opened.engine.has_work:
        opened.engine.step()
    seconds = time.perf_counter() - started
    if request.error is not None:
        raise EngineError("the random model failed", got=request.error)
    return seconds, request.timings.cached_tokens
