"""StepRunner: one sequence of random ids, and blocks of any number of rows after any context.

For costs only: what a step costs does not depend on which tokens it holds. The context is computed
as a prompt would be, so keys and values are real. Nothing here knows what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from quickdraft.bench.workloads import RANDOM_SEED
from quickdraft.config import cached_model
from quickdraft.engine.plan import PlanEntry, StepPlan
from quickdraft.engine.runner import ModelRunner
from quickdraft.errors import ConfigError
from quickdraft.models.registry import load_model
from quickdraft.ops.interface import BLOCK_TOKENS, Ops
from quickdraft.state.blocks import BlockPool
from quickdraft.state.sequence import SequenceState, blocks_for
from quickdraft.state.slots import SlotPool
from quickdraft.types import MAX_ROWS

ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS: Final = (0, 2048, 6000)
CHUNK_ROWS: Final = 256
OpTime = tuple[float, float]  # seconds, seconds of them spent waiting for other threads


class StepRunner:
    """A model, its own KV cache of `max_tokens` tokens, and a sequence that grows to the right."""

    def __init__(self, model: str | Path, ops: Ops, max_tokens: int, max_rows: int) -> None:
        self.name, path = cached_model(model)
        rows = max(max_rows, CHUNK_ROWS)
        loaded = load_model(path, ops, max_rows=rows, max_wanted=max_rows)
        self.model = loaded.model
        self.context_length = loaded.model.config.context_length
        self.kv_dtype = loaded.kv_dtype
        blocks = blocks_for(min(max_tokens, self.context_length))
        states = loaded.model.recurrent_cache(1, 1, max_rows - 1)
        self.runner = ModelRunner(
            ops,
            loaded.model,
            loaded.model.kv_cache(blocks, loaded.kv_dtype),
            states,
            max_rows=rows,
            max_wanted=max_rows,
            max_sequences=1,
            table_width=blocks,
        )
        self._state = SequenceState(BlockPool(blocks), SlotPool(states) if states is not None else None)
        self._state.begin()
        random = np.random.default_rng(RANDOM_SEED)
        vocabulary = loaded.model.config.vocabulary_size
        self._ids = random.integers(0, vocabulary, blocks * BLOCK_TOKENS).tolist()

    @property
    def context(self) -> int:
        """Tokens computed so far."""
        return self._state.committed

    def read(self, context: int) -> None:
        """Compute the sequence up to `context` tokens; it never gets shorter."""
        assert context >= self.context, "contexts come in ascending order"
        while self.context < context:
            rows = min(CHUNK_ROWS, context - self.context)
            plan = self._plan(rows, wanted=0)
            self.runner.run(plan)
            self._state.commit(rows)

    def step(self, rows: int) -> float:
        """Seconds of one step of `rows` rows after the context, all their logits wanted; nothing is kept."""
        plan = self._plan(rows, wanted=rows)
        started = time.perf_counter()
        self.runner.run(plan)
        seconds = time.perf_counter() - started
        self._state.commit(0)
        return seconds

    def timed_ops(self, rows: int) -> list[OpTime]:
        """Times of each recorded op in one such step, in order; needs the CPU backend's program."""
        plan = self._plan(rows, wanted=rows)
        self.runner.run(plan)  # the batch stays set
        program: Any = self.runner.program
        times: list[OpTime] = program.run_timed()
        self._state.commit(0)
        return times

    def _plan(self, rows: int, *, wanted: int) -> StepPlan:
        state = self._state
        tokens = tuple(self._ids[state.committed : state.committed + rows])
        drafted = tokens[1:] if wanted else ()
        state.reserve(rows, len(drafted))
        entry = PlanEntry(
            "bench", tokens, state.committed, wanted, drafted, "", state.block_table, state.slot, state.replay
        )
        return StepPlan((entry,))


def open_steps(
    model: str | Path, ops: Ops, rows: Sequence[int] | None, contexts: Sequence[int] | None
) -> tuple[StepRunner, list[int], list[int]]:
    """A runner with room for these rows after these contexts, and both as they are to be measured."""
    chosen_rows = checked_rows(rows)
    most = chosen_rows[-1]
    runner = StepRunner(model, ops, max((*(contexts or CONTEXTS), 0)) + most, most)
    return runner, chosen_rows, checked_contexts(contexts, most, runner.context_length)


def checked_rows(rows: Sequence[int] | None) -> list[int]:
    """Row counts, ascending, each once; ConfigError unless they are 1..64. None: the default ones."""
    chosen = sorted(set(ROWS if rows is None else rows))
    if not chosen or chosen[0] < 1 or chosen[-1] > MAX_ROWS:
        raise ConfigError("bad row counts", got=chosen, expected=f"1..{MAX_ROWS}")
    return chosen


def checked_contexts(contexts: Sequence[int] | None, max_rows: int, context_length: int) -> list[int]:
    """Contexts, ascending, that `max_rows` rows can follow. None: those of the default ones that fit the
    model. ConfigError when one that was asked for does not fit, or none does."""
    fitting = context_length - max_rows
    chosen = sorted(set(contexts)) if contexts is not None else [c for c in CONTEXTS if c <= fitting]
    if not chosen or chosen[0] < 0 or chosen[-1] > fitting:
        raise ConfigError(
            "contexts that the model cannot hold",
            got=chosen or f"a context length of {context_length}",
            expected=f"0..{fitting} tokens, {max_rows} rows after them" if fitting >= 0 else None,
            hint="ask for fewer --rows or shorter --contexts",
        )
    return chosen
