"""Recurrent state over the HybridToy: cached == cold whatever is shared, drafted, evicted or lost.

Each toy logit depends on the paged memory and on the hash in the sequence's slot, so any stale
checkpoint, wrong rollback or missing replay changes the ids. `ask` compares every answer with plain
decoding without a cache, and `run_all` checks that no block or slot leaks and that every checkpoint
holds the state of its tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from quickdraft.engine.drafters import Drafting
from quickdraft.engine.loop import Engine
from quickdraft.engine.request import Request
from quickdraft.speculate.lookup import LookupDrafter
from quickdraft.state.sequence import SequenceState
from quickdraft.types import SamplingParams
from tests.support.toy import (
    VOCABULARY,
    AlwaysDraft,
    HybridToy,
    RandomDrafter,
    ScriptedDrafter,
    check_idle,
    run_all,
    toy_engine,
    toy_request,
)
from tests.support.toy_recurrent import advanced

INTERVAL = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.9, top_p=0.9, seed=5)
LONG = dataclasses.replace(GREEDY, max_tokens=150)
NAMES = itertools.count()
TRUTHS: dict[str, list[int]] = {}


def text(length: int, seed: int) -> tuple[int, ...]:
    """Random tokens of few kinds, so that lookup drafts; never the last four of the vocabulary."""
    source = random.Random(seed)
    alphabet = [source.randrange(1, VOCABULARY - 4) for _ in range(4)]
    return tuple(source.choice(alphabet) for _ in range(length))


def truth(prompt: Sequence[int], params: SamplingParams = GREEDY) -> list[int]:
    key = f"{tuple(prompt)} {params}"
    if key not in TRUTHS:
        engine = toy_engine(Drafting([]), model=HybridToy(64), chunk_rows=1000)
        TRUTHS[key] = run_all(engine, [toy_request("plain", prompt, params, 1000)])["plain"]
    return TRUTHS[key]


def hybrid(
    drafting: Drafting | None = None, *, blocks: int = 256, checkpoints: int = 32, sequences: int = 4, **more
) -> Engine:
    model = HybridToy(blocks, sequences, checkpoints)
    return toy_engine(
        drafting or Drafting([]), model=model, blocks=blocks, max_sequences=sequences,
        cache=True, checkpoint_interval=INTERVAL, **more,
    )  # fmt: skip


def ask_all(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams = GREEDY,
    marks: Sequence[int] = (),
) -> list[Request]:
    """Answer prompts in one batch; the ids are those of plain decoding."""
    requests = [toy_request(f"r{next(NAMES)}", prompt, params, 1000, marks=marks) for prompt in prompts]
    drafter = getattr(engine.drafting, "drafter", None)
    for request in requests if drafter is not None else ():
        drafter.truth[request.request_id] = truth(request.tokens, params)
    run_all(engine, requests)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_ids == truth(prompt, params)
    return requests


def ask(engine: Engine, prompt: Sequence[int], params: SamplingParams = GREEDY, marks=()) -> Request:
    return ask_all(engine, [prompt], params, marks)[0]


def cached(request: Request) -> int:
    return request.timings.cached_tokens


DRAFTERS = {
    "off": lambda: Drafting([]),
    "lookup": lambda: Drafting([LookupDrafter()]),
    "always right": lambda: AlwaysDraft(ScriptedDrafter({}, 63, 63)),
    "always wrong": lambda: AlwaysDraft(ScriptedDrafter({}, 0, 15)),
    "random": lambda: AlwaysDraft(RandomDrafter({}, 0, 0, seed=4)),
} | {f"{k} right": lambda k=k: AlwaysDraft(ScriptedDrafter({}, k, 15)) for k in range(16)}


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


@pytest.mark.parametrize("drafter", ["off", "always right", "random", "5 right"])
def test_a_text_that_parts_within_an_answer(drafter: str) -> None:
    engine, prompt = hybrid(DRAFTERS[drafter]()), text(30, 14)
    answered = ask(engine, prompt, LONG).tokens
    for at in (170, 140, 129, 127, 100, 70, 64, 60):
        assert at - INTERVAL < cached(ask(engine, (*answered[:at], 31, 30))) <= at


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
    read = [entry for plan in engine.runner.plans for entry in plan.entries if not entry.wanted]
    assert any(entry.start > 60 for entry in read) or engine.metrics().checkpoints_evicted > 0


def test_a_b_a_b_with_a_short_third_between() -> None:
    engine = hybrid(blocks=400, checkpoints=64)
    texts, gained = {"a": text(300, 2), "b": text(280, 3)}, []
    for turn in range(4):
        for name in texts:
            prompt = texts[name] = texts[name] + text(7, 10 * turn + ord(name))
            gained.append(cached(ask(engine, prompt)) - len(prompt) + 7)
            ask(engine, text(12, 1000 + turn))
    assert max(gained[:2]) < -200
    # from the answer before: what was asked, but for its last token
    assert gained[2:] == [-1] * 6


def test_short_requests_leave_a_long_conversation_and_the_newest_is_kept() -> None:
    engine, long = hybrid(checkpoints=6), text(300, 2)
    ask(engine, long)
    for index in range(20):
        newest = ask(engine, text(20, 100 + index))
        assert cached(ask(engine, (*newest.tokens, 31))) == 24
    assert cached(ask(engine, (*long, 31))) >= 256
    for index in range(40):
        newest = ask(engine, text(400, 200 + index))
        assert cached(ask(engine, (*newest.tokens, 31))) == 404
    assert cached(ask(engine, (*long, 31))) == 0, "a conversation long dead stayed for ever"


def test_an_edit_in_the_middle() -> None:
    engine, chat = hybrid(checkpoints=100), text(290, 4)
    ask(engine, chat)
    for at in (1, 15, 16, 17, 100, 200, 288):
        edited = [(*chat[:at], 31, *chat[at + 1 :]), (*chat[:at], 30, *chat[at + 1 :])]
        first = ask(engine, edited[0])
        assert at - INTERVAL < cached(first) <= at
        if cached(first) < at:
            assert first.cache.reason == "no_checkpoint"
            assert first.cache.token == first.cache.cached_token == chat[cached(first)]
        again = ask(engine, edited[1])
        assert cached(again) == at and again.cache.reason == "differs"
        assert (again.cache.token, again.cache.cached_token) in ((30, chat[at]), (30, 31))
    assert cached(ask(engine, chat)) == 289


def test_a_think_block_stripped_from_history() -> None:
    """The generation prompt opens a think block that later turns do not show: a mark lies before it."""
    engine, history, opening, rest = hybrid(), text(90, 6), (27, 28), 0
    for turn in range(4):
        prompt = (*history, *opening)
        request = ask(engine, prompt, LONG, marks=[len(history)])
        assert cached(request) == rest, "the state before the think block was to be found"
        rest = len(history)
        history = (*history, *request.output_ids[100:], *text(12, 50 + turn))


def test_what_is_cached_is_explained() -> None:
    engine, base = hybrid(), text(100, 7)
    assert ask(engine, base).cache.reason == "empty"
    report = ask(engine, base).cache
    assert (report.cached_tokens, report.reason, report.token) == (99, "none", None)
    report = ask(engine, (*base[:80], 31, 30)).cache
    assert (report.cached_tokens, report.shared_tokens, report.reason) == (64, 80, "no_checkpoint")


@pytest.mark.parametrize("drafter", ["off", "random"])
@pytest.mark.parametrize("budget", [1 << 20, 6000])
def test_after_a_restart(tmp_path: Path, drafter: str, budget: int) -> None:
    lengths = range(2, 301, 13)
    prompts = [(1 + length % 30, length % 31, *text(length, length)) for length in lengths]
    engine = hybrid(disk=(tmp_path, budget))
    for prompt in prompts:
        ask(engine, prompt)
        while engine.idle():
            pass
    written = engine.metrics().disk
    engine.scheduler.cache.disk.close()
    engine = hybrid(DRAFTERS[drafter](), disk=(tmp_path, budget), blocks=64, checkpoints=8)
    hits = []
    for prompt in prompts:
        found = ask(engine, prompt)
        hits.append(cached(found) == len(prompt) - 1)
        assert found.cache.restored_tokens == cached(found)
        nxt = ask(engine, (*prompt, *found.output_ids, 7, 8))
        assert cached(nxt) == len(prompt) + GREEDY.max_tokens - 1
    counters = engine.metrics().disk
    assert counters["rejected_files"] == 0 and counters["bytes_on_disk"] <= budget
    assert counters["restored_states"] >= sum(hits)
    assert all(hits) if budget > 6000 else sum(hits) < len(hits) and written["evicted_segments"] > 0
    engine.scheduler.cache.disk.close()


def test_the_same_again_writes_nothing(tmp_path: Path) -> None:
    engine, written = hybrid(disk=(tmp_path, 1 << 20)), []
    for _ in range(4):
        ask(engine, text(200, 9))
        while engine.idle():
            pass
        counters = engine.metrics().disk
        written.append((counters["written_bytes"], counters["states"]))
    # every 64 tokens, the end of the prompt and of the answer
    assert written[0][1] == 5 and set(written) == {written[0]}
    engine.scheduler.cache.disk.close()


@pytest.mark.parametrize("damage", ["flip the state", "flip the header", "cut", "empty", "gone", "no blocks"])
def test_damaged_states_are_misses(tmp_path: Path, damage: str) -> None:
    prompt = text(150, 11)
    engine = hybrid(disk=(tmp_path, 1 << 20))
    ask(engine, prompt)
    while engine.idle():
        pass
    engine.scheduler.cache.disk.close()
    for file in list(tmp_path.glob("*/*.kv" if damage == "no blocks" else "*/*.state")):
        data = bytearray(file.read_bytes())
        data[{"flip the state": -3, "flip the header": 30}.get(damage, 0)] ^= 16
        file.write_bytes(data[: {"cut": len(data) // 2, "empty": 0}.get(damage, len(data))])
        if damage == "gone":
            file.unlink()
    engine = hybrid(disk=(tmp_path, 1 << 20))
    assert cached(ask(engine, prompt)) == 0
    rejected = engine.metrics().disk["rejected_files"]
    assert (rejected == 0) == (damage == "gone")
    assert cached(ask(engine, prompt)) == 149
    while engine.idle():
        pass
    assert engine.metrics().disk["states"] == 4
    engine.scheduler.cache.disk.close()


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
