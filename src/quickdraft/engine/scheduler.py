"""Scheduler: which rows of which sequences the next step computes. Pure accounting.

One rule: rows are "tokens known minus tokens computed". A request whose gap is more than one is
still reading its prompt (or re-reading after preemption) and gets a chunk that stops before its
last known token; with a gap of one it gets a verify block, the last known token and its draft.
Verify blocks go first, so a long prompt never holds up running answers; when blocks run out the
youngest sequence gives its own back and reads again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from quickdraft.engine.plan import PlanEntry, StepPlan
from quickdraft.engine.request import Request
from quickdraft.errors import CapacityError
from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.speculate.draft import Draft
from quickdraft.state.blocks import BlockPool
from quickdraft.state.sequence import SequenceState, blocks_for

Propose = Callable[[Request, int], Draft]


@dataclass(slots=True)
class Running:
    """A request that holds blocks."""

    request: Request
    state: SequenceState

    @property
    def gap(self) -> int:
        return len(self.request.tokens) - self.state.committed


@dataclass(slots=True)
class Scheduler:
    """Admission, chunking, preemption over one block pool. Oldest first, everywhere."""

    pool: BlockPool
    max_rows: int
    chunk_rows: int
    max_sequences: int
    max_wanted: int
    waiting: deque[Running] = field(default_factory=deque)
    running: list[Running] = field(default_factory=list)

    def add(self, request: Request, state: SequenceState | None = None) -> None:
        """Queue a request; `state` may hold a prefix of its tokens. CapacityError when it never fits."""
        needed = blocks_for(request.prompt_length + request.max_output)
        if needed > self.pool.count:
            raise CapacityError(
                "the request can never fit the KV cache",
                got=f"{needed} blocks",
                expected=f"at most {self.pool.count}",
                hint="ask for fewer tokens, or give --kv-memory more",
            )
        self.waiting.append(Running(request, state or SequenceState(self.pool)))

    def remove(self, request_id: str) -> Running | None:
        """Take a request out and release its blocks; None when it is not here."""
        for group in (self.running, self.waiting):
            for item in group:
                if item.request.request_id == request_id:
                    group.remove(item)
                    item.state.release()
                    return item
        return None

    def plan(self, propose: Propose) -> tuple[StepPlan, list[Running]]:
        """The next step and whose rows it computes, every entry's rows reserved."""
        self._admit()
        verifying = [item for item in self.running if item.gap == 1]
        reading = [item for item in self.running if item.gap > 1]
        entries: list[PlanEntry] = []
        items: list[Running] = []
        spare = self.max_wanted - len(verifying)  # drafted rows this step may hold
        for item in verifying:
            entry = self._verify(item, spare, propose)
            if entry is not None:
                spare -= len(entry.drafted)
                entries.append(entry)
                items.append(item)
        left = min(self.chunk_rows, self.max_rows - sum(len(e.tokens) for e in entries))
        for item in reading:
            count = min(item.gap - 1, left)
            if count > 0 and self._reserve(item, count):
                left -= count
                entries.append(_entry(item, count, 0, Draft()))
                items.append(item)
        return StepPlan(tuple(entries)), items

    def _verify(self, item: Running, spare: int, propose: Propose) -> PlanEntry | None:
        """The last known token and a draft; the draft gives way when blocks are short."""
        if item not in self.running:  # preempted for an older one
            return None
        request = item.request
        room = request.max_output - request.output_length - 1
        slots = (len(item.state.block_table) + self.pool.free) * BLOCK_TOKENS - len(request.tokens)
        draft = propose(request, max(0, min(spare, room, slots)))
        if not self._reserve(item, 1 + len(draft.tokens)):
            return None
        return _entry(item, 1, 1 + len(draft.tokens), draft)

    def _reserve(self, item: Running, count: int) -> bool:
        """Reserve, preempting the youngest that has nothing in this step; False: not this step."""
        while item in self.running:
            try:
                item.state.reserve(count)
                return True
            except CapacityError:
                idle = [other for other in self.running if other.state.pending == 0]
                self._preempt(idle[-1])
        return False

    def _preempt(self, item: Running) -> None:
        item.state.release()
        self.running.remove(item)
        self.waiting.appendleft(item)

    def _admit(self) -> None:
        """Start waiting requests, oldest first, while sequences and blocks last."""
        while self.waiting and len(self.running) < self.max_sequences:
            promised = sum(self._missing(item) for item in self.running)
            if self._missing(self.waiting[0]) > self.pool.free - promised:
                return
            self.running.append(self.waiting.popleft())

    @staticmethod
    def _missing(item: Running) -> int:
        """Blocks this sequence still needs before it can emit its next token."""
        return blocks_for(len(item.request.tokens)) - len(item.state.block_table)


def _entry(item: Running, known: int, wanted: int, draft: Draft) -> PlanEntry:
    start = item.state.committed
    return PlanEntry(
        item.request.request_id,
        tuple(item.request.tokens[start : start + known]) + draft.tokens,
        start,
        wanted,
        draft.tokens,
        draft.source,
        tuple(item.state.block_table),
    )
