"""Engine: one step at a time. Draft, plan, run, walk, commit; the rest of the server waits on it.

It owns nothing but the order of these: state lies in sequences, decisions in the scheduler and
the drafters, arithmetic behind the Runner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quickdraft.engine.drafters import Drafting
from quickdraft.engine.plan import PlanEntry, Runner
from quickdraft.engine.request import Request
from quickdraft.engine.scheduler import Running, Scheduler
from quickdraft.errors import RequestError
from quickdraft.speculate.choose import LogitsRow
from quickdraft.speculate.draft import Draft
from quickdraft.speculate.walk import walk
from quickdraft.state.sequence import SequenceState
from quickdraft.types import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What a step gave one request."""

    request: Request
    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()


class Engine:
    """Continuous batching over one runner and one block pool."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        drafting: Drafting,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler, self.runner, self.drafting, self._clock = scheduler, runner, drafting, clock

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def free_blocks(self) -> int:
        return self.scheduler.pool.free

    def add(self, request: Request, state: SequenceState | None = None) -> None:
        """Queue a request; `state` may already hold a prefix of its tokens (a fork)."""
        self.scheduler.add(request, state)

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks; unknown ids are fine (it just ended by itself)."""
        item = self.scheduler.remove(request_id)
        if item is not None:
            item.request.end(FinishReason.ABORT)
            self.drafting.forget(request_id)

    def step(self) -> list[StepEvent]:
        """One run of the model; an event for every request that emitted or failed."""
        started = self._clock()
        plan, items = self.scheduler.plan(self._propose)
        if not items:
            return []
        results = self.runner.run(plan)
        events = [
            event
            for entry, item, rows in zip(plan.entries, items, results, strict=True)
            if (event := self._settle(entry, item, rows)) is not None
        ]
        self._charge(plan.entries, items, 1000.0 * (self._clock() - started))
        return events

    def _propose(self, request: Request, budget: int) -> Draft:
        return self.drafting.propose(request, request.params.speculation, budget)

    def _settle(self, entry: PlanEntry, item: Running, rows: Sequence[LogitsRow]) -> StepEvent | None:
        """Walk the rows of one entry, commit what the verdict keeps, tell the drafters."""
        request, state = item.request, item.state
        if not entry.wanted:
            state.commit(len(entry.tokens))
            return None
        try:
            verdict = walk(request, rows, entry.drafted)
        except RequestError as error:
            self._end(request)
            request.end(FinishReason.ERROR, str(error))
            return StepEvent(request, (), FinishReason.ERROR)
        state.commit(len(verdict.tokens))
        self._count(request, entry, verdict.accepted)
        self.drafting.observe(request, verdict)
        if verdict.finish is not None:
            self._end(request)
        return StepEvent(request, verdict.tokens, verdict.finish, request.take_logprobs())

    def _end(self, request: Request) -> None:
        self.scheduler.remove(request.request_id)
        self.drafting.forget(request.request_id)

    @staticmethod
    def _count(request: Request, entry: PlanEntry, accepted: int) -> None:
        timings = request.timings
        timings.steps += 1
        timings.rows += entry.wanted
        if entry.drafted:
            source = entry.source
            timings.drafted[source] = timings.drafted.get(source, 0) + len(entry.drafted)
            timings.accepted[source] = timings.accepted.get(source, 0) + accepted

    @staticmethod
    def _charge(entries: tuple[PlanEntry, ...], items: list[Running], elapsed_ms: float) -> None:
        """Every request of the step waited for all of it."""
        for entry, item in zip(entries, items, strict=True):
            if entry.wanted:
                item.request.timings.decode_ms += elapsed_ms
            else:
                item.request.timings.prompt_ms += elapsed_ms
