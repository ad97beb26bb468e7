"""ModelRunner: carries a step plan to the kernels and hands back lazy logits rows.

It packs rows, runs the recorded program once, and knows nothing of requests, drafts or prefill:
every row is a token at a position of a sequence. Rows are valid until the next `run`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quickdraft.engine.plan import StepPlan
from quickdraft.models.interface import Model
from quickdraft.ops.interface import BEST_OUTPUT_ROWS, KVCache, Noise, Ops, Program, RecurrentCache, Rows
from quickdraft.speculate.choose import LogitsRow


class StepLogits:
    """The logits of a step's `count` wanted rows [R, V]; `missing`, if given, computes them when first asked
    for. What one row is asked for that the backend finds for all at once is kept for the others."""

    __slots__ = ("_count", "_logits", "_missing", "_ops", "_tops")

    def __init__(self, ops: Ops, logits: Any, count: int, missing: Program | None = None) -> None:
        self._ops, self._logits, self._count, self._missing = ops, logits, count, missing
        self._tops: dict[int, tuple[NDArray[np.int32], NDArray[np.float32]] | None] = {}  # by k

    def row(self, index: int) -> Rows:
        """One row [V], where it lies."""
        self._compute()
        return self._ops.rows(self._logits, index, index + 1)[0]

    def top(self, index: int, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ops.top of a row."""
        if k not in self._tops:
            self._compute()
            self._tops[k] = self._ops.top_together(self._logits, self._count, k)
        found = self._tops[k]
        if found is None:
            return self._ops.top(self.row(index), k)
        ids, values = found[0][index], found[1][index]
        return ids[ids >= 0].astype(np.int64), values[ids >= 0]

    def _compute(self) -> None:
        if self._missing is not None:
            self._missing.run()
            self._missing = None


