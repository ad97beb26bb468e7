"""Engine.step around the happy path: failures that can be retried, events, times, plans as JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from quickdraft.engine.drafters import Drafting
from quickdraft.engine.loop import Engine
from quickdraft.engine.plan import StepPlan
from quickdraft.errors import BadParameter, CapacityError, UnsupportedError
from quickdraft.speculate.draft import Draft
from quickdraft.speculate.lookup import LookupDrafter
from quickdraft.types import FinishReason, SamplingParams, Speculation
from tests.support.toy import (
    AlwaysDraft,
    ScriptedDrafter,
    ToyModel,
    ToyRow,
    check_counts,
    check_idle,
    run_all,
    toy_engine,
    toy_request,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPT = [5, 9, 2, 7] * 6


def truth(prompt=PROMPT, params=GREEDY) -> list[int]:
    return run_all(toy_engine(Drafting([])), [toy_request("r", prompt, params)])["r"]


class FailsSometimes(ToyModel):
    """Writes its rows and then raises on the given calls."""

    def __init__(self, blocks: int, calls: set[int]) -> None:
        super().__init__(blocks)
        self.calls, self.call = calls, 0

    def run(self, plan: StepPlan) -> list[list[ToyRow]]:
        rows = super().run(plan)
        self.call += 1
        if self.call in self.calls:
            raise RuntimeError("the device is gone")
        return rows


def test_a_failed_step_propagates_and_can_be_taken_again() -> None:
    expected = truth()
    drafting = AlwaysDraft(ScriptedDrafter({"r": expected}, 2, 5))
    engine = toy_engine(drafting, chunk_rows=10, model=FailsSometimes(64, {1, 3, 5, 6}))
    request = toy_request("r", PROMPT, GREEDY)
    engine.add(request)
    failures = 0
    while engine.has_work:
        free = engine.free_blocks
        try:
            engine.step()
        except RuntimeError:
            failures += 1
            assert engine.free_blocks == free, "pending blocks were kept"
            assert all(item.state.pending == 0 for item in engine.scheduler.running)
    assert failures == 4
    assert request.output_ids == expected
    check_counts(request)
    check_idle(engine)


def test_a_drafter_that_raises_leaves_the_engine_consistent() -> None:
    class Broken(ScriptedDrafter):
        def propose(self, view, budget: int) -> Draft:
            if view.request_id == "r" and len(view.tokens) == len(PROMPT) + 3:
                raise ZeroDivisionError
            return super().propose(view, budget)

    engine = toy_engine(AlwaysDraft(Broken({"r": truth(), "s": truth()}, 0, 2)))
    for name in ("s", "r"):  # the older one has reserved its rows when the younger one's drafter fails
        engine.add(toy_request(name, PROMPT, GREEDY))
    with pytest.raises(ZeroDivisionError):
        while engine.has_work:
            engine.step()
    assert all(item.state.pending == 0 for item in engine.scheduler.running)
    engine.abort("r")
    engine.abort("s")
    check_idle(engine)


def test_a_drafter_that_ignores_its_budget_is_caught() -> None:
    class Greedy(ScriptedDrafter):
        def propose(self, view, budget: int) -> Draft:
            return Draft((1,) * (budget + 1), self.source)

    engine = toy_engine(AlwaysDraft(Greedy({}, 0, 0)))
    engine.add(toy_request("r", PROMPT, GREEDY))
    with pytest.raises(AssertionError, match="budget"):
        while engine.has_work:
            engine.step()


@pytest.mark.parametrize("right", [0, 4, 9])
def test_a_row_that_breaks_inside_an_accepted_run(right: int) -> None:
    """Tokens, logprobs and counts before the broken row are delivered in the event that says ERROR."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1)
    expected = truth(params=params)
    broken = len(PROMPT) - 1 + 6  # the row that would choose output token 6
    engine = toy_engine(AlwaysDraft(ScriptedDrafter({"r": expected}, right, 9)), broken_at=broken)
    request = toy_request("r", PROMPT, params)
    engine.add(request)
    events = []
    while engine.has_work:
        events += engine.step()
    assert [token for event in events for token in event.tokens] == expected[:6] == request.output_ids
    assert [entry.token for event in events for entry in event.logprobs] == expected[:6]
    assert [event.finish for event in events if event.finish] == [FinishReason.ERROR]
    assert request.finish == FinishReason.ERROR and "not numbers" in (request.error or "")
    check_counts(request)
    check_idle(engine)


