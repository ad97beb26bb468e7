"""A real server over a real engine and a tiny model: abuse leaves it alive, exact, and leaks nothing."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from quickdraft.engine.async_engine import AsyncEngine
from quickdraft.engine.opened import EngineConfig, Opened, open_model
from quickdraft.engine.plan import StepPlan
from tests.support.abuse import Crowd, Growth, besiege, solo
from tests.support.live_server import complete_app, live_server
from tests.support.malformed import flood, send_malformed
from tests.support.server_process import server_process
from tests.support.tiny import write_tiny_llama

CHAT = "/v1/chat/completions"


@dataclass
class World:
    url: str
    opened: Opened

    def body(self, text: str = "hello", **fields: object) -> dict[str, object]:
        return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}

    def ask(self, **fields: object) -> httpx.Response:
        return httpx.post(self.url + CHAT, json=self.body(**fields), timeout=60)

    def healthy(self) -> None:
        """Alive, idle within seconds, every block free."""
        assert httpx.get(f"{self.url}/health").status_code == 200
        engine = self.opened.engine
        until = time.monotonic() + 20
        while engine.has_work and time.monotonic() < until:
            time.sleep(0.01)
        assert not engine.has_work, "abandoned requests still run"
        assert engine.free_blocks == self.opened.runner.kv.blocks, "blocks leaked"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    path = write_tiny_llama(tmp_path / "tiny.gguf", quantisation="Q4_1")
    # 64 blocks: four requests of the full context need twice as many, so preemption happens
    opened = open_model(path, EngineConfig(threads=2, kv_memory_bytes=64 * 16 * 512, chunk_rows=32))
    engine = AsyncEngine(opened)
    with live_server(complete_app(engine)) as url:
        yield World(url, opened)
    engine.shutdown()


def raw(url: str, payload: bytes, wait: bool) -> bytes:
    """Send bytes, then read what comes (or leave at once)."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=20) as connection:
        connection.sendall(payload)
        return connection.recv(65536) if wait else b""


