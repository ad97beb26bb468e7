"""Turns of arms and the results made of them, with scripted arms."""

from __future__ import annotations

import pytest

from quickdraft.bench.arms import run_prompt
from quickdraft.bench.measure import OFF, measure, plain_rate
from quickdraft.bench.workloads import Chat, PromptIds, Random, Workload
from quickdraft.types import SamplingParams, Speculation
from tests.support.fake_arms import FakeRunner

L8, L16 = Speculation.parse("lookup@8"), Speculation.parse("lookup@16")
STAGES = [OFF, L8, L16]
TEXT = list(range(1000, 1400))
WORKLOAD = Workload("essay", (Chat(()),), 256)
PROMPT = PromptIds((1, 2, 3), 256)


def test_arms_take_turns_of_32_tokens_in_mirrored_order() -> None:
    runner = FakeRunner(TEXT)
    run_prompt(runner, [1, 2], SamplingParams(temperature=0.0, max_tokens=128), STAGES)
    rounds = runner.turns[3:]  # after one warm-up turn per stage
    forward = ["off", "lookup@8", "lookup@16"]
    assert [stage for stage, _ in rounds] == forward + forward[::-1] + forward + forward[::-1]
    assert [position for _, position in rounds] == [32] * 3 + [64] * 3 + [96] * 3 + [128] * 3


def test_every_stage_warms_up_before_the_first_turn_and_every_arm_is_closed() -> None:
    runner = FakeRunner(TEXT)
    run_prompt(runner, [1, 2], SamplingParams(temperature=0.0, max_tokens=64), STAGES)
    assert runner.warm_ups == ["off", "lookup@8", "lookup@16"]
    assert [position for _, position in runner.turns[:3]] == [16, 16, 16]
    assert len(runner.arms) == 6 and all(arm.closed for arm in runner.arms)


def test_an_arm_ahead_of_the_edge_gets_a_shorter_turn_or_none() -> None:
    runner = FakeRunner(TEXT, blocks={"lookup@16": 40})
    runs = run_prompt(runner, [1], SamplingParams(temperature=0.0, max_tokens=160), [OFF, L16])
    # edges 32, 64, 96, 128, 160; blocks of 40 end at 40, 80, 120, 160: the turn to 160 is not needed
    assert [turn.tokens for turn in runs[1].turns] == [40, 40, 40, 40]
    assert [turn.tokens for turn in runs[0].turns] == [32] * 5
    assert runs[0].ids == runs[1].ids == TEXT[:160]


def test_arms_are_closed_when_one_fails_to_start() -> None:
    class Failing(FakeRunner):
        def start(self, prompt_ids, params):
            if len(self.arms) == 4:
                raise MemoryError
            return super().start(prompt_ids, params)

    runner = Failing(TEXT)
    with pytest.raises(MemoryError):
        run_prompt(runner, [1], SamplingParams(temperature=0.0, max_tokens=64), STAGES)
    assert len(runner.arms) == 4 and all(arm.closed for arm in runner.arms)


