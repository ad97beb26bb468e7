"""Scripted and adversarial drafters over the ToyModel: output never changes, nothing leaks or stalls."""

from __future__ import annotations

import dataclasses
import random

import pytest

from quickdraft.engine.drafters import Drafting
from quickdraft.engine.scheduler import Scheduler
from quickdraft.speculate.lookup import LookupDrafter
from quickdraft.state.sequence import SequenceState
from quickdraft.types import FinishReason, SamplingParams
from tests.support.settings import SETTINGS
from tests.support.toy import VOCABULARY, AlwaysDraft, ScriptedDrafter, run_all, toy_engine, toy_request

SOURCE = random.Random(3)
PROMPTS = [[SOURCE.randrange(1, VOCABULARY) for _ in range(n)] for n in (1, 17, 40, 65)]


def params_for(name: str, max_tokens: int = 48) -> SamplingParams:
    return dataclasses.replace(SETTINGS[name], max_tokens=max_tokens)


def requests(params: SamplingParams, max_context: int = 400):
    return [toy_request(f"r{i}", prompt, params, max_context) for i, prompt in enumerate(PROMPTS)]


def plain(params: SamplingParams, max_context: int = 400) -> dict[str, list[int]]:
    """One request at a time, nothing drafted."""
    truth = {}
    for request in requests(params, max_context):
        truth |= run_all(toy_engine(Drafting([])), [request])
    return truth


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("chunk_rows", "blocks"), [(64, 64), (5, 64), (16, 13)])
def test_every_setting_with_lookup_chunks_batches_and_preemption(setting, chunk_rows, blocks) -> None:
    params = params_for(setting)
    engine = toy_engine(Drafting([LookupDrafter()]), chunk_rows=chunk_rows, blocks=blocks)
    assert run_all(engine, requests(params)) == plain(params)


@pytest.mark.parametrize("right", range(16))
@pytest.mark.parametrize("setting", ["greedy", "top_k_top_p_min_p", "frequency"])
def test_k_right_then_wrong(right: int, setting: str) -> None:
    params = params_for(setting)
    truth = plain(params)
    engine = toy_engine(AlwaysDraft(ScriptedDrafter(truth, right, 15)))
    batch = requests(params)
    assert run_all(engine, batch) == truth
    for request in batch:
        timings = request.timings
        assert timings.steps + sum(timings.accepted.values()) == timings.completion_tokens
        assert timings.steps <= timings.completion_tokens
        if right and timings.completion_tokens == 48:
            assert timings.steps <= -(-48 // (right + 1)) + 1, "right drafts were not accepted"


def test_drafts_past_eos_and_past_the_length_limit() -> None:
    params = SamplingParams(temperature=0.0)
    truth = plain(params, max_context=90)
    engine = toy_engine(AlwaysDraft(ScriptedDrafter(truth, 64, 63)))
    batch = requests(params, max_context=90)
    assert run_all(engine, batch) == truth
    for request in batch:
        assert len(request.tokens) <= 90
        ended_by_eos = request.output_ids[-1] == 0
        assert request.finish == (FinishReason.STOP if ended_by_eos else FinishReason.LENGTH)
        assert 0 not in request.output_ids[:-1]


def test_preemption_happens_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_for("temperature", 60)
    engine = toy_engine(Drafting([LookupDrafter()]), blocks=8, chunk_rows=8)
    preempted = []
    original = Scheduler._preempt
    monkeypatch.setattr(
        Scheduler, "_preempt", lambda self, item: (preempted.append(item), original(self, item))
    )
    assert run_all(engine, requests(params)) == plain(params)
    assert preempted, "the pool was meant to be too small"


def test_aborts_at_random_moments_leak_nothing_and_leave_neighbours_alone() -> None:
    params = params_for("top_p")
    truth = plain(params)
    for seed in range(20):
        chance = random.Random(seed)
        engine = toy_engine(Drafting([LookupDrafter()]), chunk_rows=8)
        batch = requests(params)
        for request in batch:
            engine.add(request)
        victim = chance.choice(batch)
        for _ in range(chance.randrange(0, 30)):
            engine.step()
        engine.abort(victim.request_id)
        found = run_all(engine, [])
        assert found == {}
        for request in batch:
            if request is not victim:
                assert request.output_ids == truth[request.request_id]


def test_nan_logits_fail_that_request_only() -> None:
    params = params_for("greedy")
    truth = plain(params)
    engine = toy_engine(Drafting([]), broken_at=60)
    batch = requests(params)
    run_all(engine, batch)
    for request in batch:
        total = request.prompt_length + len(truth[request.request_id])
        reaches = request.prompt_length <= 61 < total  # the row at 60 is walked
        assert (request.finish == FinishReason.ERROR) == reaches
        assert request.output_ids == truth[request.request_id][: len(request.output_ids)]


def test_the_toy_notices_contamination(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test bench can fail: a runner that keeps a rejected token changes the text."""
    params = params_for("greedy")
    truth = plain(params)
    engine = toy_engine(AlwaysDraft(ScriptedDrafter(truth, 1, 4)))
    original = SequenceState.commit
    monkeypatch.setattr(
        SequenceState, "commit", lambda self, keep: original(self, min(self.pending, keep + 1))
    )
    with pytest.raises(AssertionError):
        assert run_all(engine, requests(params)) == truth


@pytest.mark.parametrize(("first", "second"), [("greedy", "hot"), ("hot", "repetition")])
def test_a_mixed_batch_equals_solo_runs(first: str, second: str) -> None:
    mixed = [
        toy_request(f"r{i}", prompt, params_for(first if i % 2 else second))
        for i, prompt in enumerate(PROMPTS)
    ]
    solo = {}
    for i, prompt in enumerate(PROMPTS):
        request = toy_request(f"r{i}", prompt, params_for(first if i % 2 else second))
        solo |= run_all(toy_engine(Drafting([])), [request])
    assert run_all(toy_engine(Drafting([LookupDrafter()])), mixed) == solo