def test_what_can_never_be_served_is_refused_at_add() -> None:
    engine = toy_engine(Drafting([LookupDrafter()]), blocks=2)
    with pytest.raises(CapacityError, match="never fit"):
        engine.add(toy_request("r", PROMPT, GREEDY))
    small = toy_request("small", PROMPT[:4], GREEDY)
    engine.add(small)
    with pytest.raises(BadParameter, match="request_id"):
        engine.add(toy_request("small", PROMPT[:4], GREEDY))
    named = SamplingParams(max_tokens=2, speculation=Speculation.parse("dflash2"))
    with pytest.raises(UnsupportedError, match="dflash2"):
        engine.add(toy_request("named", PROMPT[:4], named))
    run_all(engine, [])
    assert small.finish == FinishReason.LENGTH


def test_blocks_held_elsewhere_are_an_error_not_a_standstill() -> None:
    engine = toy_engine(Drafting([]), blocks=4)
    held = engine.scheduler.pool.take(3)
    engine.add(toy_request("r", PROMPT, GREEDY))
    for _ in range(2):
        with pytest.raises(CapacityError, match="held elsewhere"):
            engine.step()
    engine.scheduler.pool.give_back(held)
    run_all(engine, [])


def test_an_idle_engine_steps_to_nothing() -> None:
    engine = toy_engine(Drafting([]))
    assert (engine.has_work, engine.step()) == (False, [])
    engine.abort("nobody")


def clocked(engine: Engine) -> Engine:
    """Each reading of the clock is one second later, so each step takes one second."""
    readings = iter(range(10_000))
    return Engine(engine.scheduler, engine.runner, engine.drafting, clock=lambda: float(next(readings)))


def test_time_goes_to_whoever_had_rows_in_the_step() -> None:
    engine = clocked(toy_engine(Drafting([]), chunk_rows=8))
    reader = toy_request("reader", [1 + i % 9 for i in range(33)], GREEDY)
    writer = toy_request("writer", [3], GREEDY)
    run_all(engine, [writer, reader])
    assert (writer.timings.prompt_ms, writer.timings.decode_ms) == (0.0, 20_000.0)
    assert (reader.timings.prompt_ms, reader.timings.decode_ms) == (4_000.0, 20_000.0)


def test_re_reading_after_preemption_is_decode_time() -> None:
    engine = clocked(toy_engine(Drafting([]), blocks=5, chunk_rows=64))
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    batch = [toy_request(f"r{i}", PROMPT, params) for i in range(2)]
    run_all(engine, batch)
    assert engine.scheduler.preemptions
    for request in batch:
        assert request.timings.prompt_ms == 1_000.0, "one chunk reads the prompt, once"
        assert request.timings.decode_ms >= 1_000.0 * request.timings.steps


def test_a_plan_is_json_and_prefill_stops_before_the_last_prompt_token() -> None:
    engine = toy_engine(Drafting([LookupDrafter()]), chunk_rows=10)
    run_all(engine, [toy_request("r", PROMPT, GREEDY)])
    plans = [json.loads(json.dumps(plan.to_dict())) for plan in engine.runner.plans]
    first, second, third, verify = (plan["entries"][0] for plan in plans[:4])
    assert [(e["start"], len(e["tokens"]), e["wanted"]) for e in (first, second, third)] == [
        (0, 10, 0),
        (10, 10, 0),
        (20, 3, 0),
    ]
    assert verify["start"] == len(PROMPT) - 1
    assert verify["tokens"] == [PROMPT[-1], *verify["drafted"]]
    assert verify["wanted"] == 1 + len(verify["drafted"]) == plans[3]["rows"]
    assert verify["source"] == "lookup", "drafts work from the first step"


def test_the_block_table_covers_every_row_of_its_entry() -> None:
    class Checking(ToyModel):
        def run(self, plan: StepPlan) -> list[list[ToyRow]]:
            tables = [entry.block_table for entry in plan.entries]
            used = np.concatenate(tables).tolist()
            assert len(used) == len(set(used)), "two sequences write one block"
            for entry, table in zip(plan.entries, tables, strict=True):
                assert table.dtype == np.int32
                assert len(table) * 16 >= entry.start + len(entry.tokens) > (len(table) - 1) * 16
            return super().run(plan)

    engine = toy_engine(AlwaysDraft(ScriptedDrafter({"a": [], "b": []}, 0, 30)), model=Checking(64))
    run_all(engine, [toy_request(name, PROMPT, GREEDY) for name in ("a", "b")])
