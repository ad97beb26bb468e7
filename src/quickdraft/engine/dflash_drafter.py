"""DFlashDrafter: drafts of a block drafter (models/dflash.py), chosen as the request itself would choose.

Of a request that may use it, keys and values of the tokens that were kept are made from the target's taps,
which wait (held_rows.py) until a draft is wanted, enough of them have come, or the blocks are published; no
drafted row is ever among them. They lie in a KV cache of the drafter's own, a side car of the target's:
addressed by the same block ids, so that what is shared, copied, evicted or written to disk of a sequence
includes them. Which positions have rows is kept per block (state/draft_rows.py); where a prefix hit brought
none the drafter is cold: a block sees the rows that are there, and what lacks is counted.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quickdraft.engine.draft_logits import DraftLogits, margin
from quickdraft.engine.held_rows import HELD_ROWS, HeldRows
from quickdraft.engine.request import Request
from quickdraft.models.dflash import FEATURE_ROWS, DFlashModule
from quickdraft.ops.interface import BLOCK_TOKENS, KVDtype, Ops
from quickdraft.speculate.choose import BrokenLogits, Chooser
from quickdraft.speculate.draft import Draft, SequenceView, StepRows, Verdict, allows
from quickdraft.state.draft_rows import DraftRows
from quickdraft.state.sequence import SequenceState

SOURCES: Final = {1: "dflash", 2: "dflash2"}  # by version


class DFlashMemory:
    """Where a module's rows lie: `rows` beside the blocks of a pool of `blocks`, of which `places` at most
    have rows at a time, and behind these `spare`, which a block of drafts may reach into."""

    def __init__(self, module: DFlashModule, blocks: int, places: int, dtype: KVDtype) -> None:
        self.module, self.source = module, SOURCES[module.config.version]
        self.spare = np.arange(places, places + spare_blocks(module.config.block), dtype=np.int32)
        self.kv = module.kv_cache(places + len(self.spare), side_dtype(dtype))
        self.rows = DraftRows(self.kv, blocks, places)

    def drafter(self, ops: Ops, table_width: int, in_auto: bool = True) -> DFlashDrafter:
        """A drafter over this memory, for sequences of at most `table_width` blocks."""
        return DFlashDrafter(ops, self, table_width, in_auto)


def side_dtype(dtype: KVDtype) -> KVDtype:
    """The type of a drafter's own cache beside a target's of this type: int8 is a mode of the target's."""
    return "float16" if dtype == "int8" else dtype


