"""`return_progress` and /load over a tiny model: counts that are exact, and nothing for who does not ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quickdraft.engine.async_engine import AsyncEngine
from quickdraft.engine.opened import EngineConfig, open_model
from tests.server.test_errors import error_of
from tests.support.live_server import complete_app, live_server
from tests.support.tiny import write_tiny_llama

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CHUNK = 32


@pytest.fixture
def real(tmp_path: Path) -> Iterator[httpx.Client]:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    config = EngineConfig(threads=1, kv_memory_bytes=1 << 20, chunk_rows=CHUNK)
    engine = AsyncEngine(open_model(path, config))
    with (
        live_server(complete_app(engine)) as url,
        httpx.Client(base_url=url, timeout=20, trust_env=False) as client,
    ):
        yield client
    engine.shutdown()


def chunks(client: httpx.Client, path: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "stream": True, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def told(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["prompt_progress"] for chunk in found if "prompt_progress" in chunk]


def test_progress_of_a_prompt_cold_and_cached(real: httpx.Client) -> None:
    """One chunk per step, the last before the first token; asked again, the cached tokens count."""
    prompt = [token % 50 + 5 for token in range(100)]
    asking = {"prompt": prompt, "return_progress": True}
    found = chunks(real, TEXT, **asking)
    progress = told(found)
    # 99 tokens are read in chunks; the last one is the first row of the first verify step
    assert [one["processed"] for one in progress] == [32, 64, 96, 99, 100]
    assert {(one["total"], one["cache"]) for one in progress} == {(100, 0)}
    times = [one["time_ms"] for one in progress]
    assert times == sorted(times) and times[0] > 0
    assert times[-1] == pytest.approx(found[-1]["timings"]["prompt_ms"], abs=1e-3)
    texts = [chunk["choices"][0]["text"] for chunk in found]
    first_text = next(index for index, text in enumerate(texts) if text)
    assert all("prompt_progress" not in chunk for chunk in found[first_text:])
    plain = chunks(real, TEXT, prompt=prompt)
    assert (
        not told(plain)
        and texts[-1] == ""
        and "".join(texts) == "".join(chunk["choices"][0]["text"] for chunk in plain)
    )
    # read again: all but the last token is there
    (again,) = told(chunks(real, TEXT, **asking))
    assert (again["total"], again["cache"], again["processed"], again["time_ms"]) == (100, 99, 100, 0)


def test_progress_of_chats_and_of_several_prompts(real: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hello one two three " * 4}]
    found = chunks(real, CHAT, messages=messages, return_progress=True)
    progress = told(found)
    assert progress[-1]["processed"] == progress[-1]["total"] == found[-1]["timings"]["prompt_tokens"]
    assert all(
        chunk["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}]
        for chunk in found if "prompt_progress" in chunk
    )  # fmt: skip
    several = chunks(real, TEXT, prompt=[[5] * 40, [6] * 3], return_progress=True)
    last = {
        chunk["choices"][0]["index"]: chunk["prompt_progress"]
        for chunk in several if "prompt_progress" in chunk
    }  # fmt: skip
    assert {index: (one["processed"], one["total"]) for index, one in last.items()} == {
        0: (40, 40),
        1: (3, 3),
    }


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_progress_needs_a_stream(real: httpx.Client, path: str) -> None:
    what = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    reply = real.post(path, json={"model": "tiny", **what, "return_progress": True})
    assert error_of(reply, 400)["param"] == "return_progress"


def test_load_counts_tokens(real: httpx.Client) -> None:
    before = real.get("/load").json()
    total = before["kv_cache"]["total_tokens"]
    assert total > 0 and total % 16 == 0
    empty = {"total_tokens": total, "used_tokens": 0, "cached_tokens": 0, "free_tokens": total}
    assert before == {"server_load": 0, "running": 0, "waiting": 0, "kv_cache": empty}
    chunks(real, TEXT, prompt=[5] * 40)  # 45 tokens are computed of 46: three blocks
    after = real.get("/load").json()["kv_cache"]
    assert after == {**empty, "cached_tokens": 48, "free_tokens": total - 48}
    assert real.post("/load", json={}).status_code == 405
