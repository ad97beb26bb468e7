"""Clients that take too much: slow, silent, too many, too big, unread. Limits are small here."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from quickdraft.server.limits import Limits
from quickdraft.server.protocol import GuardedProtocol
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import complete_app, live_server

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
LIMITS = Limits(
    connections=4, header_bytes=4096, headers=20, header_seconds=0.4, body_seconds=0.6, write_seconds=0.6,
    keep_alive_seconds=0.5, ping_seconds=0.05,
)  # fmt: skip


BUSY_BYTES = 200_000


@contextmanager
def served(engine: FakeEngine, **changes: Any) -> Iterator[str]:
    limits = replace(LIMITS, **changes)
    with live_server(complete_app(engine, limits=limits), limits) as url:
        yield url


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def head(length: int, path: str = CHAT, more: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{more}"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "fake", "messages": USER, **fields}).encode()


def read_to_end(connection: socket.socket) -> bytes:
    """Everything until the server closes; fails after the socket's timeout."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def error_in(raw: bytes, status: int) -> dict[str, Any]:
    top, _, body = raw.partition(b"\r\n\r\n")
    assert top.startswith(f"HTTP/1.1 {status} ".encode()), raw[:200]
    return dict(json.loads(body)["error"])


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1", head(5)[:60], b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 2 + b"GE"]
)
@pytest.mark.parametrize("dribble", [False, True])
def test_headers_that_do_not_come(sent: bytes, dribble: bool) -> None:
    """Silence or a byte now and then: 408 and the end, whatever was asked before on this connection."""
    with served(FakeEngine()) as url, connect(url) as connection:
        connection.sendall(sent)
        stop = threading.Event()

        def trickle() -> None:
            while dribble and not stop.wait(0.05):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        raw = read_to_end(connection)
        stop.set()
        thread.join()
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
    if sent.startswith(b"GET"):
        assert raw.count(b"HTTP/1.1 200") == 2
    elif not dribble:
        assert error_in(raw, 408)["code"] == "header_timeout"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/nothing", "/health"])
@pytest.mark.parametrize("dribble", [False, True])
def test_bodies_that_do_not_come(path: str, dribble: bool) -> None:
    with served(FakeEngine()) as url, connect(url) as connection:
        connection.sendall(head(10_000, path) + b'{"model": ')
        stop = threading.Event()

        def trickle() -> None:
            while dribble and not stop.wait(0.05):
                try:
                    connection.sendall(b" ")
                except OSError:
                    return

        thread = threading.Thread(target=trickle)
        thread.start()
        raw = read_to_end(connection)
        stop.set()
        thread.join()
    if path in (CHAT, "/v1/completions", "/tokenize"):
        assert error_in(raw, 408)["code"] == "body_timeout"
    else:
        assert raw.startswith((b"HTTP/1.1 404", b"HTTP/1.1 405"))


def test_a_client_that_does_not_read_its_stream() -> None:
    """Its request is aborted long before its last token, and what was written is bounded."""
    engine = FakeEngine(
        reply="x" * 100_000, max_context_tokens=200_000, tokens_per_step=50, step_seconds=0.001
    )
    with served(engine) as url:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        body = chat(stream=True, logprobs=True, top_logprobs=20)
        connection.sendall(head(len(body)) + body)
        wait_for(lambda: engine.aborted, "the request was not aborted")
        assert engine.running == set()
        connection.close()


def test_a_client_that_does_not_read_its_whole_answer() -> None:
    """The connection is given up, so that it does not count for ever."""
    engine = FakeEngine(reply="x" * 20_000, max_context_tokens=200_000, tokens_per_step=1000)
    with served(engine, connections=1) as url:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = url.removeprefix("http://").split(":")
        connection.connect((host, int(port)))
        body = chat(logprobs=True, top_logprobs=20)
        connection.sendall(head(len(body)) + body)
        wait_for(lambda: engine.requests and not engine.running, "it never ran")

        def serves_others() -> bool:
            with connect(url) as other:
                other.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                return read_to_end(other).startswith(b"HTTP/1.1 200")

        wait_for(serves_others, "the connection still counts")
        connection.close()


def test_connections_are_counted() -> None:
    with served(FakeEngine(), header_seconds=5) as url:
        others = [connect(url) for _ in range(4)]
        time.sleep(0.05)
        with connect(url) as late:
            assert error_in(read_to_end(late), 503)["code"] == "too_many_connections"
        for other in others:
            other.close()
        wait_for(lambda: httpx.get(f"{url}/health", trust_env=False).status_code == 200, "still full")


