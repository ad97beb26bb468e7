"""API keys: nothing but GET and HEAD of /health, /version and the page's files passes without one."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Message, Receive, Scope, Send

from quickdraft.server.app import create_app
from quickdraft.server.auth import KeyCheck
from quickdraft.server.page.files import PAGE_FILES
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import complete_app, live_server

KEYS = ("key-of-anna", "key-of-bert")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
OPEN = {(method, path) for method in ("GET", "HEAD") for path in ("/health", "/version", *PAGE_FILES)}
WRONG: list[dict[str, str]] = [
    {},
    {"Authorization": "Bearer key-of-cleo"},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer key-of-anna key-of-anna"},
    {"Authorization": "Basic key-of-anna"},
    {"Authorization": "key-of-anna"},
    {"x-api-key": ""},
    {"x-api-key": "key-of-ann"},
    {"x-api-key": "key-of-anna, key-of-bert"},
    {"Cookie": "x-api-key=key-of-anna"},
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live_server(complete_app(FakeEngine(), keys=KEYS)) as url:
        yield url


def every_path() -> list[str]:
    """Every route there is, filled in, with what tends to be forgotten around it."""
    routes = [route.path.replace("{name:path}", "fake") for route in create_app(FakeEngine()).routes]
    assert {"/v1/chat/completions", "/metrics", "/tokenize", "/v1/models/fake"} <= set(routes)
    known = [*routes, "/health", "/version"]
    around = [f"{path}{end}" for path in known for end in ("/", "//", "/..", ";a", "%2f", "%00", "/x")]
    others = ["/", "//health", "/HEALTH", "/v1", "/docs", "/openapi.json", "/invocations", "/nothing", "/ü"]
    return [*known, *around, *others, "/health/../metrics", "/version/..%2fmetrics"]


def assert_refused(reply: httpx.Response) -> None:
    assert reply.status_code == 401, (reply.request, reply.text)
    assert reply.headers["www-authenticate"] == "Bearer"
    if reply.request.method != "HEAD":
        error = reply.json()["error"]
        if set(reply.json()) == {"type", "error"}:  # Anthropic's
            assert error["type"] == "authentication_error" and "/v1/messages" in reply.request.url.path
        else:
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "key-of" not in reply.text


def test_every_route_and_method_is_closed(url: str) -> None:
    with httpx.Client(base_url=url, trust_env=False) as client:
        for path in every_path():
            for method in METHODS:
                if (method, path) in OPEN:
                    continue
                for headers in WRONG[:2]:
                    request = client.build_request(method, url + path, headers=headers)
                    assert_refused(client.send(request))


@pytest.mark.parametrize("headers", WRONG, ids=str)
def test_wrong_keys(url: str, headers: dict[str, str]) -> None:
    assert_refused(httpx.get(f"{url}/v1/models", headers=headers, trust_env=False))
    assert_refused(httpx.post(f"{url}/health", headers=headers, trust_env=False))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("header", ["Authorization", "authorization", "x-api-key", "X-API-Key"])
def test_right_keys(url: str, key: str, header: str) -> None:
    for value in (f"Bearer {key}", f"bearer  {key}") if header.lower() == "authorization" else (key,):
        assert httpx.get(f"{url}/metrics", headers={header: value}, trust_env=False).status_code == 200
    reply = httpx.get(f"{url}/nothing", headers={header: f"Bearer {key}", "x-api-key": key}, trust_env=False)
    assert reply.status_code == 404


def test_the_official_client(url: str) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[0], max_retries=0) as client:
        assert client.chat.completions.create(model="fake", messages=messages).choices
    stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError) as caught:
        stranger.chat.completions.create(model="fake", messages=messages)
    assert caught.value.code == "invalid_api_key"


def test_open_paths(url: str) -> None:
    for method, path in sorted(OPEN):
        assert httpx.request(method, url + path, trust_env=False).status_code == 200


def test_bytes_that_are_no_text_are_just_wrong(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    for value in (b"Bearer \xff\xfe\xfd", b"Bearer " + b"k" * 5000):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: " + value + b"\r\n\r\n")
            assert b" 401 " in connection.recv(65536).split(b"\r\n")[0]


def test_websockets_and_lifespan() -> None:
    """At the ASGI level: no scope type passes but the server's own."""
    reached: list[str] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["type"])

    def ask(scope: dict[str, Any]) -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "websocket.connect"}

        asyncio.run(KeyCheck(inner, KEYS)(scope, receive, send))
        return sent

    for path in ("/health", "/v1/chat/completions"):
        assert ask({"type": "websocket", "path": path, "headers": []})[0]["type"] == "websocket.close"
    assert ask({"type": "surprise", "path": "/health", "headers": []})[0]["type"] == "websocket.close"
    assert reached == []
    ask({"type": "lifespan"})
    assert reached == ["lifespan"]


def test_a_websocket_upgrade_is_refused(url: str) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    upgrade["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    assert_refused(httpx.get(f"{url}/v1/realtime", headers=upgrade, trust_env=False))
    assert httpx.get(f"{url}/health", headers=upgrade, trust_env=False).status_code == 200


def test_keys_are_not_logged(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
        for key in (*KEYS, "wrong-key-of-eve"):
            httpx.post(f"{url}/v1/chat/completions", json=body, headers={"x-api-key": key}, trust_env=False)
    ours = [
        record.getMessage() for record in caplog.records if record.name.startswith(("quickdraft", "uvicorn"))
    ]
    assert len(ours) == 2 and "key-of" not in "".join(ours)
