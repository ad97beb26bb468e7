"""Arms: the stages of one prompt, decoded in turns of 32 tokens so that drift hits all of them alike.

Owns the order of the turns and what is recorded of each; the two protocols are the seam to an
engine (`engine_arms`), and tests drive it with fakes. The order is mirrored from round to round
(A B C, C B A, ...): over any two rounds every arm has the same mean place in time, so a machine that
slows down steadily slows all arms equally.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from quickdraft.bench.check import Output
from quickdraft.bench.paired import Turn
from quickdraft.types import SamplingParams, Speculation, Timings

WINDOW_TOKENS: Final = 32
WARM_UP_TOKENS: Final = 16


class Arm(Protocol):
    """One stage decoding one prompt; its own sequence, shared prefill."""

    @property
    def finished(self) -> bool: ...
    @property
    def timings(self) -> Timings: ...
    @property
    def error(self) -> str | None:
        """Why the request failed; None when it did not."""

    @property
    def accepted_per_step(self) -> Counter[int]:
        """How many steps had so many drafted tokens accepted."""

    def advance(self, tokens: int) -> tuple[tuple[int, ...], float]:
        """Whole steps until at least `tokens` >= 1 more ids or the end; (ids, seconds of the steps)."""

    def close(self) -> None:
        """Give back what the arm holds; may be called again."""


class ArmRunner(Protocol):
    """Makes arms; a prompt is prefilled once and every arm of it starts from there."""

    def start(self, prompt_ids: Sequence[int], params: SamplingParams) -> Arm: ...

    @property
    def most_rows(self) -> int: ...  # of a verify block

    def block_seconds(self, prompt_ids: Sequence[int], rows: int) -> float:
        """Seconds of one step of `rows` rows after the prompt, whose logits are wanted; nothing is kept."""


@dataclass(slots=True)
class ArmRun:
    """What was recorded of one arm on one prompt."""

    arm: Arm
    ids: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    def advance_to(self, tokens: int) -> None:
        """Decode until `tokens` ids are out; no turn when they are already, or when the arm ended."""
        if self.arm.finished or len(self.ids) >= tokens:
            return
        ids, seconds = self.arm.advance(tokens - len(self.ids))
        self.ids += ids
        if ids:
            self.turns.append(Turn(len(ids), seconds))

    @property
    def output(self) -> Output:
        return Output(tuple(self.ids), self.arm.timings, self.arm.error)


def run_prompt(
    runner: ArmRunner, prompt_ids: Sequence[int], params: SamplingParams, stages: Sequence[Speculation]
) -> list[ArmRun]:
    """Decode one prompt under every stage, in turns; one ArmRun per stage, in their order.

    Before the first turn every stage decodes a few tokens of a throw-away arm, so that no arm pays
    for cold caches.
    """
    _warm_up(runner, prompt_ids, params, stages)
    runs: list[ArmRun] = []
    try:
        for stage in stages:
            runs.append(ArmRun(runner.start(prompt_ids, replace(params, speculation=stage))))
        target, order = WINDOW_TOKENS, runs
        while not all(run.arm.finished for run in runs):
            for run in order:
                run.advance_to(target)
            target, order = target + WINDOW_TOKENS, order[::-1]
    finally:
        for run in runs:
            run.arm.close()
    return runs


def _warm_up(
    runner: ArmRunner, prompt_ids: Sequence[int], params: SamplingParams, stages: Sequence[Speculation]
) -> None:
    for stage in stages:
        arm = runner.start(prompt_ids, replace(params, max_tokens=WARM_UP_TOKENS, speculation=stage))
        try:
            arm.advance(WARM_UP_TOKENS)
        finally:
            arm.close()
