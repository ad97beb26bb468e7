"""MTPDrafter: drafts chained through an MTP module (models/mtp.py).

After every step of a request that may use it, the module's rows of the committed tokens are computed
from the target's true hidden states, so whatever a draft wrote is overwritten or cut off, and the last
row, that of the known token which the target has not read yet, is kept as the start of the next draft.
Everything else lies with the sequence (state/draft_rows.py): nothing here survives preemption, and
where a prefix hit brought no rows the drafter is cold: it sees the rows it has, and counts what lacks.
Without recurrent slots the hidden state before the first row does not come with a prefix hit; so the
sequence resumes a token earlier, whose row is there and whose hidden state is then computed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quickdraft.engine.draft_logits import DraftLogits, margin
from quickdraft.engine.request import Request
from quickdraft.engine.runner import OpsRow, StepLogits
from quickdraft.models.mtp import MODULE_ROWS, MTPModule
from quickdraft.ops.interface import BLOCK_TOKENS, KVCache, Ops, RecurrentCache
from quickdraft.speculate.choose import BrokenLogits, LogitsRow
from quickdraft.speculate.draft import Draft, SequenceView, StepRows, Verdict, allows
from quickdraft.state.cache import Earlier
from quickdraft.state.draft_rows import DraftRows, HiddenPlaces, HiddenStates, LastHidden, resume_earlier
from quickdraft.state.sequence import SequenceState

SOURCE: Final = "mtp"
DEFAULT_DRAFTS: Final = 3
MAX_DRAFTS: Final = BLOCK_TOKENS  # chained rows reach at most one block beyond the sequence's own

Row = NDArray[np.float32]


class MTPMemory:
    """Where a module's rows lie: `rows` beside the KV blocks, `hidden` beside the recurrent states if there
    are any, and `spare`, one block of the KV cache per sequence that is not the pool's."""

    def __init__(self, module: MTPModule, kv: KVCache, states: RecurrentCache | None, spare: range) -> None:
        self.module, self.kv, self.spare = module, kv, spare
        self.rows, width = DraftRows(kv), module.config.width
        self.states = HiddenStates(states, width) if states is not None else None  # None: no recurrent layers
        self.hidden: LastHidden = self.states or HiddenPlaces(len(spare), width)

    def drafter(
        self, ops: Ops, table_width: int, drafts: int = DEFAULT_DRAFTS, in_auto: bool = True
    ) -> MTPDrafter:
        """A drafter over this memory, for sequences of at most `table_width` blocks."""
        return MTPDrafter(ops, self, table_width, drafts, in_auto)


@dataclass(frozen=True, slots=True)
class _Start:
    """The module's output at the last known token of a request, from which a draft is chained."""

    request_id: str
    place: int
    position: int
    seen_from: int
    hidden: Row  # y [C]


@dataclass(frozen=True, slots=True)
class _Resumed:
    """A prefix hit that brought the row at `position`, from which on tokens are computed, but not the hidden
    state before it."""

    request_id: str
    position: int
    first: int  # rows from here to `position` are there

    def seen_from(self, view: Request, start: int) -> int:
        """The first position that the row after `start` sees."""
        mine = (self.request_id, self.position) == (view.request_id, start)
        return self.first if mine else start + 1


_NO_HIT: Final = _Resumed("", -1, 0)