class OpsRow:
    """speculate.choose.LogitsRow over one row of a step's logits; `drawn`: what it gives under a noise, where
    that is known."""

    __slots__ = ("_best", "_drawn", "_index", "_logits", "_ops")

    def __init__(
        self, ops: Ops, logits: StepLogits, index: int, best: int, drawn: tuple[Noise, int] | None = None
    ) -> None:
        self._ops, self._logits, self._index, self._best = ops, logits, index, best
        self._drawn = drawn

    def argmax(self) -> int:
        return self._best

    def top(self, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return self._logits.top(self._index, k)

    def full(self) -> NDArray[np.float32]:
        row: NDArray[np.float32] = np.asarray(self._logits.row(self._index))
        row.flags.writeable = False
        return row

    def gumbel(
        self,
        temperature: float,
        seed: int,
        position: int,
        values: NDArray[np.float32] | None = None,
        ids: NDArray[np.int64] | None = None,
    ) -> int:
        if values is None and self._drawn is not None:
            noise, token = self._drawn
            if noise == Noise(temperature, seed, position):
                return token
        row = self._logits.row(self._index) if values is None else values
        return self._ops.gumbel_choice(row, temperature, seed, position, ids)


class ModelRunner:
    """engine.plan.Runner over a model and its backend; `recurrent` are the states of a model that has
    recurrent layers, whose plans name their slots."""

    def __init__(
        self,
        ops: Ops,
        model: Model,
        kv: KVCache,
        recurrent: RecurrentCache | None = None,
        *,
        max_rows: int,
        max_wanted: int,
        max_sequences: int,
        table_width: int,
    ) -> None:
        self.ops, self.model, self.kv = ops, model, kv
        self.max_rows, self.max_wanted = max_rows, max_wanted
        self.batch = ops.batch(max_rows, max_sequences, table_width, kv.blocks, model.config.vocabulary_size)
        self.program = model.program(self.batch, kv, recurrent)
        self._best_programs = model.best_programs(self.batch, kv)
        self._logits: Any = model.logits
        self._best: Any = model.best
        self._row_starts: list[int] = []

    def run(self, plan: StepPlan) -> list[list[LogitsRow]]:
        """Compute every row of the plan; one list of `wanted` rows per entry, in plan order."""
        tokens: list[int] = []
        positions: list[int] = []
        row_starts = [0]
        wanted: list[int] = []
        for entry in plan.entries:
            tokens += entry.tokens
            positions += range(entry.start, entry.start + len(entry.tokens))
            row_starts.append(len(tokens))
            wanted += range(len(tokens) - entry.wanted, len(tokens))
        self.batch.set(
            np.array(tokens, np.int32),
            np.array(positions, np.int32),
            np.array(row_starts, np.int32),
            _tables(plan),
            np.array(wanted, np.int32),
            *_states(plan),
        )
        self._row_starts = row_starts
        if self._best_programs is not None and plan.best_only and 0 < len(wanted) <= BEST_OUTPUT_ROWS:
            best, missing = self._best_programs
            best.run()
            logits = StepLogits(self.ops, self._logits, len(wanted), missing)
        else:
            self.program.run()
            logits = StepLogits(self.ops, self._logits, len(wanted))
        return self._rows(plan, logits, len(wanted))

    def _rows(self, plan: StepPlan, logits: StepLogits, count: int) -> list[list[LogitsRow]]:
        """The rows with their argmax, and what is drawn of them where the backend does so ahead."""
        noises = _noises(plan)
        chosen = self.ops.gumbel_rows(self._logits, self._best, noises) if any(noises) else None
        if chosen is None:
            noises, best = [None] * count, self._best[:count].tolist()
            drawn = best
        else:
            best, drawn = chosen.T.tolist()
        rows = [
            OpsRow(self.ops, logits, i, best[i], None if noise is None else (noise, drawn[i]))
            for i, noise in enumerate(noises)
        ]
        result: list[list[LogitsRow]] = []
        first = 0
        for entry in plan.entries:
            result.append([*rows[first : first + entry.wanted]])
            first += entry.wanted
        return result

    def hidden(self, index: int) -> Rows:
        """Final hidden states [rows, C] of entry `index` of the last run, of a model that taps them."""
        return self._rows_of(self.model.hidden, index)

    def layer(self, index: int, layer: int) -> Rows:
        """The residual stream [rows, C] after a layer that the model taps, likewise."""
        return self._rows_of(self.model.taps[layer], index)

    def _rows_of(self, buffer: Any, index: int) -> Rows:
        return self.ops.rows(buffer, self._row_starts[index], self._row_starts[index + 1])


def _tables(plan: StepPlan) -> NDArray[np.int32]:
    """The block tables of the entries, [B, M], unused places -1."""
    if len(plan.entries) == 1:
        return plan.entries[0].block_table[None]
    width = max(len(entry.block_table) for entry in plan.entries)
    tables = np.full((len(plan.entries), width), -1, np.int32)
    for table, entry in zip(tables, plan.entries, strict=True):
        table[: len(entry.block_table)] = entry.block_table
    return tables


def _noises(plan: StepPlan) -> list[Noise | None]:
    """What each wanted row is drawn with: it chooses the token behind its own position."""
    found: list[Noise | None] = []
    for entry in plan.entries:
        end = entry.start + len(entry.tokens)
        if entry.noise is None:
            found += [None] * entry.wanted
        else:
            found += [Noise(*entry.noise, place + 1) for place in range(end - entry.wanted, end)]
    return found


def _states(plan: StepPlan) -> tuple[NDArray[np.int32], ...]:
    """Slots, replay and drafted rows of the entries; nothing for a model without recurrent layers."""
    if plan.entries[0].slot < 0:
        return ()
    return (
        np.array([entry.slot for entry in plan.entries], np.int32),
        np.array([entry.replay for entry in plan.entries], np.int32),
        np.array([len(entry.drafted) for entry in plan.entries], np.int32),
    )
