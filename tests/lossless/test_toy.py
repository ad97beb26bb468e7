"""Scripted and adversarial drafters over the ToyModel: output never changes, nothing leaks or stalls.

`run_all` checks of every run that it ends, that events add up to the output, that
steps + accepted == tokens, and that no block is left behind.
"""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest

from quickdraft.engine.drafters import Drafting
from quickdraft.engine.request import Request
from quickdraft.speculate.lookup import LookupDrafter
from quickdraft.state.sequence import SequenceState
from quickdraft.types import FinishReason, SamplingParams
from tests.support.settings import SETTINGS
from tests.support.toy import (
    POISON,
    VOCABULARY,
    AlwaysDraft,
    RandomDrafter,
    ScriptedDrafter,
    ToyModel,
    check_idle,
    run_all,
    toy_engine,
    toy_request,
)

SOURCE = random.Random(3)
PROMPTS = [[SOURCE.randrange(1, VOCABULARY) for _ in range(n)] for n in (1, 17, 40, 65)]
NEEDED_BLOCKS = 8  # of the longest: 65 + 48 tokens
DRAFTERS = {
    "always right": lambda truth: ScriptedDrafter(truth, 63, 63),
    "always wrong": lambda truth: ScriptedDrafter(truth, 0, 15),
    "one right": lambda truth: ScriptedDrafter(truth, 1, 7),
    "empty": lambda truth: ScriptedDrafter(truth, 0, 0),
    "random": lambda truth: RandomDrafter(truth, 0, 0, seed=4),
}


def params_for(name: str, max_tokens: int = 48) -> SamplingParams:
    return dataclasses.replace(SETTINGS[name], max_tokens=max_tokens)


def requests(params: SamplingParams, max_context: int = 400, text: bool = False) -> list[Request]:
    return [toy_request(f"r{i}", prompt, params, max_context, text) for i, prompt in enumerate(PROMPTS)]


def plain(params: SamplingParams, max_context: int = 400, text: bool = False) -> dict[str, list[int]]:
    """One request at a time, nothing drafted."""
    truth = {}
    for request in requests(params, max_context, text):
        truth |= run_all(toy_engine(Drafting([])), [request])
        assert request.timings.rows == request.timings.steps == request.timings.completion_tokens
    return truth


@functools.cache
def truth_of(setting: str) -> dict[str, list[int]]:
    return plain(params_for(setting))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_drafter_and_no_schedule_changes_output(setting: str, drafter: str) -> None:
    truth = truth_of(setting)
    for chunk_rows, blocks, sequences in [(64, 64, 4), (1, 64, 4), (5, 64, 1), (16, 13, 4), (7, 8, 3)]:
        engine = toy_engine(
            AlwaysDraft(DRAFTERS[drafter](truth)),
            chunk_rows=chunk_rows,
            blocks=blocks,
            max_sequences=sequences,
        )
        batch = requests(params_for(setting))
        assert run_all(engine, batch) == truth, (chunk_rows, blocks)
        drafted = sum(sum(request.timings.drafted.values()) for request in batch)
        accepted = sum(sum(request.timings.accepted.values()) for request in batch)
        assert (drafted > 0) == (drafter != "empty")
        assert (accepted > 0) == (drafter not in ("empty", "always wrong"))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("chunk_rows", "blocks"), [(64, 64), (5, 64), (16, 13), (3, 8)])
def test_lookup_changes_nothing(setting: str, chunk_rows: int, blocks: int) -> None:
    engine = toy_engine(Drafting([LookupDrafter()]), chunk_rows=chunk_rows, blocks=blocks)
    assert run_all(engine, requests(params_for(setting))) == truth_of(setting)