def spare_blocks(rows: int) -> int:
    """Blocks that `rows` rows after a sequence may reach into beyond its own."""
    return -(-rows // BLOCK_TOKENS)


class DFlashDrafter:
    """speculate.draft.ModelDrafter of requests that the engine runs."""

    def __init__(self, ops: Ops, memory: DFlashMemory, table_width: int, in_auto: bool = True) -> None:
        module, kv = memory.module, memory.kv
        self.source, self.in_auto, self.longest = memory.source, in_auto, module.config.block - 1
        self._ops, self._module, self._rows, self._spare = ops, module, memory.rows, memory.spare
        sizes = FEATURE_ROWS, 1, table_width + len(memory.spare), kv.blocks, module.config.vocabulary_size
        self._context_batch, self._block_batch = ops.batch(*sizes), ops.batch(*sizes)
        self._window = module.config.longest_window or module.positions
        self._context = module.context(self._context_batch, kv)
        self._block = module.block(self._block_batch, kv)
        self.pass_tokens = tuple(rows - 1 for rows in module.config.block_lengths)
        self._held = HeldRows()  # taps side by side, [rows, taps * C]
        self.cold_tokens = 0  # in the window of a request that resumed, without rows

    def propose(self, view: SequenceView, budget: int) -> Draft:
        """The first `budget` tokens of the shortest block that has so many; none without any context."""
        assert isinstance(view, Request), "an engine's drafter"
        state = view.state
        if budget <= 0 or state is None or len(view.tokens) != state.committed + 1:
            return Draft()
        position = state.committed
        self._make_rows(view.request_id, state)
        seen_from = self._rows.first(state.block_table, position)
        rows = min(self._module.config.rows_for(budget), self._module.positions - position)
        if seen_from == position or rows < 2:
            return Draft()
        seen = max(seen_from, position - self._window)
        self._module.set_block(
            self._block_batch,
            np.array(view.tokens[-1:], np.int32),
            np.array([position], np.int32),
            np.array([rows], np.int32),
            np.concatenate([self._rows.table(state.block_table, seen), self._spare])[None],
            np.array([seen_from], np.int32),
        )
        self._block.run()
        tokens, margins = self._walk(view.trial(), view.tokens[-1], min(budget, rows - 1))
        return Draft(tokens, self.source, margins)

    def observe(self, view: SequenceView, verdict: Verdict, taps: StepRows | None) -> None:
        """Keep the taps of the tokens that were kept, and make their rows where they are many."""
        assert isinstance(view, Request), "an engine's drafter"
        state = view.state
        if taps is None or state is None or state.pending:  # pending: the step failed, and nothing is kept
            return
        start, end, blocks = taps.start, state.committed, state.block_table
        self._rows.drop(blocks, start, end)
        if not self._may_draft(view):
            return
        layers = [taps.layer(layer)[: end - start] for layer in self._module.config.target_layers]
        if self._held.add(view.request_id, start, self._ops.join(layers, 1)).due:
            self._make_rows(view.request_id, state)

    def forget(self, request_id: str) -> None:
        """Drop what waits."""
        self._held.forget(request_id)

    def publishing(self, view: SequenceView) -> None:
        """Its blocks are about to be published: they take all rows along."""
        assert isinstance(view, Request), "an engine's drafter"
        if view.state is not None:
            self._make_rows(view.request_id, view.state)

    def resumed(self, view: SequenceView) -> None:
        """It starts, perhaps from a prefix hit: count what it has no rows of, and would see."""
        assert isinstance(view, Request), "an engine's drafter"
        state = view.state
        self._held.drop(view.request_id)
        if state is not None and state.committed and self._may_draft(view):
            seen = max(0, state.committed - self._window)
            self.cold_tokens += max(0, self._rows.first(state.block_table, state.committed) - seen)

    def forked(self, source: SequenceView, view: SequenceView) -> None:
        """`view` goes on from where `source` is, in a copy of its state; so it starts as warm."""
        assert isinstance(view, Request), "an engine's drafter"
        if self._may_draft(view):
            self._held.fork(source.request_id, view.request_id)

    def follow(self, request_id: str, followed: bool) -> None:
        """See FollowingDrafter."""
        self._held.follow(request_id, followed)

    def time_pass(self, tokens: int) -> float:
        """Seconds of one block without context, in the spare blocks."""
        first, rows = np.array([0], np.int32), np.array([self._module.config.rows_for(tokens)], np.int32)
        started = time.perf_counter()
        self._module.set_block(self._block_batch, first, first, rows, self._spare[None], first)
        self._block.run()
        return time.perf_counter() - started

    def time_upkeep(self) -> float:
        """Seconds of a token's part of the rows that are made at a time, in the spare blocks."""
        started = time.perf_counter()
        self._module.features[:HELD_ROWS] = 0.0
        self._run_context(HELD_ROWS, 0, self._spare[None])
        return (time.perf_counter() - started) / HELD_ROWS

    def _may_draft(self, view: Request) -> bool:
        followed = self._held.follows(view.request_id)
        return followed and allows(view.params.speculation, self.source, self.in_auto)

    def _walk(self, chooser: Chooser, previous: int, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The request's own choice, row by row, among a row's candidates; and the margin of each."""
        tokens: list[int] = []
        margins: list[float] = []
        candidates, size = self._module.candidates(count), self._module.config.vocabulary_size
        for index in range(count):
            ids, scores = candidates.scores(index, previous)
            if not len(ids):
                break
            row = DraftLogits(self._ops, ids, size, scores, int(scores.argmax()))
            try:
                previous = chooser.choose(row)
            except BrokenLogits:
                break
            chooser.push(previous)
            tokens.append(previous)
            margins.append(margin(row, previous))
        return tuple(tokens), tuple(margins)

    def _make_rows(self, request_id: str, state: SequenceState) -> None:
        """Keys and values of the tokens whose taps wait."""
        held, module = self._held.take(request_id, state.committed), self._module
        if held is None:
            return
        blocks, start, end = state.block_table, held.start, held.end
        seen_from = self._rows.first(blocks, start)
        self._rows.reserve(blocks, start, end)
        table, taps = self._rows.table(blocks, start)[None], held.rows(self._ops.join)
        for first in range(start, end, FEATURE_ROWS):
            last = min(first + FEATURE_ROWS, end)
            count = last - first
            module.features[:count] = taps[first - start : last - start]
            self._run_context(count, first, table)
        self._rows.put(blocks, start, end, seen_from)

    def _run_context(self, count: int, first: int, table: NDArray[np.int32]) -> None:
        """Keys and values of `count` positions from `first` on, from module.features."""
        self._context_batch.set(
            np.zeros(count, np.int32),
            np.arange(first, first + count, dtype=np.int32),
            np.array([0, count], np.int32),
            table,
            np.empty(0, np.int32),
        )
        self._context.run()
