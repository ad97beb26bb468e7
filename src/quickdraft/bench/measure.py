"""From arms to results: decode a workload under every stage, check it, and only then compute speeds.

Drives any ArmRunner; engines, files and printing are elsewhere. stages[0] is plain decoding, always.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from quickdraft.bench.arms import WINDOW_TOKENS, ArmRun, ArmRunner, run_prompt
from quickdraft.bench.break_even import BreakEven
from quickdraft.bench.check import Output, refusal
from quickdraft.bench.paired import paired_ratio, window_seconds
from quickdraft.bench.report import StageResult, WorkloadResult
from quickdraft.bench.workloads import PromptIds, Workload
from quickdraft.engine.drafters import DEFAULT_MAX_ROWS
from quickdraft.types import SamplingParams, Speculation

OFF: Final = Speculation()
ROOF_TOKENS: Final = 128
CEILING_ROUNDS: Final = 9


@dataclass(frozen=True, slots=True)
class PlainRate:
    """Plain decoding near context 0; `tokens_per_second` is None when `failed` is a reason."""

    tokens_per_second: float | None
    failed: str | None = None


def measure(
    runner: ArmRunner,
    workload: Workload,
    prompts: Sequence[PromptIds],
    stages: Sequence[Speculation],
    break_even: BreakEven | None = None,
) -> WorkloadResult:
    """Decode every prompt, in order, under every stage (stages[0] is `off`) and sum up."""
    assert stages[0] == OFF, "plain decoding comes first"
    runs = [
        run_prompt(runner, prompt.ids, SamplingParams(temperature=0.0, max_tokens=prompt.max_tokens), stages)
        for prompt in prompts
    ]  # [prompt][stage]
    by_stage = [[one[index] for one in runs] for index in range(len(stages))]
    plain = by_stage[0]
    expected = [prompt.expected for prompt in prompts]
    plain_failed = _refusal(plain, plain, expected, workload)
    ceilings = _ceilings(runner, prompts[-1].ids, stages)
    tokens = sum(len(prompt.ids) + len(one.ids) / 2 for prompt, one in zip(prompts, plain, strict=True))
    context = round(tokens / len(prompts))
    results: list[StageResult] = []
    for stage, arms in zip(stages, by_stage, strict=True):
        failed = _refusal(arms, plain, expected, workload)
        if failed is None and plain_failed is not None:
            failed = f"plain decoding was refused: {plain_failed}"
        rows = _most_rows(runner, stage)
        result = _stage_result(stage, arms, plain, failed, ceilings[rows])
        if break_even is not None:
            result = replace(result, break_even=break_even.needed(stage, context, rows))
        results.append(result)
    return WorkloadResult(
        workload.name,
        prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
        output_tokens=sum(len(one.ids) for one in plain),
        stages=tuple(results),
    )


def plain_rate(runner: ArmRunner, prompt: Sequence[int], *, is_text: bool) -> PlainRate:
    """Plain decoding of 128 tokens after a short prompt, checked like any output; a first run warms up."""
    params = SamplingParams(temperature=0.0, max_tokens=ROOF_TOKENS, ignore_eos=True, speculation=OFF)
    for _ in range(2):
        arm = runner.start(prompt, params)
        try:
            ids, seconds = arm.advance(ROOF_TOKENS)
        finally:
            arm.close()
    output = [Output(ids, arm.timings, arm.error)]
    failed = refusal(output, output, [None], is_text=is_text)
    return PlainRate(len(ids) / seconds) if failed is None else PlainRate(None, failed)


def _ceilings(
    runner: ArmRunner, prompt_ids: Sequence[int], stages: Sequence[Speculation]
) -> dict[int, float]:
    """By rows: most that blocks of so many can gain after this prompt, were every draft right: rows x seconds
    of a step of one row / seconds of such a step. Medians of steps in turns."""
    counts = sorted({1, *(_most_rows(runner, stage) for stage in stages)})
    times: dict[int, list[float]] = {rows: [] for rows in counts}
    for _ in range(CEILING_ROUNDS):
        for rows in counts:
            times[rows].append(runner.block_seconds(prompt_ids, rows))
    medians = {rows: statistics.median(seconds) for rows, seconds in times.items()}
    return {rows: rows * medians[1] / medians[rows] for rows in counts}


def _most_rows(runner: ArmRunner, stage: Speculation) -> int:
    return 1 if stage.off else min(stage.max_rows or DEFAULT_MAX_ROWS, runner.most_rows)


def _refusal(
    arms: Sequence[ArmRun],
    plain: Sequence[ArmRun],
    expected: Sequence[tuple[int, ...] | None],
    workload: Workload,
) -> str | None:
    outputs, reference = [one.output for one in arms], [one.output for one in plain]
    return refusal(outputs, reference, expected, is_text=workload.is_text)


def _stage_result(
    stage: Speculation, arms: Sequence[ArmRun], plain: Sequence[ArmRun], failed: str | None, ceiling: float
) -> StageResult:
    """Sums over prompts; speeds only when nothing failed."""
    timings = [one.arm.timings for one in arms]
    steps = sum(one.steps for one in timings)
    counts = (steps, _sum(t.drafted for t in timings), _sum(t.accepted for t in timings))
    rows, histogram = sum(one.rows for one in timings), _accepted_per_step(arms)
    equal = all(one.ids == other.ids for one, other in zip(arms, plain, strict=True))
    if failed is not None:
        return StageResult(str(stage), *(None,) * 7, *counts, equal, failed, rows, histogram)
    seconds = _windows(arms)
    ratio = paired_ratio(_windows(plain), seconds)
    total, tokens = sum(seconds), sum(len(one.ids) for one in arms)
    speeds = (
        tokens / total, ratio.value, ratio.low, ratio.high, ceiling, 1000.0 * total / steps, tokens / steps,
    )  # fmt: skip
    return StageResult(str(stage), *speeds, *counts, equal, None, rows, histogram)


def _windows(runs: Sequence[ArmRun]) -> list[float]:
    """Seconds per window, prompt after prompt; equal ids give equal windows."""
    return [seconds for one in runs for seconds in window_seconds(one.turns, WINDOW_TOKENS)]


def _accepted_per_step(arms: Sequence[ArmRun]) -> tuple[int, ...]:
    counts = sum((one.arm.accepted_per_step for one in arms), Counter[int]())
    return tuple(counts[accepted] for accepted in range(max(counts, default=-1) + 1))


def _sum(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for source, number in count.items():
            total[source] = total.get(source, 0) + number
    return total