def head(length: int) -> bytes:
    lines = (
        f"POST {CHAT} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_bad_bodies(world: World) -> None:
    garbage = np.random.default_rng(0).bytes(1 << 20)
    for content in (garbage, b"[" * 100_000, b"", b"null", b'{"model": NaN}', b'{"a":' * 5000):
        answer = httpx.post(
            world.url + CHAT, content=content, headers={"content-type": "application/json"}, timeout=60
        )
        assert answer.status_code == 400 and answer.json()["error"]["message"], content[:20]
    long = world.ask(text="word " * 2_000_000)
    assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"
    assert "512" in long.json()["error"]["message"]
    raw(world.url, head(1000) + b'{"model": "ti', wait=False)
    assert b"400" in raw(world.url, b"GARBAGE\r\n\r\n", wait=True).split(b"\r\n")[0]
    world.healthy()


def test_bad_fields_are_named(world: World) -> None:
    for fields in (
        {"frobnicate": 1}, {"temperature": "hot"}, {"temperature": 1e9}, {"top_p": 0}, {"n": 0},
        {"seed": 1.5}, {"max_tokens": 0}, {"logit_bias": {"99999": 1}}, {"logit_bias": {"x": 1}},
        {"stop": [""]},
        {"stop_token_ids": [-1]}, {"speculation": "mtp"}, {"speculation": "lookup@9999"},
        {"top_logprobs": 99}, {"tools": [{"type": "function"}]}, {"messages": []},
        {"min_tokens": 5, "max_tokens": 2},
    ):  # fmt: skip
        answer = world.ask(**fields)
        assert answer.status_code == 400, fields
        assert next(iter(fields)) in json.dumps(answer.json()), fields
    world.healthy()


def test_every_token_forbidden_is_refused(world: World) -> None:
    before = world.ask(temperature=0, max_tokens=8).json()["choices"]
    vocabulary = world.opened.runner.model.config.vocabulary_size
    stops = {"stop_token_ids": list(range(vocabulary)), "min_tokens": 1, "max_tokens": 8}
    refused = world.ask(**stops)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "stop_token_ids"
    assert world.ask(temperature=0, max_tokens=8).json()["choices"] == before
    world.healthy()


def test_clients_that_vanish_change_nothing_for_others(world: World) -> None:
    settings = [{"temperature": t, "seed": 5, "max_tokens": 60, "ignore_eos": True} for t in (0, 0.8)]
    solo = [world.ask(**one).json()["choices"] for one in settings]
    chance = random.Random(3)

    async def visit(client: httpx.AsyncClient, number: int) -> object:
        if number % 8 < 2:  # stays
            answer = await client.post(world.url + CHAT, json=world.body(**settings[number % 8]))
            return answer.json()["choices"] == solo[number % 8]
        text = "word " * chance.choice([1, 20, 90])
        body = world.body(text, max_tokens=300, ignore_eos=True, stream=number % 2 == 0)
        with suppress(TimeoutError, httpx.TransportError):
            await asyncio.wait_for(client.post(world.url + CHAT, json=body), chance.uniform(0.001, 0.3))
        return True

    async def crowd() -> list[object]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            return await asyncio.gather(*(visit(client, number) for number in range(64)))

    assert all(asyncio.run(crowd()))
    world.healthy()


def test_clients_that_do_not_read_stall_nobody(world: World) -> None:
    """As many answers as run at a time, none of them read: others get theirs, and the engine ends all."""
    one = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    solo = world.ask(**one).json()["choices"]
    body = world.body(max_tokens=300, ignore_eos=True, stream=True, logprobs=True, top_logprobs=20, n=4)
    content = json.dumps(body).encode()
    parts = urlsplit(world.url)
    with ExitStack() as stack:
        for _ in range(4):
            unread = stack.enter_context(socket.socket())
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            unread.connect((parts.hostname, parts.port))
            unread.sendall(head(len(content)) + content)
            assert unread.recv(12) == b"HTTP/1.1 200"  # it runs
        assert world.ask(**one).json()["choices"] == solo
        world.healthy()
        assert unread.recv(12)
    assert world.ask(**one).json()["choices"] == solo


def test_a_siege_of_a_real_process(tmp_path: Path) -> None:
    """Some 1,500 visits, 64 at a time, most of them bad. Answers given meanwhile and afterwards equal
    the solo ones, nothing is left over, and memory does not grow."""
    path = write_tiny_llama(tmp_path / "tiny.gguf", quantisation="Q4_1")
    # 64 blocks: as above, requests are preempted; 16 open requests: some are told to wait
    small = ("--threads", "1", "--kv-memory", str(64 * 16 * 512), "--max-sequences", "8", "--max-queue", "8")
    with server_process(str(path), *small) as server:
        expected, texts = asyncio.run(solo(server.port, "tiny"))
        crowd = Crowd(server.port, "tiny", expected, random.Random(7), texts)

        async def siege() -> list[float]:
            await crowd.run(visits=256, at_once=64)  # first, what is allocated once
            return await besiege(
                crowd, visits=128, at_once=64, resident=server.resident_bytes, until=lambda waves: waves >= 10
            )

        growth = Growth.of(asyncio.run(siege()))
        assert not crowd.wrong, crowd.wrong[:3]
        assert crowd.counts["checked"] > 100 and crowd.counts["told to wait"], crowd.counts
        server.wait_until_idle()
        statuses = asyncio.run(send_malformed(server.port, "tiny", seed=3, count=300, at_once=16))
        assert statuses[400] > 100 and max(statuses) < 500, statuses
        assert asyncio.run(flood(server.port, connections=600)) > 50
        server.wait_until_idle()
        assert asyncio.run(solo(server.port, "tiny")) == (expected, texts)
        assert growth.share < 0.05, growth


def test_engine_failure_is_told_to_clients_and_to_health(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(plan: StepPlan) -> None:
        raise RuntimeError("the kernels are on fire")

    monkeypatch.setattr(world.opened.runner, "run", broken)
    assert world.ask(max_tokens=4).status_code == 503
    health = httpx.get(f"{world.url}/health")
    assert health.status_code == 503 and "retry-after" in health.headers
    assert world.ask(max_tokens=4).status_code == 503
