"""Conversations over the HybridToy: what the next turn, an edit, another chat and a restart reuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hybrid_toy import (
    DRAFTERS,
    GREEDY,
    INTERVAL,
    LONG,
    ask,
    cached,
    hybrid,
    text,
)


@pytest.mark.parametrize("drafter", ["off", "always right", "random", "5 right"])
def test_a_text_that_parts_within_an_answer(drafter: str) -> None:
    engine, prompt = hybrid(DRAFTERS[drafter]()), text(30, 14)
    answered = ask(engine, prompt, LONG).tokens
    for at in (170, 140, 129, 127, 100, 70, 64, 60):
        assert at - INTERVAL < cached(ask(engine, (*answered[:at], 31, 30))) <= at


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


def test_where_a_text_on_disk_parts_is_remembered(tmp_path: Path) -> None:
    """The KV beyond the last state is not read back, and still says how far two texts agree."""
    engine, base = hybrid(disk=(tmp_path, 1 << 20)), text(300, 16)
    ask(engine, base)
    while engine.idle():
        pass
    engine.scheduler.cache.disk.close()
    engine = hybrid(disk=(tmp_path, 1 << 20))
    second = ask(engine, (*base[:230], 31, 30))
    assert (cached(second), second.cache.shared_tokens, second.cache.reason) == (192, 230, "no_checkpoint")
    assert cached(ask(engine, (*base[:230], 30, 29))) == 230
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


@pytest.mark.parametrize(("budget", "reached"), [(5000, 512), (7000, 699)])
def test_a_folder_too_small_for_a_text_keeps_its_last_states(
    tmp_path: Path, budget: int, reached: int
) -> None:
    """An earlier state pushes out neither the KV behind it nor a later state, nor is written in turns."""
    engine, prompt, written = hybrid(disk=(tmp_path, budget)), text(700, 9), set()
    for _ in range(3):
        ask(engine, prompt)
        while engine.idle():
            pass
        written.add(engine.metrics().disk["written_bytes"])
    assert len(written) == 1
    engine.scheduler.cache.disk.close()
    engine = hybrid(disk=(tmp_path, budget))
    assert cached(ask(engine, prompt)) == reached
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
