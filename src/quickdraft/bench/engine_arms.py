"""Arms on a real engine: one small Engine per arm over the shared runner and block pool.

The prompt is read once, up to its last token but one, by an engine that is then left paused; each
arm forks that state. An arm that is not stepping holds its blocks and nothing else, so arms take
turns without being batched together. Nothing here knows what an arm is measured for.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

from quickdraft.engine.loop import Engine
from quickdraft.engine.plan import PlanEntry, StepPlan
from quickdraft.engine.request import Request
from quickdraft.errors import CapacityError
from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.state.sequence import SequenceState, blocks_for
from quickdraft.types import SamplingParams, Speculation, Timings

MakeRequest = Callable[[str, Sequence[int], SamplingParams], Request]
CopyBlock = Callable[[int, int], None]
_NAMES: Final = itertools.count()


class EngineArm:
    """bench.arms.Arm: one request in an engine of its own."""

    def __init__(self, engine: Engine, request: Request, state: SequenceState) -> None:
        self._engine, self.request, self.state = engine, request, state
        self.closed = False
        self.accepted_per_step: Counter[int] = Counter()
        engine.add(request, state)

    @property
    def finished(self) -> bool:
        return self.request.finish is not None

    @property
    def timings(self) -> Timings:
        return self.request.timings

    @property
    def error(self) -> str | None:
        return self.request.error

    @property
    def missing_blocks(self) -> int:
        """Blocks it may still take."""
        if self.closed or self.finished:
            return 0
        total = self.request.prompt_length + self.request.max_output
        return blocks_for(total) - len(self.state.block_table)

    def read_prompt(self) -> None:
        """Compute every prompt token but the last, and pause there."""
        while self.state.committed < self.request.prompt_length - 1:
            self._engine.step()

    def advance(self, tokens: int) -> tuple[tuple[int, ...], float]:
        """Whole steps until at least `tokens` more ids or the end; (ids, seconds of the steps)."""
        assert not self.closed, "a closed arm cannot advance"
        ids: list[int] = []
        started = time.perf_counter()
        while len(ids) < tokens and not self.finished:
            for event in self._engine.step():
                ids += event.tokens
                if event.tokens:
                    self.accepted_per_step[len(event.tokens) - 1] += 1
        return tuple(ids), time.perf_counter() - started

    def close(self) -> None:
        """End the request if it still runs; its blocks go back to the pool."""
        self.closed = True
        self._engine.abort(self.request.request_id)


class EngineArms:
    """bench.arms.ArmRunner over the parts of one engine; keeps the last prompt's prefilled state."""

    def __init__(self, engine: Engine, make_request: MakeRequest, copy_block: CopyBlock) -> None:
        self._engine, self._make_request, self._copy_block = engine, make_request, copy_block
        self._prompt: tuple[int, ...] = ()
        self._prefill: EngineArm | None = None
        self._arms: list[EngineArm] = []

    def start(self, prompt_ids: Sequence[int], params: SamplingParams) -> EngineArm:
        """An arm of this prompt, read now if the last call had another; CapacityError when it cannot fit."""
        state = self._prefilled(prompt_ids).fork(self._copy_block)
        try:
            arm = self._arm(prompt_ids, params, state)
            assert self._prefill is not None, "just computed"
            self._engine.drafting.forked(self._prefill.request, arm.request)
        except Exception:
            state.release()
            raise
        self._arms = [*(other for other in self._arms if not other.closed), arm]
        missing = sum(one.missing_blocks for one in self._arms)
        free = self._engine.free_blocks
        if missing > free:
            arm.close()
            raise CapacityError(
                "the arms of this prompt do not fit the KV cache together",
                got=f"{missing * BLOCK_TOKENS} more tokens",
                expected=f"at most {free * BLOCK_TOKENS}",
                hint="fewer stages, fewer tokens, or more KV memory",
            )
        return arm

    def engine(self) -> Engine:
        """A further engine over the same parts."""
        shared = self._engine
        scheduler = dataclasses.replace(shared.scheduler, waiting=deque(), running=[])
        return Engine(scheduler, shared.runner, shared.drafting, tapped=shared.tapped)

    def join(self, engine: Engine, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """A request in an `engine` of these parts, from where this prompt was read to; that is kept."""
        state = self._prefilled(prompt_ids).fork(self._copy_block)
        assert self._prefill is not None, "just computed"
        request = self._make_request(f"bench-{next(_NAMES)}", prompt_ids, params)
        try:
            engine.add(request, state)
        except Exception:
            state.release()
            raise
        engine.drafting.forked(self._prefill.request, request)
        return request

    @property
    def most_rows(self) -> int:
        """Rows of the longest verify block."""
        scheduler = self._engine.scheduler
        kept = scheduler.slots.max_pending + 1 if scheduler.slots is not None else scheduler.max_wanted
        return min(kept, scheduler.max_wanted)

    def block_seconds(self, prompt_ids: Sequence[int], rows: int) -> float:
        """See ArmRunner; the drafted rows are ids of the prompt."""
        state = self._prefilled(prompt_ids).fork(self._copy_block)
        try:
            drafted = tuple(itertools.islice(itertools.cycle(prompt_ids), rows - 1))
            state.reserve(rows, rows - 1)
            entry = PlanEntry(
                "block", (prompt_ids[-1], *drafted), state.committed, rows, drafted, "", state.block_table,
                state.slot, state.replay, best_only=True,
            )  # fmt: skip
            started = time.perf_counter()
            self._engine.runner.run(StepPlan((entry,)))
            return time.perf_counter() - started
        finally:
            state.release()

    def close(self) -> None:
        """Give back the blocks of the kept prompt and of every arm."""
        for arm in self._arms:
            arm.close()
        if self._prefill is not None:
            self._prefill.close()
        self._arms, self._prefill, self._prompt = [], None, ()

    def _prefilled(self, prompt_ids: Sequence[int]) -> SequenceState:
        """The state of all prompt tokens but the last, computed now or by an earlier call."""
        if self._prefill is None or self._prompt != tuple(prompt_ids):
            self.close()
            state = SequenceState(self._engine.scheduler.pool, self._engine.scheduler.slots)
            every = Speculation(sources=self._engine.drafting.sources)  # all write their rows, for every arm
            params = SamplingParams(temperature=0.0, max_tokens=1, speculation=every)
            arm = self._arm(prompt_ids, params, state)
            arm.read_prompt()
            self._prefill, self._prompt = arm, tuple(prompt_ids)
        return self._prefill.state

    def _arm(self, prompt_ids: Sequence[int], params: SamplingParams, state: SequenceState) -> EngineArm:
        request = self._make_request(f"bench-{next(_NAMES)}", prompt_ids, params)
        return EngineArm(self.engine(), request, state)
