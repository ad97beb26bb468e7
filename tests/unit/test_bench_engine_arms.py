"""Arms on an engine over the ToyModel: same tokens as plain, prompt read once, no block leaked."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from quickdraft.bench.arms import run_prompt
from quickdraft.bench.batch_arms import run_batch
from quickdraft.bench.check import Output, refusal
from quickdraft.bench.engine_arms import EngineArms
from quickdraft.engine.drafters import Drafting
from quickdraft.errors import CapacityError, ContextTooLong
from quickdraft.speculate.lookup import LookupDrafter
from quickdraft.types import SamplingParams, Speculation
from tests.support.toy import ToyModel, run_all, toy_engine, toy_request

OFF, L16 = Speculation(), Speculation.parse("lookup@16")
STAGES = [OFF, Speculation.parse("lookup@4"), L16]
PROMPT = [5, 9, 3, 8, 1, 7, 2] * 11
PARAMS = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


def toy_arms(blocks: int = 64, broken_at: int | None = None) -> tuple[EngineArms, ToyModel]:
    engine = toy_engine(Drafting([LookupDrafter()]), blocks=blocks, broken_at=broken_at)
    model = engine.runner
    assert isinstance(model, ToyModel)
    return EngineArms(engine, toy_request, model.copy_block), model


def plain_ids(prompt: list[int]) -> list[int]:
    request = toy_request("plain", prompt, replace(PARAMS, speculation=OFF))
    return run_all(toy_engine(Drafting([])), [request])["plain"]


@pytest.mark.parametrize("length", [1, 2, 16, 17, 33, 77])
def test_arms_in_turns_give_the_ids_of_plain_decoding(length: int) -> None:
    runner, _ = toy_arms()
    runs = run_prompt(runner, PROMPT[:length], PARAMS, STAGES)
    expected = plain_ids(PROMPT[:length])
    assert [run.ids for run in runs] == [expected] * 3
    outputs = [Output(tuple(run.ids), run.arm.timings) for run in runs]
    assert refusal(outputs, [outputs[0]] * 3, [None] * 3, is_text=False) is None
    if length == len(PROMPT):
        assert sum(run.arm.timings.steps for run in runs[1:]) < 200, (
            "lookup must draft, or this proves little"
        )
    for run in runs:
        counts, timings = run.arm.accepted_per_step, run.arm.timings
        assert counts.total() == timings.steps, "every step is counted once"
        assert sum(n * steps for n, steps in counts.items()) == sum(timings.accepted.values())
    assert runs[0].arm.timings.steps == 100 and runs[0].arm.timings.drafted == {}


def test_the_prompt_is_read_once_and_every_block_comes_back() -> None:
    runner, model = toy_arms()
    pool = runner._engine.scheduler.pool
    run_prompt(runner, PROMPT, PARAMS, STAGES)
    read = [entry for plan in model.plans for entry in plan.entries if entry.wanted == 0]
    assert sum(len(entry.tokens) for entry in read) == len(PROMPT) - 1
    assert all(len(plan.entries) == 1 for plan in model.plans), "arms are never batched together"
    assert pool.free == pool.count - -(-(len(PROMPT) - 1) // 16), "only the shared prompt is still held"
    runner.start(PROMPT[:20], PARAMS)  # another prompt: the old one goes; this arm is left to close()
    runner.close()
    assert pool.free == pool.count


def test_arms_that_cannot_all_fit_are_refused_before_they_run() -> None:
    runner, model = toy_arms(blocks=21)  # 5 for the prompt, 8 for each arm
    pool = runner._engine.scheduler.pool
    arms = [runner.start(PROMPT, PARAMS) for _ in range(2)]
    plans = len(model.plans)
    with pytest.raises(CapacityError, match="do not fit the KV cache together"):
        runner.start(PROMPT, PARAMS)
    assert len(model.plans) == plans
    ids = [arm.advance(1000)[0] for arm in arms]
    assert ids[0] == ids[1] == tuple(plain_ids(PROMPT)), "those that were granted run to their end"
    runner.close()
    assert pool.free == pool.count


def test_an_impossible_request_leaks_nothing() -> None:
    runner, _ = toy_arms(blocks=20)
    pool = runner._engine.scheduler.pool
    with pytest.raises(CapacityError, match="never fit"):
        runner.start(PROMPT, replace(PARAMS, max_tokens=300))
    with pytest.raises(ContextTooLong):
        runner.start(list(itertools.repeat(3, 400)), PARAMS)
    runner.close()
    assert pool.free == pool.count


def test_nan_logits_end_the_arm_with_its_error() -> None:
    runner, _ = toy_arms(broken_at=len(PROMPT) + 10)
    arm = runner.start(PROMPT, PARAMS)
    ids, seconds = arm.advance(100)
    assert arm.finished and arm.error is not None and len(ids) == 11 and seconds > 0
    runner.close()


def test_eos_ends_an_arm_early() -> None:
    runner, _ = toy_arms()
    free_running = run_prompt(runner, PROMPT, PARAMS, [OFF])[0].ids
    stop = free_running[40]
    params = replace(PARAMS, stop_token_ids=(stop,))
    runs = run_prompt(runner, PROMPT, params, [OFF, L16])
    assert runs[0].ids == runs[1].ids == free_running[: free_running.index(stop) + 1]


def test_a_timed_block_has_its_rows_and_keeps_nothing() -> None:
    runner, model = toy_arms()
    pool = runner._engine.scheduler.pool
    runner.block_seconds(PROMPT, 1)
    free, expected = pool.free, plain_ids(PROMPT)
    for rows in (1, 16, 33):
        assert runner.block_seconds(PROMPT, rows) >= 0
        (entry,) = model.plans[-1].entries
        assert (len(entry.tokens), entry.wanted, len(entry.drafted)) == (rows, rows, rows - 1)
        assert entry.start == len(PROMPT) - 1 and entry.tokens[0] == PROMPT[-1] and pool.free == free
    (run,) = run_prompt(runner, PROMPT, PARAMS, [OFF])
    assert run.ids == expected


def test_a_batch_gives_each_request_its_ids_under_every_setting() -> None:
    engine = toy_engine(Drafting([LookupDrafter()]), blocks=256)
    model, prompts = engine.runner, [PROMPT[: 20 + 7 * n] for n in range(4)]
    assert isinstance(model, ToyModel)
    readers = [EngineArms(engine, toy_request, model.copy_block) for _ in prompts]
    params = [replace(PARAMS, max_tokens=30 + 20 * n) for n in range(4)]
    plain, drafted = run_batch(readers, prompts, params, (OFF, L16))
    expected = [
        tuple(plain_ids(prompt)[: one.max_tokens]) for prompt, one in zip(prompts, params, strict=True)
    ]
    assert plain.outputs == drafted.outputs == expected
    assert plain.tokens == drafted.tokens == sum(map(len, expected)) and len(plain.turns) > 1
    steps = [sum(one.timings.steps for one in run.requests) for run in (plain, drafted)]
    assert steps[1] < 0.9 * steps[0], "lookup must draft, or this proves little"
    for reader in readers:
        reader.close()
    pool = engine.scheduler.pool
    assert pool.free == pool.count
