"""Recurrent state over the HybridToy: cached == cold whatever is shared, drafted, evicted or lost.

Each toy logit depends on the paged memory and on the hash in the sequence's slot, so any stale
checkpoint, wrong rollback or missing replay changes the ids.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from quickdraft.engine.drafters import Drafting
from quickdraft.state.sequence import SequenceState
from tests.support.hybrid_toy import (
    DRAFTERS,
    GREEDY,
    INTERVAL,
    LONG,
    NAMES,
    SAMPLED,
    ask,
    ask_all,
    cached,
    hybrid,
    text,
    truth,
)
from tests.support.toy import (
    AlwaysDraft,
    HybridToy,
    ScriptedDrafter,
    check_idle,
    run_all,
    toy_engine,
    toy_request,
)
from tests.support.toy_recurrent import advanced


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_over_turns(drafter: str) -> None:
    """Each turn reuses the last one's prompt and answer, but for the token that was never computed."""
    engine, prompt, shared = hybrid(DRAFTERS[drafter]()), text(50, 1), 1
    accepted = drafted = 0
    for turn in range(3):
        request = ask(engine, prompt, LONG)
        assert cached(request) == shared - 1
        assert cached(ask(engine, prompt, LONG)) == len(prompt) - 1
        accepted += sum(request.timings.accepted.values())
        drafted += sum(request.timings.drafted.values())
        shared = len(prompt) + LONG.max_tokens
        prompt = (*prompt, *request.output_ids, *text(9, turn))
    assert (drafted > 0) == (drafter != "off")
    assert (accepted > 0) == (drafter not in ("off", "always wrong", "0 right"))


@pytest.mark.parametrize("drafter", ["off", "always right", "always wrong", "3 right", "random"])
def test_drafts_past_eos_and_past_the_limit(drafter: str) -> None:
    params = dataclasses.replace(GREEDY, ignore_eos=False, max_tokens=60)
    engine = hybrid(DRAFTERS[drafter]())
    ends = set()
    for index in range(12):
        request = ask(engine, text(30, index), params)
        ends.add(request.finish)
        nxt = ask(engine, (*request.tokens, *text(5, 900 + index)), params)
        assert cached(nxt) == len(request.tokens) - 1
    assert len(ends) == 2, "some were to end at EOS, some at the limit"


