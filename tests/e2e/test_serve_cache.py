"""The prefix cache as a user meets it: usage says what was cached, in streams too, and a restart keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.model import default_model_path
from tests.support.server_process import server_process

pytestmark = pytest.mark.model
MODEL = "smollm2-135m"
TEXT = "The tide gauge at the harbour was read every morning, and the numbers were kept in a book. " * 12
START = [{"role": "user", "content": TEXT + "What was read every morning?"}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 24, "extra_body": {"speculation": "lookup@16"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    default_model_path()
    return tmp_path_factory.mktemp("cache") / "kv"


@pytest.fixture(scope="module")
def first(folder: Path) -> Iterator[dict]:
    """What a server said before it was told to stop."""
    said: dict = {}
    with server_process("--kv-memory", "128MiB", "--cache-dir", str(folder)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        said["cold"] = client.chat.completions.create(messages=START, **GREEDY)
        said["again"] = client.chat.completions.create(messages=START, **GREEDY)
        said["stream"] = list(
            client.chat.completions.create(
                messages=START, stream=True, stream_options={"include_usage": True}, **GREEDY
            )
        )
        answer = {"role": "assistant", "content": said["cold"].choices[0].message.content}
        turn = [*START, answer, {"role": "user", "content": "And where were the numbers kept?"}]
        said["turn"] = client.chat.completions.create(messages=turn, **GREEDY)
        said["edited"] = client.chat.completions.create(
            messages=[
                {"role": "user", "content": START[0]["content"].replace("every morning?", "at night?")}
            ],
            **GREEDY,
        )
        said["metrics"] = httpx.get(f"{server.url}/metrics").text
    yield said


def cached(answer) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def test_the_same_again_and_streamed(first: dict) -> None:
    prompt = first["cold"].usage.prompt_tokens
    assert cached(first["cold"]) == 0 and cached(first["again"]) == prompt - 1
    assert first["stream"][-1].usage.prompt_tokens_details.cached_tokens == prompt - 1
    text = first["cold"].choices[0].message.content
    assert first["again"].choices[0].message.content == text
    streamed = "".join(c.choices[0].delta.content or "" for c in first["stream"] if c.choices)
    assert streamed == text
    assert first["again"].model_extra["prefix_cache"]["reason"] == "none"


def test_the_next_turn_and_an_edit(first: dict) -> None:
    before = first["cold"].usage
    shared = before.prompt_tokens + before.completion_tokens
    assert shared - 2 <= cached(first["turn"]) <= shared  # the answer is tokenized again
    edited = first["edited"]
    assert before.prompt_tokens - 20 < cached(edited) < before.prompt_tokens
    report = edited.model_extra["prefix_cache"]
    assert report["reason"] == "differs" and report["position"] == cached(edited)
    assert report["token"] != report["cached_token"]


def test_metrics_count_queries_and_hits(first: dict) -> None:
    answers = [first[name] for name in ("cold", "again", "turn", "edited")]
    queries = sum(answer.usage.prompt_tokens for answer in answers) + first["stream"][-1].usage.prompt_tokens
    hits = sum(map(cached, answers)) + cached(first["stream"][-1])
    lines = [line for line in first["metrics"].splitlines() if not line.startswith("#")]
    found = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}
    assert found["vllm:prefix_cache_queries_total"] == queries
    assert found["vllm:prefix_cache_hits_total"] == hits


def test_a_restart_keeps_it(first: dict, folder: Path) -> None:
    with server_process("--kv-memory", "128MiB", "--cache-dir", str(folder)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        found = client.chat.completions.create(messages=START, **GREEDY)
    assert cached(found) == first["cold"].usage.prompt_tokens - 1
    assert found.model_extra["prefix_cache"]["restored_tokens"] == cached(found)
    assert found.choices[0].message.content == first["cold"].choices[0].message.content
