"""Engine: one step at a time. Draft, plan, run, walk, commit; the rest of the server waits on it.

It owns nothing but the order of these: state lies in sequences, decisions in the scheduler and
the drafters, arithmetic behind the Runner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quickdraft.engine.drafters import Asking, Drafting
from quickdraft.engine.metrics import EngineMetrics
from quickdraft.engine.plan import PlanEntry, Runner, StepPlan
from quickdraft.engine.request import Request
from quickdraft.engine.scheduler import Running, Scheduler
from quickdraft.errors import RequestError
from quickdraft.speculate.choose import LogitsRow
from quickdraft.speculate.draft import Draft, StepRows, Verdict, token_sources
from quickdraft.speculate.stats import SpeculationStats
from quickdraft.speculate.walk import walk
from quickdraft.state.sequence import SequenceState
from quickdraft.types import FinishReason, TokenLogprob


class Tapped(Protocol):
    """What the last step left of the rows of an entry, for drafters that read it; each [rows, C]."""

    def hidden(self, index: int) -> NDArray[np.float32]:
        """Final hidden states."""

    def layer(self, index: int, layer: int) -> NDArray[np.float32]:
        """The residual stream after a layer."""


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What a step gave one request; `read`: prompt tokens read by now, where the request asks to be told."""

    request: Request
    tokens: tuple[int, ...]
    finish: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()
    sources: tuple[str, ...] = ()  # where each of `tokens` came from (speculate/draft.py token_sources)
    read: int | None = None