def shared_lengths(length: int) -> list[int]:
    block = (length - 1) // 16 * 16
    return sorted({length // 3, max(block - 1, 0), block, min(block + 1, length), length - 1, length})


@pytest.mark.parametrize("first", range(1, 301, 50))
def test_every_length_and_where_the_cache_ends(first: int) -> None:
    """The cache holds texts that end in, and others that go on after, the shared beginning."""
    drafting = [DRAFTERS[name]() for name in ("off", "random", "2 right")]
    engine = hybrid(chunk_rows=48)
    for length in range(first, first + 50):
        for at, shared in enumerate(shared_lengths(length)):
            prompt, params = text(length, length), GREEDY if length % 3 else SAMPLED
            engine.drafting = drafting[(length + at) % 3]
            ends = length % 2
            other = prompt[:shared] + (31,) * (1 if ends else 40)
            ask(engine, other)
            found = ask(engine, prompt, params)
            reach = min(shared, length - 1)
            assert cached(found) == reach if ends and shared < length else reach - INTERVAL < cached(found)
            assert cached(found) <= reach
            if not ends:  # the place where the texts part has been seen before
                third = ask(engine, (*prompt[:shared], 30, 29), params)
                assert cached(third) >= shared - 1
            assert cached(ask(engine, prompt, params)) == length - 1
            engine.scheduler.cache.clear()


@pytest.mark.parametrize("drafter", ["off", "lookup", "always wrong", "random", "5 right"])
def test_every_length_in_batches(drafter: str) -> None:
    engine, base, hits = hybrid(DRAFTERS[drafter](), chunk_rows=48, checkpoints=100), text(300, 8), 0
    ask(engine, base)
    for first in range(1, 301, 8):
        lengths = range(first, min(first + 8, 301), 2)
        prompts = [(*base[: length * 5 % 301], *text(300, length))[:length] for length in lengths]
        requests = ask_all(engine, prompts, SAMPLED if first % 3 else GREEDY)
        for length, request in zip(lengths, requests, strict=True):
            assert cached(request) > min(length - 1, length * 5 % 301) - INTERVAL
            hits += cached(request) > 0
    assert hits > 50


@pytest.mark.parametrize("drafter", ["off", "random"])
@pytest.mark.parametrize(
    ("blocks", "checkpoints", "sequences"), [(256, 64, 4), (36, 32, 4), (36, 2, 3), (24, 1, 4), (40, 0, 2)]
)
def test_batches_preemption_and_little_memory(
    blocks: int, checkpoints: int, sequences: int, drafter: str
) -> None:
    engine = hybrid(
        DRAFTERS[drafter](), blocks=blocks, checkpoints=checkpoints, sequences=sequences, chunk_rows=40
    )
    document, params = text(200, 3), dataclasses.replace(SAMPLED, max_tokens=60)
    for round_ in range(4):
        prompts = [document[: 50 * k] + text(20, 10 * (round_ // 2) + k) for k in range(5)]
        requests = ask_all(engine, prompts, params)
        if round_ % 2 and blocks == 256:
            assert [cached(request) for request in requests] == [len(prompt) - 1 for prompt in prompts]
    assert (engine.scheduler.preemptions > 0) == (blocks == 24)
    metrics = engine.metrics()
    assert (metrics.prefix_hits > 0) == (checkpoints > 0)
    assert metrics.checkpoints <= checkpoints
    assert (metrics.checkpoints_evicted > 0) == (0 < checkpoints < 64)


def test_a_preempted_request_goes_on_where_it_was() -> None:
    """Its rows to replay are applied before its state is kept."""
    drafter = AlwaysDraft(ScriptedDrafter({}, 4, 15))
    engine = hybrid(drafter, blocks=17, chunk_rows=40)
    params = dataclasses.replace(GREEDY, max_tokens=100)
    ask_all(engine, [text(60, seed) for seed in range(4)], params)
    assert engine.scheduler.preemptions > 0


def test_a_failed_step_spoils_the_states_of_its_sequences_only() -> None:
    engine, prompts = hybrid(AlwaysDraft(ScriptedDrafter({}, 2, 6)), chunk_rows=30), [
        text(length, length) for length in (20, 90, 150)
    ]  # fmt: skip
    model, runs = engine.runner, itertools.count()
    right = model.run

    def fails_at_times(plan):
        rows = right(plan)  # the slots have advanced by now
        if next(runs) in (1, 4, 9, 10):
            raise OSError("the device is gone")
        return rows

    model.run = fails_at_times
    requests = [toy_request(f"r{next(NAMES)}", prompt, LONG, 1000) for prompt in prompts]
    for request in requests:
        engine.drafting.drafter.truth[request.request_id] = truth(request.tokens, LONG)
        engine.add(request)
    failures = 0
    while engine.has_work:
        try:
            engine.step()
        except OSError:
            failures += 1
    check_idle(engine)
    assert failures == 4
    assert [request.output_ids for request in requests] == [truth(prompt, LONG) for prompt in prompts]


def test_a_failed_request_leaves_no_state() -> None:
    model = HybridToy(256)
    model.broken_at = 70
    engine = toy_engine(Drafting([]), model=model, blocks=256, cache=True, checkpoint_interval=INTERVAL)
    request = toy_request("r", text(69, 12), LONG, 1000)
    run_all(engine, [request])
    assert request.error is not None and engine.scheduler.cache.checkpoints.count == 1  # at 64


def test_a_fork_holds_the_drafted_rows_that_were_kept() -> None:
    prompt = text(30, 15)
    engine = hybrid(AlwaysDraft(ScriptedDrafter({"r": truth(prompt, LONG)}, 4, 8)))
    state = SequenceState(engine.scheduler.pool, engine.scheduler.slots)
    request = toy_request("r", prompt, LONG, 1000)
    engine.add(request, state)
    while not state.replay:
        engine.step()
    twin = state.fork(engine.runner.copy_block)
    expected = 0
    for token in request.tokens[: twin.committed]:
        expected = advanced(expected, token)
    assert engine.runner.recurrent.data[twin.slot].tolist() == [expected, state.committed]
    twin.release()
    while engine.has_work:
        engine.step()
    assert request.output_ids == truth(prompt, LONG)


def test_a_fork_has_a_state_of_its_own() -> None:
    engine, prompt = hybrid(), text(50, 13)
    state = SequenceState(engine.scheduler.pool, engine.scheduler.slots)
    engine.add(toy_request("first", prompt, GREEDY, 1000), state)
    while state.committed < 49:
        engine.step()
    twins = [state.fork(engine.runner.copy_block) for _ in range(2)]
    engine.abort("first")
    requests = [toy_request(f"twin {index}", prompt, GREEDY, 1000) for index in range(2)]
    for request, twin in zip(requests, twins, strict=True):
        engine.add(request, twin)
    while engine.has_work:
        engine.step()
    assert [request.output_ids for request in requests] == [truth(prompt)] * 2
    check_idle(engine)