class MTPDrafter:
    """speculate.draft.ModelDrafter of requests that the engine runs."""

    source = SOURCE

    def __init__(
        self, ops: Ops, memory: MTPMemory, table_width: int, drafts: int, in_auto: bool = True
    ) -> None:
        assert 1 <= drafts <= MAX_DRAFTS and len(memory.spare) >= memory.hidden.sequences
        module, kv = memory.module, memory.kv
        self._ops, self._module, self._rows, self._last = ops, module, memory.rows, memory.hidden
        self._spare, self.longest, self.in_auto = memory.spare, drafts, in_auto
        vocabulary = module.config.vocabulary_size
        self._batch = ops.batch(MODULE_ROWS, 1, table_width + 1, kv.blocks, vocabulary)
        self._body, self._head = module.body(self._batch, kv), module.head(self._batch)
        self._starts: dict[int, _Start] = {}  # by place
        self._resumed: dict[int, _Resumed] = {}
        self.cold_tokens = 0  # computed before a request that drafts, without rows

    def propose(self, view: SequenceView, budget: int) -> Draft:
        """At most `longest` tokens; none where the hidden state to start from is not there."""
        assert isinstance(view, Request), "an engine's drafter"
        count, state = min(budget, self.longest), view.state
        start = self._start(view, state) if count > 0 and state is not None else None
        if start is None or state is None:
            return Draft()
        tokens: list[int] = []
        margins: list[float] = []
        chooser, hidden, position = view.trial(), start.hidden, start.position
        while True:
            self._module.last[0] = hidden
            self._head.run()
            best = int(self._module.best[0])
            row = self._logits(best)
            try:
                tokens.append(chooser.choose(row))
            except BrokenLogits:
                break
            margins.append(margin(row, tokens[-1]))
            if len(tokens) == count:
                break
            chooser.push(tokens[-1])
            position += 1
            hidden = self._run(state, start.place, position, tokens[-1:], hidden[None], start.seen_from)
        return Draft(tuple(tokens), SOURCE, tuple(margins))

    def observe(self, view: SequenceView, verdict: Verdict, taps: StepRows | None) -> None:
        """Bring the module's rows up to the committed tokens; see the module's docstring."""
        assert isinstance(view, Request), "an engine's drafter"
        state = view.state
        if taps is None or state is None or state.pending:  # pending: the step failed, and nothing is kept
            return
        start, end = taps.start, state.committed
        blocks = state.block_table
        self._rows.drop(blocks, start, end)
        if not self._may_draft(view):
            return
        seen_from = self._rows.first(blocks, start)
        place = self._last.place(view.request_id, state)
        hidden = taps.hidden()[: end - start]
        before = self._last.get(place, start)
        if before is not None:
            previous = np.concatenate([before[None], hidden])
        else:
            seen_from, previous = self._resumed.get(place, _NO_HIT).seen_from(view, start), hidden
        first = end + 1 - len(previous)
        last = self._run(state, place, first, view.tokens[first : end + 1], previous, seen_from)
        self._rows.put(blocks, start, end, seen_from)
        self._last.put(place, end, hidden[-1])
        self._starts[place] = _Start(view.request_id, place, end, seen_from, last)

    def forget(self, request_id: str) -> None:
        """What is kept by place means nothing to another request."""
        self._last.forget(request_id)

    def leaving(self, view: SequenceView) -> None:
        """Its rows are made already."""

    def resumed(self, view: SequenceView) -> None:
        """It starts, perhaps from a prefix hit: count what it has no rows of."""
        assert isinstance(view, Request), "an engine's drafter"
        state = view.state
        if state is None or not self._may_draft(view):
            return
        place, end = self._last.place(view.request_id, state), state.committed
        self._starts.pop(place, None)
        self._resumed.pop(place, None)
        if not end:
            return
        if self._last.travels:
            first = self._rows.first(state.block_table, end)
        elif end % BLOCK_TOKENS:  # the token at `end` is cached too, in the block that was copied
            end += 1
            first = self._rows.first(state.block_table, end)
            self._resumed[place] = _Resumed(view.request_id, end - 1, first)
        else:  # there was no room for a copy
            first = end + 1
        self.cold_tokens += max(0, first - 1)

    def forked(self, source: SequenceView, view: SequenceView) -> None:
        """`view` goes on from where `source` is, in a copy of its state; so it starts as warm."""
        assert isinstance(source, Request) and isinstance(view, Request), "an engine's drafter"
        state, other = view.state, source.state
        if self._last.travels or state is None or other is None or not self._may_draft(view):
            return
        position = other.committed
        hidden = self._last.get(self._last.place(source.request_id, other), position)
        if hidden is not None:
            self._last.put(self._last.place(view.request_id, state), position, hidden)

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
        position = state.committed
        place = self._last.place(view.request_id, state) if position else -1
        if place < 0 or len(view.tokens) != position + 1:
            return None
        start = self._starts.get(place)
        if start is not None and (start.request_id, start.position) == (view.request_id, position):
            return start
        before = self._last.get(place, position)
        if before is None:
            return None
        seen_from = self._rows.first(state.block_table, position)
        last = self._run(state, place, position, view.tokens[position:], before[None], seen_from)
        start = self._starts[place] = _Start(view.request_id, place, position, seen_from, last)
        return start

    def _logits(self, best: int) -> LogitsRow:
        """What the head has just computed; `best` is the place of the largest."""
        module = self._module
        if module.vocab is None:
            return OpsRow(self._ops, StepLogits(module.logits), 0, best)
        return DraftLogits(self._ops, module.vocab, module.logits[0], best)

    def _run(
        self, state: SequenceState, place: int, first: int, tokens: list[int], previous: Row, seen_from: int
    ) -> Row:
        """Rows of `tokens` at positions first, first + 1, ...; y [C] of the last."""
        table = np.append(state.block_table, np.int32(self._spare[place]))[None]
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

    def resume_at(self, request: Request) -> Earlier | None:
        """See Scheduler."""
        return resume_earlier if self._may_draft(request) and not self._last.travels else None

    def _may_draft(self, view: Request) -> bool:
        return allows(view.params.speculation, SOURCE, self.in_auto)