def test_small_writes_leave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events must not wait for acknowledgements (TCP_NODELAY), whatever socket the server was given."""
    options: list[int] = []
    made = GuardedProtocol.connection_made

    def spy(self: GuardedProtocol, transport: asyncio.Transport) -> None:
        made(self, transport)
        raw = transport.get_extra_info("socket")
        options.append(raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(GuardedProtocol, "connection_made", spy)
    with served(FakeEngine()) as url:
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
    assert options and all(options)


def test_idle_connections_end() -> None:
    with served(FakeEngine()) as url, connect(url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "lines",
    [["X-Big: " + "x" * 8000], ["X: y"] * 30, ["X-Huge: " + "x" * (1 << 20)]],
    ids=["big", "many", "huge"],
)
def test_headers_too_large(lines: list[str]) -> None:
    with served(FakeEngine()) as url, connect(url) as connection:
        request = "\r\n".join(["GET /v1/models HTTP/1.1", "Host: x", *lines, "", ""]).encode()
        with suppress(OSError):  # it may be refused before all of it was sent
            connection.sendall(request)
        raw = read_to_end(connection)
        assert raw.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400")) or len(request) > 100_000
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200


def test_a_pipelining_client_that_leaves_is_noticed() -> None:
    engine = FakeEngine(reply="x" * 400, tokens_per_step=1, step_seconds=0.02)
    with served(engine, ping_seconds=60) as url:
        connection = connect(url)
        body = chat()
        connection.sendall((head(len(body)) + body) * 3)
        wait_for(lambda: engine.running, "it never ran")
        connection.close()
        wait_for(lambda: engine.aborted, "the request runs on")
        assert len(engine.requests) == 1


def test_pipelined_requests_are_answered_in_order() -> None:
    with served(FakeEngine()) as url, connect(url) as connection:
        bodies = [chat(max_tokens=n) for n in (1, 2, 3)]
        connection.sendall(b"".join(head(len(body)) + body for body in bodies))
        raw = read_to_end(connection)
    assert raw.count(b"HTTP/1.1 200") == 3
    counts = [raw.index(f'"completion_tokens":{n},"total'.encode()) for n in (1, 2, 3)]
    assert counts == sorted(counts)


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue(stream: bool) -> None:
    engine = FakeEngine(reply="x" * 400, tokens_per_step=1, step_seconds=0.02, capacity=1)
    with served(engine) as url:
        first = connect(url)
        body = chat(stream=True)
        first.sendall(head(len(body)) + body)
        wait_for(lambda: engine.running, "it never ran")
        for path, what in ((CHAT, {"messages": USER}), ("/v1/completions", {"prompt": [[5], [6]]})):
            reply = httpx.post(url + path, json={"model": "fake", "stream": stream, **what}, trust_env=False)
            assert reply.status_code == 429 and int(reply.headers["retry-after"]) > 0
            error = reply.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        first.close()
        wait_for(lambda: engine.aborted, "it runs on")
        engine.reply = "hello"
        assert httpx.post(url + CHAT, content=body, headers={"Content-Type": "application/json"}).is_success


def test_the_request_timeout_whole_and_streamed() -> None:
    engine = FakeEngine(reply="x" * 400, tokens_per_step=1, step_seconds=0.02)
    with served(engine, request_seconds=0.5) as url:
        reply = httpx.post(url + CHAT, json={"model": "fake", "messages": USER}, trust_env=False)
        error = reply.json()["error"]
        assert reply.status_code == 504 and error["code"] == "request_timeout"
        assert (
            "longer than 0.5 s" in error["message"]
            and "tokens of the answer were computed" in error["message"]
        )
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(model="fake", messages=USER, stream=True)  # type: ignore[call-overload]
            with pytest.raises(openai.APIError, match=r"longer than 0\.5 s"):
                list(stream)
        assert engine.running == set() and len(engine.aborted) == 2


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_pings_while_nothing_comes(path: str) -> None:
    """A comment at least every interval from the first moment on, and none among quick tokens."""
    engine = FakeEngine(step_seconds=0.4, tokens_per_step=100)
    what = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    body = {"model": "fake", "stream": True, **what}
    with served(engine) as url:
        raw = httpx.post(url + path, json=body, trust_env=False).text
        events = raw.split("\n\n")
        first = next(i for i, event in enumerate(events) if "hello" in event)
        assert events[:first].count(": ping") >= 3 and events[-2:] == ["data: [DONE]", ""]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            chunks = client.chat.completions.create(model="fake", messages=USER, stream=True)  # type: ignore[call-overload]
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == engine.reply
    with served(FakeEngine(), ping_seconds=5) as url:
        assert ": ping" not in httpx.post(url + path, json=body, trust_env=False).text


def test_bodies_are_limited_together() -> None:
    """Half-sent bodies do not fill memory; when they are gone there is room again."""
    with served(FakeEngine(), all_bodies_bytes=BUSY_BYTES, connections=20, body_seconds=20) as url:
        held = [connect(url) for _ in range(2)]
        for one in held:
            one.sendall(head(BUSY_BYTES) + b" " * (BUSY_BYTES // 3))
        body = chat(user="x" * (BUSY_BYTES // 2))

        def status() -> int:
            headers = {"Content-Type": "application/json"}
            reply = httpx.post(url + CHAT, content=body, headers=headers, trust_env=False)
            if reply.status_code == 429:
                assert reply.json()["error"]["code"] == "too_much_at_once"
                assert int(reply.headers["retry-after"]) > 0
            return reply.status_code

        wait_for(lambda: status() == 429, "nothing is held")
        for one in held:
            one.close()
        wait_for(lambda: status() == 200, "nothing was released")
        assert all(status() == 200 for _ in range(5))


def test_a_body_of_too_many_values() -> None:
    with served(FakeEngine(), body_seconds=20) as url:
        body = b'{"model": "fake", "prompt": [' + b"1," * (1 << 21) + b"1]}"
        headers = {"Content-Type": "application/json"}
        reply = httpx.post(
            f"{url}/v1/completions", content=body, headers=headers, trust_env=False, timeout=30
        )
        assert reply.status_code == 400 and "more than 2097152 values" in reply.json()["error"]["message"]