class Engine:
    """Continuous batching over one runner and one block pool."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        drafting: Drafting,
        clock: Callable[[], float] = time.perf_counter,
        tapped: Tapped | None = None,
    ) -> None:
        """`tapped` is for drafters that read hidden states."""
        self.tapped = tapped
        scheduler.on_resumed, scheduler.on_publish = drafting.resumed, drafting.publishing
        self.scheduler, self.runner, self.drafting, self._clock = scheduler, runner, drafting, clock
        self.stats = SpeculationStats()

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def free_blocks(self) -> int:
        return self.scheduler.pool.free

    def metrics(self) -> EngineMetrics:
        """The engine's counts now; any thread may ask."""
        scheduler, pool, sources = self.scheduler, self.scheduler.pool, dict(self.stats.sources)
        unused = dict.fromkeys(self.drafting.sources, 0)
        cache = scheduler.cache
        return EngineMetrics(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_blocks=pool.count,
            kv_blocks_used=pool.count - pool.free,
            kv_blocks_cached=pool.idle,
            preemptions=scheduler.preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            prefix_restored=scheduler.prefix_restored,
            prefix_evicted_blocks=cache.index.evicted_blocks if cache else 0,
            checkpoints=cache.checkpoints.count if cache and cache.checkpoints else 0,
            checkpoints_evicted=cache.checkpoints.evicted if cache and cache.checkpoints else 0,
            disk=cache.disk.counters if cache and cache.disk else {},
            draft_steps=unused | {name: one.drafts for name, one in sources.items()},
            drafted=unused | {name: one.drafted for name, one in sources.items()},
            accepted=unused | {name: one.accepted for name, one in sources.items()},
            draft_cold_tokens=self.drafting.cold_tokens,
            accepted_per_position=tuple(self.stats.accepted_per_position),
        )

    def add(self, request: Request, state: SequenceState | None = None) -> None:
        """Queue a request; `state` may already hold a prefix of its tokens (a fork).

        CapacityError when it can never fit, BadParameter for an id in use, UnsupportedError for a
        draft source that is not loaded.
        """
        self.drafting.check(request.params.speculation)
        self.scheduler.add(request, state)
        request.arrived = self._clock()

    def idle(self) -> bool:
        """Use a moment without requests: write one piece of the prefix cache to disk, a few
        milliseconds of work. False when nothing is left to do."""
        cache = self.scheduler.cache
        return cache is not None and cache.disk is not None and cache.disk.write_next()

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks; unknown ids are fine (it just ended by itself)."""
        item = self.scheduler.remove(request_id)
        if item is not None:
            item.request.end(FinishReason.ABORT)
            self.drafting.forget(request_id)

    def step(self) -> list[StepEvent]:
        """One run of the model; an event for every request that emitted or ended, and for those that ask
        how far their prompt is read.

        An exception leaves no pending rows behind: the same step can be taken again.
        """
        started = self._clock()
        try:
            plan, items = self.scheduler.plan(self._propose)
            self._note_start(items, started)
            results = self._run(plan, items)
            settled = [
                self._settle(entry, item, rows, self._taps(index, entry))
                for index, (entry, item, rows) in enumerate(zip(plan.entries, items, results, strict=True))
            ]
        except BaseException:
            self.scheduler.cancel()
            raise
        self.drafting.settled()
        self._charge(plan.entries, items, 1000.0 * (self._clock() - started))
        return [event for event in settled if event is not None]

    @staticmethod
    def _note_start(items: list[Running], now: float) -> None:
        """Close the queue time of requests whose first step this is."""
        for item in items:
            if item.request.arrived is not None:
                item.request.timings.queue_ms = 1000.0 * (now - item.request.arrived)
                item.request.arrived = None

    def _propose(self, requests: Sequence[tuple[Request, int]], rows: int) -> Sequence[Draft]:
        asking = [Asking(request, request.params.speculation, room) for request, room in requests]
        return self.drafting.propose_all(asking, rows)

    def _run(self, plan: StepPlan, items: list[Running]) -> Sequence[Sequence[LogitsRow]]:
        """The logits; the time of a step of one sequence corrects what drafts are taken to cost."""
        if not items:
            return ()
        if not self.drafting.timed or len(items) > 1 or not plan.entries[0].wanted:
            return self.runner.run(plan)
        started, entry = self._clock(), plan.entries[0]
        results = self.runner.run(plan)
        self.drafting.ran(entry.wanted, entry.start, self._clock() - started)
        return results

    def _taps(self, index: int, entry: PlanEntry) -> StepRows | None:
        tapped = self.tapped
        if tapped is None:
            return None
        return StepRows(entry.start, partial(tapped.hidden, index), partial(tapped.layer, index))

    def _settle(
        self, entry: PlanEntry, item: Running, rows: Sequence[LogitsRow], taps: StepRows | None
    ) -> StepEvent | None:
        """Walk the rows of one entry, commit what the verdict keeps, tell the drafters."""
        request = item.request
        if not entry.wanted:
            item.state.commit(len(entry.tokens))
            if taps is not None:
                self.drafting.read(request, taps)
            self.scheduler.publish(item)
            read = request.take_progress(item.state.committed)
            return None if read is None else StepEvent(request, (), None, read=read)
        known = len(request.tokens)
        try:
            verdict = walk(request, rows, entry.drafted)
            item.state.commit(len(verdict.tokens))
        except RequestError as error:  # what was emitted before the failing row stands, as in plain decoding
            request.fail(error)
            verdict = Verdict(tuple(request.tokens[known:]), len(entry.drafted), FinishReason.ERROR)
        self.stats.record(request.timings, entry.source, verdict, entry.extended, entry.extended_source)
        if verdict.tokens:
            self.drafting.observe(request, verdict, taps)
        if verdict.finish is not None:
            self.scheduler.remove(request.request_id)
            self.drafting.forget(request.request_id)
        elif item.stopped:
            self.scheduler.publish(item)
        sources = token_sources(verdict, entry.source, entry.extended, entry.extended_source)
        read = request.take_progress(request.prompt_length)
        return StepEvent(request, verdict.tokens, verdict.finish, request.take_logprobs(), sources, read)

    @staticmethod
    def _charge(entries: tuple[PlanEntry, ...], items: list[Running], elapsed_ms: float) -> None:
        """Every request of the step waited for all of it; re-reading after preemption is decode time."""
        for entry, item in zip(entries, items, strict=True):
            timings = item.request.timings
            if entry.wanted or timings.completion_tokens:
                timings.decode_ms += elapsed_ms
            else:
                timings.prompt_ms += elapsed_ms
