"""Scheduler: which rows of which sequences the next step computes. Pure accounting.

One rule: rows are "tokens known minus tokens computed". A request whose gap is more than one is
still reading its prompt (or re-reading after preemption) and gets a chunk that stops before its
last known token; with a gap of one it gets a verify block, the last known token and its draft.
Verify blocks go first, so a long prompt never holds up running answers; when blocks run out the
youngest sequence gives its own back and reads again later. With a prefix cache, reading again, or
for the first time what others have read, resumes where the cache ends.

With recurrent layers a sequence holds a slot while it runs, and its steps end where the state is kept
for others (`Running.next_stop`); a step that failed has spoilt the slots of its sequences.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from sys import maxsize

from quickdraft.engine.plan import PlanEntry, StepPlan
from quickdraft.engine.request import Request
from quickdraft.errors import BadParameter, CapacityError, ConfigError
from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.speculate.draft import Draft, cut
from quickdraft.state.blocks import BlockPool
from quickdraft.state.cache import Earlier, PrefixCache
from quickdraft.state.prefix import Node
from quickdraft.state.sequence import SequenceState, blocks_for
from quickdraft.state.slots import SlotPool

Propose = Callable[[Sequence[tuple[Request, int]], int], Sequence[Draft]]
Notice = Callable[[Request], None]
ResumeAt = Callable[[Request], Earlier | None]


@dataclass(slots=True, eq=False)
class Running:
    """A request and what the engine has computed of it."""

    request: Request
    state: SequenceState
    cursor: Node | None = None  # how far its tokens are published to the prefix cache
    looked_up: bool = False  # in the prefix cache, for the first time
    stops: tuple[int, ...] = ()  # positions after which its state is kept, ascending
    interval: int = 0  # and after every so many tokens; 0: not

    @property
    def gap(self) -> int:
        """Tokens known minus tokens computed; at least 1."""
        gap = len(self.request.tokens) - self.state.committed
        assert gap > 0, f"{self.state.committed} of {len(self.request.tokens)} tokens computed: none is left"
        return gap

    @property
    def missing_blocks(self) -> int:
        """Blocks it still needs before it can emit its next token."""
        return self.state.missing_blocks(len(self.request.tokens))

    @property
    def next_stop(self) -> int:
        """The first position after the committed tokens where its state is to be kept."""
        at = bisect_right(self.stops, self.state.committed)
        stop = self.stops[at] if at < len(self.stops) else maxsize
        if self.interval:
            stop = min(stop, (self.state.committed // self.interval + 1) * self.interval)
        return stop

    @property
    def stopped(self) -> bool:
        """Whether its state is to be kept now."""
        committed = self.state.committed
        return committed in self.stops or bool(self.interval and committed % self.interval == 0)


@dataclass(slots=True)
class Scheduler:
    """Admission, chunking, preemption over one block pool. Oldest first, everywhere.

    `running` and `waiting` are in order of age, and every running request is older than every
    waiting one: only the youngest running request is ever preempted, to the front of the queue.
    """

    pool: BlockPool
    max_rows: int
    chunk_rows: int
    max_sequences: int
    max_wanted: int
    cache: PrefixCache | None = None
    slots: SlotPool | None = None  # of a model with recurrent layers
    on_publish: Notice = lambda request: None  # told when the blocks of a request are about to be published
    on_resumed: Notice = lambda request: None  # and when one starts, after its look into the prefix cache
    resume_at: ResumeAt = lambda request: None  # where, if some cached tokens are to be computed again
    checkpoint_interval: int = 0  # tokens between states that are kept in any case
    waiting: deque[Running] = field(default_factory=deque)
    running: list[Running] = field(default_factory=list)
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the cache
    prefix_hits: int = 0  # of these, tokens found
    prefix_restored: int = 0  # of these, tokens that came from disk

    def __post_init__(self) -> None:
        if not 1 <= self.max_sequences <= self.max_wanted <= self.max_rows or self.chunk_rows < 1:
            raise ConfigError(
                "step limits do not fit together",
                got=f"max_sequences {self.max_sequences}, max_wanted {self.max_wanted}, "
                f"max_rows {self.max_rows}, chunk_rows {self.chunk_rows}",
                expected="1 <= max_sequences <= max_wanted <= max_rows and chunk_rows >= 1",
            )

    def add(self, request: Request, state: SequenceState | None = None) -> None:
        """Queue a request; `state` may hold a prefix of its tokens, all but the last at most.

        CapacityError when the pool could never hold it alone; BadParameter for an id in use.
        """
        needed = blocks_for(request.prompt_length + request.max_output)
        if needed > self.pool.count:
            raise CapacityError(
                "the request can never fit the KV cache",
                got=f"{needed} blocks",
                expected=f"at most {self.pool.count}",
                hint="ask for fewer tokens, or give --kv-memory more",
            )
        if any(item.request.request_id == request.request_id for item in (*self.running, *self.waiting)):
            raise BadParameter("request_id", got=repr(request.request_id), expected="an id not in use")
        assert state is None or state.committed < len(request.tokens), "no token is left to compute"
        request.state = state or SequenceState(self.pool, self.slots)
        self.waiting.append(Running(request, request.state))

    def remove(self, request_id: str) -> Running | None:
        """Take a request out and release its blocks; None when it is not here."""
        for group in (self.running, self.waiting):
            for item in group:
                if item.request.request_id == request_id:
                    group.remove(item)
                    self._release(item)
                    return item
        return None

    def plan(self, propose: Propose) -> tuple[StepPlan, list[Running]]:
        """The next step and whose rows it computes, every entry's rows reserved.

        `propose(requests, rows)` drafts for each (request, most tokens), `rows` tokens at most in all.
        CapacityError when nothing can
        run although requests wait: the blocks are held by someone outside this scheduler.
        """
        self._admit()
        planned = self._verify_blocks(propose)
        left = min(self.chunk_rows, self.max_rows - sum(len(entry.tokens) for entry, _ in planned))
        for item in [item for item in self.running if item.gap > 1]:
            count = min(item.gap - 1, left, item.next_stop - item.state.committed)
            if count > 0 and self._reserve(item, count):
                left -= count
                planned.append((_entry(item, count, 0, Draft()), item))
        if not planned and (self.running or self.waiting):
            raise CapacityError(
                "no request can go on: its KV blocks are held elsewhere",
                got=f"{self.pool.free} free of {self.pool.count}",
            )
        return StepPlan(tuple(entry for entry, _ in planned)), [item for _, item in planned]

    def publish(self, item: Running) -> None:
        """Let others resume from the full blocks a request has computed, and from its state where it
        is to be kept."""
        if self.cache is not None and item.cursor is not None:
            self.on_publish(item.request)
            tokens = item.request.tokens
            item.cursor = self.cache.publish(item.cursor, item.state, tokens, partial=False)
            if item.state.slot >= 0 and item.stopped:
                likely = item.state.committed in item.stops
                self.cache.checkpoint(item.cursor, item.state, tokens, likely=likely)

    def cancel(self) -> None:
        """Drop the rows of a step that failed; what was committed stays, unless the step may have
        advanced a recurrent state: such a sequence gives all back and is read again."""
        for item in self.running:
            spoilt = item.state.pending > 0 and item.state.slot >= 0
            item.state.commit(0)
            if spoilt:
                self._release(item, keep_state=False)

    def _verify_blocks(self, propose: Propose) -> list[tuple[PlanEntry, Running]]:
        """For every request with one token to compute: that token and, where rows and blocks are
        left over, a draft. Drafts never take a block that known tokens of a request still need."""
        verifying = [item for item in self.running if item.gap == 1]
        spare_rows = self.max_wanted - len(verifying)
        asking = [(item.request, max(0, min(spare_rows, self._draft_room(item)))) for item in verifying]
        drafts = propose(asking, spare_rows) if asking else ()
        planned = []
        for item, (_, room), proposed in zip(verifying, asking, drafts, strict=True):
            assert len(proposed.tokens) <= room, f"{len(proposed.tokens)} tokens drafted; budget {room}"
            if item not in self.running:  # preempted for an older one
                continue
            draft = cut(proposed, max(0, min(room, self._draft_room(item))))  # others took blocks since
            if self._reserve(item, 1 + len(draft.tokens), len(draft.tokens)):
                planned.append((_entry(item, 1, 1 + len(draft.tokens), draft), item))
        return planned

    def _draft_room(self, item: Running) -> int:
        """Drafted tokens that its own limits and its blocks have room for: those it holds, those its
        last token takes anyway, and those nobody is owed."""
        request, state = item.request, item.state
        owed = sum(other.missing_blocks for other in self.running if other is not item)
        blocks = state.blocks + max(item.missing_blocks, self.pool.free - owed)
        left = request.max_output - request.output_length - 1
        room = min(blocks * BLOCK_TOKENS - len(request.tokens), left)
        if self.slots is not None:
            room = min(room, self.slots.max_pending, item.next_stop - state.committed - 1)
        return room

    def _reserve(self, item: Running, count: int, drafted: int = 0) -> bool:
        """Reserve, preempting younger requests while blocks are short; False: not in this step.

        A request that is already in this step is never preempted, and one that is older than it
        waits rather than give up what it has computed.
        """
        while item in self.running:
            try:
                item.state.reserve(count, drafted)
                return True
            except CapacityError:
                youngest = self.running[-1]
                if youngest.state.pending:
                    return False
                self._preempt(youngest)
        return False

    def _release(self, item: Running, *, keep_state: bool = True) -> None:
        """Give the blocks of a request back; the prefix cache keeps what they hold, unless it failed."""
        if self.cache is not None and item.cursor is not None and item.request.error is None:
            self.on_publish(item.request)
            tokens = item.request.tokens
            cursor = self.cache.publish(item.cursor, item.state, tokens, partial=True)
            if keep_state and item.state.slot >= 0:
                self.cache.checkpoint(cursor, item.state, tokens, likely=True)
        item.cursor = None
        item.state.release()

    def _preempt(self, item: Running) -> None:
        self._release(item)
        self.running.remove(item)
        self.waiting.appendleft(item)
        self.preemptions += 1

    def _admit(self) -> None:
        """Start waiting requests, oldest first, while sequences, slots and blocks last."""
        for item in self.running:
            self._attach(item)  # after a step that failed
        promised = sum(item.missing_blocks for item in self.running)
        while self.waiting and len(self.running) < self.max_sequences:
            item = self.waiting[0]
            if self.slots is not None and item.state.slot < 0 and not self.slots.free_sequences:
                return
            missing = item.missing_blocks
            if promised + missing > self.pool.free and self.cache is not None:
                missing -= self.cache.shared_blocks(item.request.tokens, self.resume_at(item.request))
            if promised + missing > self.pool.free:
                return
            self.running.append(self.waiting.popleft())
            self._attach(item)
            promised += item.missing_blocks

    def _attach(self, item: Running) -> None:
        """Resume a request from the prefix cache; its first time is what its timings report."""
        request, cache, state = item.request, self.cache, item.state
        if state.slot < 0 and not state.committed:
            state.begin()
        if cache is None or state.committed or item.cursor is not None:
            return
        item.cursor, report = cache.attach(state, request.tokens, self.resume_at(request))
        self.on_resumed(request)
        if state.slot >= 0:
            places = {*request.marks, request.prompt_length - 1, report.shared_tokens}
            item.stops, item.interval = tuple(sorted(places)), self.checkpoint_interval
        if item.looked_up:  # it was preempted: what it finds now it may have computed itself
            return
        item.looked_up = True
        request.cache, request.timings.cached_tokens = report, report.cached_tokens
        self.prefix_queries += request.prompt_length
        self.prefix_hits += report.cached_tokens
        self.prefix_restored += report.restored_tokens


def _entry(item: Running, known: int, wanted: int, draft: Draft) -> PlanEntry:
    start = item.state.committed
    return PlanEntry(
        item.request.request_id,
        tuple(item.request.tokens[start : start + known]) + draft.tokens,
        start,
        wanted,
        draft.tokens,
        draft.source,
        item.state.block_table,
        item.state.slot,
        item.state.replay,
        draft.extended,
        item.request.best_only,
        draft.extended_source,
        item.request.noise,
    )
