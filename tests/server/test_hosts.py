"""Without keys only an address or localhost in the Host header is answered: a web page cannot own one."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from quickdraft.server.app import create_app
from quickdraft.server.front import Front
from quickdraft.server.hosts import HostCheck
from quickdraft.server.limits import Limits
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import live_server


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    front, engine = Front(Limits()), FakeEngine()
    front.open(create_app(engine), engine)
    with (
        live_server(HostCheck(front)) as url,
        httpx.Client(base_url=url, timeout=20, trust_env=False) as client,
    ):
        yield client


HERE = [
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
    "a.localhost:1",
    "127.0.0.1:80",
    "[::1]:8000",
    "[::1]",
    "10.1.2.3",
]
ELSEWHERE = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "notlocalhost",
    "", "[evil", "evil.example:127.0.0.1", "user@localhost", "127.0.0.1@evil.example", "0x7f.1",
]  # fmt: skip


@pytest.mark.parametrize("host", HERE)
def test_this_machine(http: httpx.Client, host: str) -> None:
    for path in ("/", "/v1/models", "/metrics"):
        assert http.get(path, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ELSEWHERE)
def test_names_that_others_may_own(http: httpx.Client, host: str) -> None:
    headers = {"Host": host}
    for path in ("/", "/page/app.js", "/v1/models", "/metrics", "/nothing"):
        reply = http.get(path, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "unknown_host")
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    assert http.post("/v1/chat/completions", json=body, headers=headers).status_code == 403
    refused = http.post("/v1/messages", json=body, headers=headers)
    assert refused.status_code == 403 and refused.json()["error"]["type"] == "permission_error"
    assert http.get("/health", headers=headers).json() == {"status": "ok"}  # for probes, and no secret


def test_other_origins_are_told_nothing(http: httpx.Client) -> None:
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    for method, path in (("GET", "/v1/models"), ("OPTIONS", "/v1/chat/completions"), ("OPTIONS", "/")):
        reply = http.request(method, path, headers=headers)
        assert not [name for name in reply.headers if name.startswith("access-control")]
    simple = http.post(
        "/v1/chat/completions", content=b"{}", headers={**headers, "Content-Type": "text/plain"}
    )
    assert simple.status_code == 415