def test_known_times_give_the_known_ratio() -> None:
    def seconds(stage: str, position: int) -> float:
        drift = 1.0 + position // 32
        return drift * (0.010 if stage == "off" else 0.016)

    result = measure(FakeRunner(TEXT, seconds, {"lookup@8": 4}), WORKLOAD, [PROMPT], [OFF, L8])
    plain, lookup = result.stages
    assert (result.prompt_tokens, result.output_tokens) == (3, 256)
    assert (plain.relative_to_plain, plain.relative_low, plain.relative_high) == (1.0, 1.0, 1.0)
    assert (plain.steps, plain.tokens_per_step, plain.drafted) == (256, 1.0, {})
    assert (lookup.steps, lookup.tokens_per_step) == (64, 4.0)
    assert lookup.drafted == lookup.accepted == {"lookup": 192}
    assert (plain.rows, plain.accepted_per_step) == (256, (256,))
    assert (lookup.rows, lookup.accepted_per_step) == (256, (0, 0, 0, 64))
    total = sum(0.010 * (1 + p // 32) for p in range(256))
    assert plain.decode_tokens_per_second == pytest.approx(256 / total)
    assert plain.step_ms == pytest.approx(1000 * total / 256)
    relative = (lookup.relative_low, lookup.relative_to_plain, lookup.relative_high)
    assert relative == pytest.approx((2.5, 2.5, 2.5)), "drift common to both arms leaves no spread"
    assert lookup.ids_equal_plain and lookup.failed is None


def test_prompts_of_a_workload_are_summed_in_their_order() -> None:
    runner = FakeRunner(TEXT)
    prompts = [PromptIds((1,), 40), PromptIds((2, 3), 70)]
    result = measure(runner, WORKLOAD, prompts, [OFF, L8])
    assert (result.prompt_tokens, result.output_tokens, result.stages[1].steps) == (3, 110, 110)
    assert [arm.ids[-1] for arm in runner.arms if len(arm.ids) > 16] == [1039, 1039, 1069, 1069]


def speeds(stage) -> set[float | None]:
    return {
        stage.decode_tokens_per_second, stage.relative_to_plain, stage.relative_low, stage.relative_high,
        stage.step_ms, stage.tokens_per_step,
    }  # fmt: skip


def test_degenerate_text_has_no_speed_in_any_arm() -> None:
    result = measure(FakeRunner([1, 2, 3, 4] * 64, blocks={"lookup@16": 16}), WORKLOAD, [PROMPT], [OFF, L16])
    assert all(speeds(stage) == {None} and "degenerate" in str(stage.failed) for stage in result.stages)
    assert result.stages[1].accepted == {"lookup": 240}, "counts stay, for finding out why"


def test_other_ids_than_plain_have_no_speed_and_plain_keeps_its_own() -> None:
    wrong = [*TEXT[:100], 7, *TEXT[101:]]
    result = measure(FakeRunner(TEXT, other={"lookup@8": wrong}), WORKLOAD, [PROMPT], STAGES)
    plain, bad, good = result.stages
    assert plain.failed is None and good.failed is None
    assert speeds(bad) == {None} and "token 100 is 7" in str(bad.failed) and not bad.ids_equal_plain


def test_stated_ids_are_the_check_where_they_exist() -> None:
    text = [1, 2, 3, 4] * 64
    good = measure(FakeRunner(text), WORKLOAD, [PromptIds((1,), 256, tuple(text))], [OFF, L8])
    bad = measure(FakeRunner(text), WORKLOAD, [PromptIds((1,), 256, (*text[:9], 0, *text[10:]))], [OFF, L8])
    assert all(stage.failed is None for stage in good.stages)
    assert all("stated ids" in str(stage.failed) and speeds(stage) == {None} for stage in bad.stages)


def test_random_ids_may_repeat() -> None:
    workload = Workload("random", (Random(),), 128)
    result = measure(FakeRunner([5] * 128), workload, [PromptIds((1,), 128)], [OFF, L8])
    assert all(stage.failed is None for stage in result.stages)


def test_the_plain_rate_is_the_second_run_and_is_checked_too() -> None:
    runner = FakeRunner(TEXT, lambda stage, position: 0.004)
    rate = plain_rate(runner, [1], is_text=True)
    assert rate.tokens_per_second == pytest.approx(250.0) and rate.failed is None
    assert [arm.stage for arm in runner.arms] == ["off", "off"]
    assert plain_rate(FakeRunner([3] * 128), [1], is_text=True).tokens_per_second is None
    assert plain_rate(FakeRunner([3] * 128), [1], is_text=False).tokens_per_second is not None


def test_the_ceiling_is_that_of_the_stage_s_longest_block() -> None:
    off, capped, longer = measure(
        FakeRunner(TEXT), WORKLOAD, [PROMPT], [OFF, L8, Speculation.parse("lookup@64")]
    ).stages
    assert off.ceiling == pytest.approx(1.0)
    assert capped.ceiling == pytest.approx(8 * 0.01 / (0.01 + 0.002 * 7))
    assert longer.ceiling == pytest.approx(64 * 0.01 / (0.01 + 0.002 * 63))
