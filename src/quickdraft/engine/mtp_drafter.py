"""MTPDrafter: drafts chained through a model's own MTP module (models/mtp.py).

After every step of a request that may use it, the module's rows of the committed tokens are computed
from the target's true hidden states, so whatever a draft wrote is overwritten or cut off, and the last
row, that of the known token which the target has not read yet, is kept as the start of the next draft.
Everything else lies with the sequence (state/draft_rows.py): nothing here survives preemption, and
where a prefix hit brought no rows the drafter is cold: it sees the rows it has, and counts what lacks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quickdraft.engine.request import Request
from quickdraft.engine.runner import OpsRow, StepLogits
from quickdraft.models.mtp import MODULE_ROWS, MTPModule
from quickdraft.ops.interface import BLOCK_TOKENS, KVCache, Ops, RecurrentCache
from quickdraft.speculate.choose import BrokenLogits
from quickdraft.speculate.draft import Draft, SequenceView, StepRows, Verdict
from quickdraft.state.draft_rows import DraftRows, HiddenStates
from quickdraft.state.sequence import SequenceState

SOURCE: Final = "mtp"
DEFAULT_DRAFTS: Final = 3
MAX_DRAFTS: Final = BLOCK_TOKENS  # chained rows reach at most one block beyond the sequence's own

Row = NDArray[np.float32]


class MTPMemory:
    """Where a module's rows lie: `rows` beside the KV blocks, `states` beside the recurrent states, and
    `spare`, one block of the KV cache per sequence that is not the pool's."""

    def __init__(self, module: MTPModule, kv: KVCache, states: RecurrentCache, spare: range) -> None:
        self.module, self.kv, self.spare = module, kv, spare
        self.rows, self.states = DraftRows(kv), HiddenStates(states, module.config.width)

    def drafter(self, ops: Ops, table_width: int, drafts: int = DEFAULT_DRAFTS) -> MTPDrafter:
        """A drafter over this memory, for sequences of at most `table_width` blocks."""
        return MTPDrafter(ops, self, table_width, drafts)


@dataclass(frozen=True, slots=True)
class _Start:
    """The module's output at the last known token of a request, from which a draft is chained."""

    request_id: str
    position: int
    seen_from: int
    hidden: Row  # y [C]


class MTPDrafter:
    """speculate.draft.ModelDrafter of requests that the engine runs."""

    source = SOURCE

    def __init__(self, ops: Ops, memory: MTPMemory, table_width: int, drafts: int) -> None:
        assert 1 <= drafts <= MAX_DRAFTS and len(memory.spare) >= memory.states.sequences
        module, kv = memory.module, memory.kv
        self._ops, self._module, self._rows, self._states = ops, module, memory.rows, memory.states
        self._spare, self.longest = memory.spare, drafts
        vocabulary = module.config.vocabulary_size
        self._batch = ops.batch(MODULE_ROWS, 1, table_width + 1, kv.blocks, vocabulary)
        self._body, self._head = module.body(self._batch, kv), module.head(self._batch)
        self._starts: dict[int, _Start] = {}  # by slot
        self.cold_tokens = 0  # computed before a request that drafts, without rows

    def propose(self, view: SequenceView, budget: int) -> Draft:
        """At most `longest` tokens; none where the hidden state to start from is not there."""
        assert isinstance(view, Request), "an engine's drafter"
        count, state = min(budget, self.longest), view.state
        start = self._start(view, state) if count > 0 and state is not None else None
        if start is None or state is None:
            return Draft()
        tokens: list[int] = []
        chooser, hidden, position = view.trial(), start.hidden, start.position
        while True:
            self._module.last[0] = hidden
            self._head.run()
            best = int(self._module.best[0])
            try:
                tokens.append(chooser.choose(OpsRow(self._ops, StepLogits(self._module.logits), 0, best)))
            except BrokenLogits:
                break
            if len(tokens) == count:
                break
            chooser.push(tokens[-1])
            position += 1
            hidden = self._run(state, position, tokens[-1:], hidden[None], start.seen_from)
        return Draft(tuple(tokens), SOURCE)

    def observe(self, view: SequenceView, verdict: Verdict, taps: StepRows | None) -> None:
        """Bring the module's rows up to the committed tokens; see the module's docstring."""
        assert isinstance(view, Request), "an engine's drafter"
        state = view.state
        if taps is None or state is None or state.pending:  # pending: the step failed, and nothing is kept
            return
        start, end = taps.start, state.committed
        blocks = state.block_table
        seen_from = self._rows.first(blocks, start)
        self._rows.drop(blocks, start, end)
        if not may_draft(view):
            return
        hidden = taps.hidden()[: end - start]
        before = self._states.get(state.slot, start)
        if before is not None:
            previous = np.concatenate([before[None], hidden])
        else:
            seen_from, previous = start + 1, hidden
        first = end + 1 - len(previous)
        last = self._run(state, first, view.tokens[first : end + 1], previous, seen_from)
        self._rows.put(blocks, start, end, seen_from)
        self._states.put(state.slot, end, hidden[-1])
        self._starts[state.slot] = _Start(view.request_id, end, seen_from, last)

    def forget(self, request_id: str) -> None:
        """Nothing is kept by request: a start that does not fit its slot's request is never used."""

    def resumed(self, view: SequenceView) -> None:
        """It starts, perhaps from a prefix hit: count what it has no rows of."""
        assert isinstance(view, Request), "an engine's drafter"
        state = view.state
        if state is not None:
            self._starts.pop(state.slot, None)
        if state is not None and state.committed and may_draft(view):
            self.cold_tokens += max(0, self._rows.first(state.block_table, state.committed) - 1)

    def time_pass(self) -> float:
        """Seconds of one row and the head, in a spare block."""
        spare = np.array([[self._spare[0]]], np.int32)
        first, one = np.array([0], np.int32), np.array([0, 1], np.int32)
        started = time.perf_counter()
        self._batch.set(first, first, one, spare, first, seen_from=first)
        self._body.run()
        self._head.run()
        return time.perf_counter() - started

    def _start(self, view: Request, state: SequenceState) -> _Start | None:
        """The start at the last known token; computed where no step went before."""
        if state.slot < 0 or len(view.tokens) != state.committed + 1:
            return None
        position = state.committed
        start = self._starts.get(state.slot)
        if start is not None and (start.request_id, start.position) == (view.request_id, position):
            return start
        before = self._states.get(state.slot, position)
        if before is None:
            return None
        seen_from = self._rows.first(state.block_table, position)
        last = self._run(state, position, view.tokens[position:], before[None], seen_from)
        start = self._starts[state.slot] = _Start(view.request_id, position, seen_from, last)
        return start

    def _run(self, state: SequenceState, first: int, tokens: list[int], previous: Row, seen_from: int) -> Row:
        """Rows of `tokens` at positions first, first + 1, ...; y [C] of the last."""
        table = np.append(state.block_table, np.int32(self._spare[state.slot]))[None]
        for at in range(0, len(tokens), MODULE_ROWS):
            part = tokens[at : at + MODULE_ROWS]
            count = len(part)
            self._module.previous[:count] = previous[at : at + count]
            self._batch.set(
                np.array(part, np.int32),
                np.arange(first + at, first + at + count, dtype=np.int32),
                np.array([0, count], np.int32),
                table,
                np.array([count - 1], np.int32),
                seen_from=np.array([seen_from], np.int32),
            )
            self._body.run()
        last: Row = self._module.last[0].copy()
        return last


def may_draft(view: Request) -> bool:
    """Whether the request's speculation allows this source."""
    speculation = view.params.speculation
    return speculation.auto or SOURCE in speculation.sources