def test_lookup_is_accepted_on_periodic_text() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7] * 6
    request = toy_request("r", prompt, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    engine = toy_engine(Drafting([LookupDrafter()]))
    run_all(engine, [request])
    assert request.timings.accepted["lookup"] >= 10
    assert engine.stats.sources["lookup"].accepted == request.timings.accepted["lookup"]


@pytest.mark.parametrize("right", range(16))
@pytest.mark.parametrize("setting", ["greedy", "top_k_top_p_min_p", "frequency"])
def test_k_right_then_wrong(right: int, setting: str) -> None:
    truth = truth_of(setting)
    batch = requests(params_for(setting))
    assert run_all(toy_engine(AlwaysDraft(ScriptedDrafter(truth, right, 15))), batch) == truth
    for request in batch:
        tokens = request.timings.completion_tokens
        assert request.timings.steps <= -(-tokens // (right + 1)) + 1, "right drafts were not accepted"
        if right < 15:
            assert request.timings.steps >= tokens // (right + 1)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_past_eos_and_past_the_length_limit(drafter: str) -> None:
    params = SamplingParams(temperature=0.0)
    truth = plain(params, max_context=90)
    engine = toy_engine(AlwaysDraft(DRAFTERS[drafter](truth)))
    batch = requests(params, max_context=90)
    assert run_all(engine, batch) == truth
    reasons = set()
    for request in batch:
        ended_by_eos = request.output_ids[-1] == 0
        assert ended_by_eos or len(request.tokens) == 90, "the context was not filled"
        assert request.finish == (FinishReason.STOP if ended_by_eos else FinishReason.LENGTH)
        assert 0 not in request.output_ids[:-1]
        reasons.add(request.finish)
    assert len(reasons) == 2, "the prompts no longer reach both ends"


def test_context_limit_64_prompt_60_a_drafter_that_proposes_16() -> None:
    prompt = [1 + i % 5 for i in range(60)]
    request = toy_request("r", prompt, SamplingParams(temperature=0.0, ignore_eos=True), max_context=64)
    engine = toy_engine(AlwaysDraft(ScriptedDrafter({"r": []}, 0, 16)), blocks=4)
    run_all(engine, [request])
    assert (request.finish, len(request.tokens)) == (FinishReason.LENGTH, 64)
    assert all(entry.start + len(entry.tokens) < 64 for plan in engine.runner.plans for entry in plan.entries)


@pytest.mark.parametrize("limit", range(1, 12))
def test_max_tokens_inside_an_accepted_run(limit: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True)
    longer = plain(dataclasses.replace(params, max_tokens=40))
    for drafter in DRAFTERS.values():
        batch = requests(params)
        found = run_all(toy_engine(AlwaysDraft(drafter(longer))), batch)
        assert found == {name: ids[:limit] for name, ids in longer.items()}
        assert {request.finish for request in batch} == {FinishReason.LENGTH}


def test_a_stop_id_inside_an_accepted_run_drops_the_rest() -> None:
    free = plain(SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    for name, ids in free.items():
        at = 5
        while ids[at] in ids[:at]:
            at += 1
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop_token_ids=(ids[at],))
        request = toy_request(name, PROMPTS[int(name[1:])], params)
        engine = toy_engine(AlwaysDraft(ScriptedDrafter(free, 40, 40)))
        assert run_all(engine, [request])[name] == ids[: at + 1]
        assert (request.finish, request.timings.steps) == (FinishReason.STOP, 1)
        assert request.timings.completion_tokens == at + 1


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("min_tokens", [0, 20])
def test_stop_strings_inside_accepted_runs(drafter: str, min_tokens: int) -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=60, min_tokens=min_tokens)
    truth = plain(params, text=True)
    batch = requests(params, text=True)
    assert run_all(toy_engine(AlwaysDraft(DRAFTERS[drafter](truth))), batch) == truth
    stopped = [request for request in batch if request.finish == FinishReason.STOP and request.tokens[-1]]
    assert stopped, "no stop string was met"
    assert all(request.output_length >= min_tokens for request in batch)


def test_preemption_happens_and_changes_nothing() -> None:
    params = params_for("temperature", 60)
    for drafter in ([], [LookupDrafter()]):
        engine = toy_engine(Drafting(drafter), blocks=NEEDED_BLOCKS, chunk_rows=8)
        assert run_all(engine, requests(params)) == plain(params)
        assert engine.scheduler.preemptions, "the pool was meant to be too small"


def test_aborts_at_random_moments_leak_nothing_and_leave_neighbours_alone() -> None:
    params = params_for("top_p")
    truth = truth_of("top_p")
    for seed in range(60):
        chance = random.Random(seed)
        drafter = RandomDrafter(truth, 0, 0, seed)
        engine = toy_engine(AlwaysDraft(drafter), chunk_rows=8, blocks=chance.choice([8, 12, 64]))
        batch = requests(params)
        for request in batch:
            engine.add(request)
        victims = chance.sample(batch, 2)
        for victim in victims:
            for _ in range(chance.randrange(0, 12)):
                engine.step()
            engine.abort(victim.request_id)
            engine.abort(victim.request_id)
        run_all(engine, [])
        for request in batch:
            if request.finish == FinishReason.ABORT:
                assert request in victims
                assert request.output_ids == truth[request.request_id][: request.output_length]
            else:
                assert request.output_ids == truth[request.request_id]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_nan_logits_fail_that_request_only(drafter: str) -> None:
    """What was emitted before the broken row stands, and reaches the caller, as in plain decoding."""
    truth = truth_of("greedy")
    engine = toy_engine(AlwaysDraft(DRAFTERS[drafter](truth)), broken_at=60)
    batch = requests(params_for("greedy"))
    found = run_all(engine, batch)
    failed = 0
    for request in batch:
        expected = truth[request.request_id]
        last_row = request.prompt_length + len(expected) - 2
        if request.prompt_length - 1 <= 60 <= last_row:  # the row at 60 chooses one of its tokens
            assert request.finish == FinishReason.ERROR and "not numbers" in request.error
            assert found[request.request_id] == expected[: 61 - request.prompt_length]
            failed += 1
        else:
            assert found[request.request_id] == expected
    assert 0 < failed < len(batch)


class StaleSlots(ToyModel):
    """A slot that was written once keeps its first token: rejected drafts stay."""

    def write(self, block: int, slot: int, token: int) -> None:
        if self.memory[block][slot] == POISON:
            super().write(block, slot, token)


class SharedSlots(ToyModel):
    """The first blocks are one block: neighbours write over each other."""

    def write(self, block: int, slot: int, token: int) -> None:
        super().write(0 if block < 4 else block, slot, token)

    def read(self, block: int, slot: int) -> int:
        return super().read(0 if block < 4 else block, slot)


@pytest.mark.parametrize("model", [StaleSlots, SharedSlots])
def test_the_toy_notices_contamination(model: type[ToyModel]) -> None:
    """This test bench can fail: memory that is not the sequence's own changes the text."""
    truth = truth_of("greedy")
    engine = toy_engine(AlwaysDraft(ScriptedDrafter(truth, 1, 4)), model=model(64))
    assert run_all(engine, requests(params_for("greedy"))) != truth


def test_the_toy_notices_a_block_freed_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = truth_of("greedy")
    engine = toy_engine(Drafting([]))
    original = SequenceState.commit

    def commit(self: SequenceState, keep: int) -> None:
        original(self, keep)
        if self.blocks:
            engine.runner.poison(int(self.block_table[-1]))

    monkeypatch.setattr(SequenceState, "commit", commit)
    assert run_all(engine, requests(params_for("greedy"))) != truth


@pytest.mark.parametrize(("first", "second"), [("greedy", "hot"), ("hot", "repetition")])
def test_a_mixed_batch_equals_solo_runs_in_ids_and_accept_counts(first: str, second: str) -> None:
    def mixed() -> list[Request]:
        settings = [params_for(first if i % 2 else second) for i in range(len(PROMPTS))]
        repeating = [[1, 2, 3, 4] * 5 + prompt + prompt for prompt in PROMPTS]
        return [toy_request(f"r{i}", repeating[i], settings[i]) for i in range(len(PROMPTS))]

    solo, accepted = {}, {}
    engine = toy_engine(Drafting([LookupDrafter()]))  # one after the other, the same drafter
    for request in mixed():
        solo |= run_all(engine, [request])
        accepted[request.request_id] = (request.timings.drafted, request.timings.accepted)
    batch = mixed()
    assert run_all(toy_engine(Drafting([LookupDrafter()]), blocks=128), batch) == solo
    assert {r.request_id: (r.timings.drafted, r.timings.accepted) for r in batch} == accepted
    assert any(counts for counts, _ in accepted.values()), "nothing was drafted"


def test_identical_requests_give_identical_answers() -> None:
    params = params_for("hot")
    batch = [toy_request(f"r{i}", PROMPTS[1], params) for i in range(4)]
    assert len({tuple(ids) for ids in run_all(toy_engine(Drafting([LookupDrafter()])), batch).values()}) == 1


def test_a_request_decodes_on_from_a_forked_prefix() -> None:
    """Two requests share the full blocks of one prefilled prompt; ids equal a cold start."""
    truth = truth_of("temperature")["r3"]
    engine = toy_engine(AlwaysDraft(RandomDrafter({"a": truth, "b": truth}, 0, 0)))
    model = engine.runner
    first = toy_request("prefix", PROMPTS[3], params_for("temperature", 1))
    state = SequenceState(engine.scheduler.pool)
    engine.add(first, state)
    while state.committed < 64:
        engine.step()
    twins = [state.fork(model.copy_block) for _ in range(2)]
    engine.abort("prefix")
    batch = [toy_request(name, PROMPTS[3], params_for("temperature")) for name in ("a", "b")]
    for request, twin in zip(batch, twins, strict=True):
        engine.add(request, twin)
    while engine.has_work:
        engine.step()
    assert [request.output_ids for request in batch] == [truth, truth]
    assert batch[0].timings.prompt_ms == 0.0, "the shared prompt was read again"
    check_idle(engine)
