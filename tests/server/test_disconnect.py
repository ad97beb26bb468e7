"""A client that goes away aborts its request, streaming or not; others are not disturbed."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time

import httpx
import openai
import pytest

from tests.support.fake_engine import FakeEngine

USER = [{"role": "user", "content": "hi"}]
PATH = "/v1/chat/completions"


def wait_for(condition: object, what: str) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def slow(engine: FakeEngine) -> None:
    """Hundreds of steps of 20 ms: never over by itself within a test."""
    engine.reply, engine.tokens_per_step, engine.step_seconds = "x" * 400, 1, 0.02


def send(base_url: str, stream: bool, **fields: object) -> socket.socket:
    host, port = base_url.removeprefix("http://").split(":")
    body = json.dumps({"model": "fake", "messages": USER, "stream": stream, **fields}).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_disconnect_aborts(
    base_url: str, engine: FakeEngine, stream: bool, reset: bool, caplog: pytest.LogCaptureFixture
) -> None:
    slow(engine)
    caplog.set_level(logging.INFO, logger="quickdraft.requests")
    connection = send(base_url, stream)
    wait_for(lambda: engine.running, "the request never started")
    if stream:
        assert b"chat.completion.chunk" in connection.recv(65536)
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()
    wait_for(lambda: engine.aborted, "the request was not aborted")
    assert engine.running == set() and len(engine.aborted) == 1
    wait_for(lambda: "status=499" in caplog.text, "no log line")
    assert f"{engine.aborted[0]} status=499" in caplog.text and "finish=abort" in caplog.text


def test_client_closing_its_stream_aborts(client: openai.OpenAI, engine: FakeEngine) -> None:
    slow(engine)
    parts = client.chat.completions.create(model="fake", messages=USER, stream=True)
    next(iter(parts))
    parts.close()
    wait_for(lambda: engine.aborted, "the request was not aborted")


def test_neighbours_are_not_disturbed(base_url: str, engine: FakeEngine) -> None:
    engine.reply, engine.tokens_per_step, engine.step_seconds = "x" * 20, 1, 0.02
    gone = send(base_url, stream=True)
    wait_for(lambda: engine.running, "the request never started")
    answers: list[str] = []

    def ask() -> None:
        reply = httpx.post(
            base_url + PATH, json={"model": "fake", "messages": USER}, timeout=20, trust_env=False
        )
        answers.append(reply.json()["choices"][0]["message"]["content"])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    gone.close()
    for thread in threads:
        thread.join(10)
    assert answers == ["x" * 20] * 3 and len(engine.aborted) == 1


def test_the_loop_answers_while_a_long_prompt_is_tokenized(base_url: str, engine: FakeEngine) -> None:
    """Health checks made during the work on a 4 MB prompt are answered before that work ends."""
    engine.max_context_tokens = 1_000_000  # one that so many bytes could fit, so that they are tokenized

    async def run() -> int:
        async with httpx.AsyncClient(base_url=base_url, timeout=20, trust_env=False) as client:
            body = {"model": "fake", "messages": [{"role": "user", "content": "word " * 800_000}]}
            long = asyncio.create_task(client.post(PATH, json=body))
            answered = 0
            while not long.done():
                assert (await client.get("/health")).status_code == 200
                answered += 1
            assert (await long).status_code == 400
            return answered

    assert asyncio.run(run()) >= 5
