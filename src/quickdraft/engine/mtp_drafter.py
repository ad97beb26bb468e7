"""MTPDrafter: drafts chained through an MTP module (models/mtp.py).

A module's row of a token is made from the target's true hidden state of the row before it, so whatever a
draft wrote is overwritten or cut off. Hidden states of tokens that were kept wait (held_rows.py) until a
draft is wanted, enough of them have come, or the blocks are published; the row of the known token which the
target has not read yet then starts the draft.
Everything else lies with the sequence (state/draft_rows.py): nothing here survives preemption, and
where a prefix hit brought no rows the drafter is cold: it sees the rows it has, and counts what lacks.
Without recurrent slots the hidden state before the first row does not come with a prefix hit; so the
sequence resumes a token earlier, whose row is there and whose hidden state is then computed.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quickdraft.engine.draft_logits import DraftLogits, margin
from quickdraft.engine.held_rows import HELD_ROWS, Held, HeldRows
from quickdraft.engine.request import Request
from quickdraft.engine.runner import OpsRow, StepLogits
from quickdraft.models.mtp import MODULE_ROWS, MTPModule
from quickdraft.ops.interface import BLOCK_TOKENS, KVCache, Ops, Program, RecurrentCache
from quickdraft.speculate.choose import BrokenLogits, LogitsRow
from quickdraft.speculate.draft import Draft, SequenceView, StepRows, Verdict, allows
from quickdraft.state.cache import Earlier
from quickdraft.state.draft_rows import DraftRows, HiddenPlaces, HiddenStates, LastHidden, resume_earlier
from quickdraft.state.sequence import SequenceState

SOURCE: Final = "mtp"
DEFAULT_DRAFTS: Final = 3
MAX_DRAFTS: Final = BLOCK_TOKENS  # chained rows reach at most one block beyond the sequence's own
TOGETHER: Final = 4  # rows that take hardly longer than one, attention and feed-forward included


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
        self._keys, self._draft = module.keys(self._batch, kv), module.draft(self._batch, kv)
        self.pass_tokens = (1,)
        self._held = HeldRows()  # hidden states: of the row before the first that is to be made, and on
        self._resumed: dict[str, int] = {}  # by request: the position where it resumed, whose row is there
        self.cold_tokens = 0  # computed before a request that drafts, without rows

    def propose(self, view: SequenceView, budget: int) -> Draft:
        """At most `longest` tokens; none where the hidden state to start from is not there."""
        assert isinstance(view, Request), "an engine's drafter"
        count, state = min(budget, self.longest), view.state
        if count <= 0 or state is None or not state.committed or len(view.tokens) != state.committed + 1:
            return Draft()
        position, place = state.committed, self._last.place(view.request_id, state)
        held = self._held.take(view.request_id, position)
        if held is None:
            before = self._last.get(place, position)
            if before is None:
                return Draft()
            held = Held(position - 1, position, [before[None]])
        table, seen_from = self._make_rows(view, state, place, held, start=True)
        tokens: list[int] = []
        margins: list[float] = []
        chooser = view.trial()
        while True:
            row = self._logits()
            try:
                tokens.append(chooser.choose(row))
            except BrokenLogits:
                break
            margins.append(margin(row, tokens[-1]))
            if len(tokens) == count:
                break
            chooser.push(tokens[-1])
            position += 1
            self._module.previous[:1] = self._ops.rows(self._module.last, 0, 1)
            self._run(self._draft, table, position, tokens[-1:], seen_from)
        return Draft(tuple(tokens), SOURCE, tuple(margins))

    def observe(self, view: SequenceView, verdict: Verdict, taps: StepRows | None) -> None:
        """Keep the hidden states of the tokens that were kept, and make their rows where they are many."""
        assert isinstance(view, Request), "an engine's drafter"
        state = view.state
        if taps is None or state is None or state.pending:  # pending: the step failed, and nothing is kept
            return
        start, end, name = taps.start, state.committed, view.request_id
        here = self._resumed.pop(name, -1) == start
        self._rows.drop(state.block_table, start + here, end)
        if not self._may_draft(view):
            return
        place, hidden = self._last.place(name, state), taps.hidden()[: end - start].copy()
        if not self._held.ends_at(name, start):
            before = self._last.get(place, start)
            if before is not None:
                self._held.add(name, start - 1, before[None].copy())
        held = self._held.add(name, start, hidden)
        self._last.put(place, end, hidden[-1])
        if held.due:
            self._make_held(view, state)

    def forget(self, request_id: str) -> None:
        """What is kept by place means nothing to another request."""
        self._last.forget(request_id)
        self._held.forget(request_id)
        self._resumed.pop(request_id, None)

    def publishing(self, view: SequenceView) -> None:
        """Its blocks are about to be published: they take all rows along."""
        assert isinstance(view, Request), "an engine's drafter"
        if view.state is not None:
            self._make_held(view, view.state)

    def resumed(self, view: SequenceView) -> None:
        """It starts, perhaps from a prefix hit: count what it has no rows of."""
        assert isinstance(view, Request), "an engine's drafter"
        state, name = view.state, view.request_id
        self._held.drop(name)
        self._resumed.pop(name, None)
        if state is None or not state.committed or not self._may_draft(view):
            return
        end = state.committed
        if self._last.travels:
            first = self._rows.first(state.block_table, end)
        elif end % BLOCK_TOKENS:  # the token at `end` is cached too, in the block that was copied
            end += 1
            first = self._rows.first(state.block_table, end)
            self._resumed[name] = end - 1
        else:  # there was no room for a copy
            first = end + 1
        self.cold_tokens += max(0, first - 1)

    def forked(self, source: SequenceView, view: SequenceView) -> None:
        """`view` goes on from where `source` is, in a copy of its state; so it starts as warm."""
        assert isinstance(source, Request) and isinstance(view, Request), "an engine's drafter"
        state, other = view.state, source.state
        if state is None or other is None or not self._may_draft(view):
            return
        self._held.fork(source.request_id, view.request_id)
        if self._last.travels:
            return
        position = other.committed
        hidden = self._last.get(self._last.place(source.request_id, other), position)
        if hidden is not None:
            self._last.put(self._last.place(view.request_id, state), position, hidden)

    def follow(self, request_id: str, followed: bool) -> None:
        """See FollowingDrafter."""
        self._held.follow(request_id, followed)

    def time_pass(self, tokens: int) -> float:
        """Seconds of one row and the head, in a spare block."""
        spare = np.array([self._spare[0]], np.int32)
        started = time.perf_counter()
        self._run(self._draft, spare, 0, [0], 0)
        return time.perf_counter() - started

    def time_upkeep(self) -> float:
        """Seconds of a token's part of the rows that are made at a time, in a spare block."""
        spare = np.array([self._spare[0]], np.int32)
        started = time.perf_counter()
        self._module.previous[:HELD_ROWS] = 0.0
        self._run(self._keys, spare, 0, [0] * HELD_ROWS, 0)
        return (time.perf_counter() - started) / HELD_ROWS

    def resume_at(self, request: Request) -> Earlier | None:
        """See Scheduler."""
        return resume_earlier if self._may_draft(request) and not self._last.travels else None

    def _may_draft(self, view: Request) -> bool:
        followed = self._held.follows(view.request_id)
        return followed and allows(view.params.speculation, SOURCE, self.in_auto)

    def _logits(self) -> LogitsRow:
        """What the head has just computed."""
        module, best = self._module, int(self._module.best[0])
        vocab = module.vocab
        if vocab is None:
            return OpsRow(self._ops, StepLogits(self._ops, module.logits, 1), 0, best)
        logits = self._ops.rows(module.logits, 0, 1)[0]
        return DraftLogits(self._ops, vocab.ids, vocab.vocabulary_size, logits, best)

    def _make_held(self, view: Request, state: SequenceState) -> None:
        """Rows of the committed tokens whose hidden states wait."""
        held = self._held.take(view.request_id, state.committed)
        if held is not None:
            self._make_rows(view, state, self._last.place(view.request_id, state), held, start=False)

    def _make_rows(
        self, view: Request, state: SequenceState, place: int, held: Held, *, start: bool
    ) -> tuple[NDArray[np.int32], int]:
        """Rows of the committed tokens behind held.start; with `start` also that of the known token after
        them, and what it drafts. Returns the table they lie in and the first position that they see."""
        blocks, first, end, hidden = state.block_table, held.start + 1, held.end, held.rows(self._ops.join)
        table = np.append(blocks, np.int32(self._spare[place]))
        seen_from = self._rows.first(blocks, first)
        before = first if start and end - first < TOGETHER else end  # those from here on go with the start
        for at in range(first, before, MODULE_ROWS):
            last = min(at + MODULE_ROWS, before)
            self._module.previous[: last - at] = hidden[at - first : last - first]
            self._run(self._keys, table, at, view.tokens[at:last], seen_from)
        if start:
            self._module.previous[: end + 1 - before] = hidden[before - first :]
            self._run(self._draft, table, before, view.tokens[before : end + 1], seen_from)
        if end > first:
            self._rows.put(blocks, first, end, seen_from)
        return table, seen_from

    def _run(
        self, program: Program, table: NDArray[np.int32], first: int, tokens: list[int], seen_from: int
    ) -> None:
        """Rows of `tokens` at positions first, first + 1, ..., of which the last is wanted."""
        count = len(tokens)
        self._batch.set(
            np.array(tokens, np.int32),
            np.arange(first, first + count, dtype=np.int32),
            np.array([0, count], np.int32),
            table[None],
            np.array([count - 1], np.int32),
            seen_from=np.array([seen_from], np.int32),
        )
        program.run()
