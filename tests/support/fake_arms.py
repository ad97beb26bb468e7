"""Scripted arms: a fake ArmRunner whose steps, times and faults are known in advance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from quickdraft.bench.arms import WARM_UP_TOKENS
from quickdraft.types import SamplingParams, Timings

StepSeconds = Callable[[str, int], float]  # (stage, tokens emitted before the step) -> seconds


class FakeArm:
    """Emits `ids` in blocks of `block` tokens per step; everything but the first of a block is "accepted"."""

    def __init__(self, runner: FakeRunner, stage: str, ids: Sequence[int]) -> None:
        self.runner, self.stage, self.ids = runner, stage, ids
        self.timings = Timings()
        self.error: str | None = None
        self.position = 0
        self.closed = False
        self.accepted_per_step: Counter[int] = Counter()

    @property
    def finished(self) -> bool:
        return self.position == len(self.ids)

    def advance(self, tokens: int) -> tuple[tuple[int, ...], float]:
        assert tokens >= 1 and not self.closed and not self.finished
        first, seconds = self.position, 0.0
        while self.position < min(first + tokens, len(self.ids)):
            seconds += self.runner.step_seconds(self.stage, self.position)
            block = min(self.runner.blocks.get(self.stage, 1), len(self.ids) - self.position)
            self.position += block
            self._count(block)
        self.runner.turns.append((self.stage, self.position))
        return tuple(self.ids[first : self.position]), seconds

    def close(self) -> None:
        self.closed = True

    def _count(self, block: int) -> None:
        self.timings.steps += 1
        self.timings.rows += block
        self.accepted_per_step[block - 1] += 1
        self.timings.completion_tokens += block
        if block > 1:
            for counts in (self.timings.drafted, self.timings.accepted):
                counts["lookup"] = counts.get("lookup", 0) + block - 1


class FakeRunner:
    """bench.arms.ArmRunner over a fixed text; `other` maps a stage to the (wrong) ids it emits instead."""

    def __init__(
        self,
        text: Sequence[int],
        step_seconds: StepSeconds = lambda stage, position: 0.01,
        blocks: dict[str, int] | None = None,
        other: dict[str, Sequence[int]] | None = None,
    ) -> None:
        self.text, self.step_seconds = list(text), step_seconds
        self.blocks, self.other = blocks or {}, other or {}
        self.turns: list[tuple[str, int]] = []
        self.arms: list[FakeArm] = []
        self.warm_ups: list[str] = []

    def start(self, prompt_ids: Sequence[int], params: SamplingParams) -> FakeArm:
        stage = str(params.speculation)
        if params.max_tokens == WARM_UP_TOKENS:
            self.warm_ups.append(stage)
        arm = FakeArm(self, stage, self.other.get(stage, self.text)[: params.max_tokens])
        self.arms.append(arm)
        return arm

    most_rows = 64

    def block_seconds(self, prompt_ids: Sequence[int], rows: int) -> float:
        return 0.01 + 0.002 * (rows - 1)
