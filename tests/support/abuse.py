"""A crowd of bad clients, and good ones among them whose answers are checked. All over raw sockets.

Each visit is one connection. Bad ones vanish at a random point, dribble, send garbage, do not read
what they asked for, or cancel; good ones ask one of a few fixed questions whose answers were taken
while nothing else ran. Everything is drawn from one seed.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
Visit = Callable[["Crowd"], Awaitable[None]]


def questions(model: str) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of what good clients ask: every endpoint that answers, greedy and sampled, with and
    without drafts."""
    messages = [{"role": "user", "content": "hello one two three one two three"}]
    common = {"model": model, "max_tokens": 40, "ignore_eos": True, "seed": 5}
    other = {"model": model, "seed": 5, "temperature": 0.7}
    return [
        (CHAT, {**common, "messages": messages, "temperature": 0}),
        (CHAT, {**common, "messages": messages, "temperature": 0.8, "logprobs": True, "top_logprobs": 2}),
        (TEXT, {**common, "prompt": "one two three " * 8, "temperature": 0.9, "speculation": "lookup@16"}),
        (TEXT, {**common, "prompt": [[5, 6, 7, 5, 6], [9] * 20], "temperature": 0, "speculation": "off"}),
        (RESPONSES, {**other, "input": "hello one two three one two three", "max_output_tokens": 40}),
        (MESSAGES, {**other, "messages": messages, "max_tokens": 40}),
    ]


def request(path: str, body: bytes, *, length: int | None = None) -> bytes:
    """The bytes of one request; `length` may lie about the body."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


async def ask(port: int, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """(status, JSON) of one whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    try:
        writer.write(request(path, json.dumps(body).encode()))
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        length = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length:"))
        return int(head.split()[1]), dict(json.loads(await reader.readexactly(length)))
    finally:
        writer.close()


def answer_of(reply: dict[str, Any]) -> Any:
    """What must not differ between two answers to one question: all but times and cache."""
    if "choices" not in reply:
        text = [part.get("text") for item in reply.get("output", ()) for part in item.get("content", ())]
        usage = {name: reply.get("usage", {}).get(name) for name in ("input_tokens", "output_tokens")}
        kept = ("error", "status", "content", "stop_reason", "incomplete_details")
        # Anthropic's input_tokens are those that were not cached
        sizes = [usage["output_tokens"]] if "content" in reply else list(usage.values())
        return [{name: reply[name] for name in kept if name in reply}, text, sizes]
    kept = ("index", "text", "message", "logprobs", "finish_reason")
    choices = [{name: choice[name] for name in kept if name in choice} for choice in reply["choices"]]
    return [choices, reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]]


def texts_of(path: str, reply: dict[str, Any]) -> dict[int, str]:
    """The text of a whole answer, by choice."""
    if path == CHAT:
        return {one["index"]: one["message"]["content"] for one in reply["choices"]}
    if path == TEXT:
        return {one["index"]: one["text"] for one in reply["choices"]}
    parts = reply["content"] if path == MESSAGES else reply["output"][0]["content"]
    return {0: "".join(part["text"] for part in parts)}


async def ask_streaming(port: int, path: str, body: dict[str, Any]) -> tuple[int, dict[int, str]]:
    """(status, text by choice) of one answer as a stream; no text for another status than 200."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    try:
        writer.write(request(path, json.dumps(body | {"stream": True}).encode()))
        status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
        raw = b""
        while status == 200 and (size := int(await reader.readline(), 16)):
            raw += (await reader.readexactly(size + 2))[:-2]
    finally:
        writer.close()
    texts: dict[int, str] = {}
    for line in raw.decode().splitlines():
        if line.startswith("data: {"):
            for index, text in _news(path, json.loads(line.removeprefix("data: "))):
                texts[index] = texts.get(index, "") + text
    return status, texts


def _news(path: str, event: dict[str, Any]) -> list[tuple[int, str]]:
    if path == CHAT:
        return [(one["index"], one["delta"].get("content") or "") for one in event.get("choices", ())]
    if path == TEXT:
        return [(one["index"], one["text"]) for one in event.get("choices", ())]
    if path == RESPONSES:
        return [(0, event["delta"])] if event["type"] == "response.output_text.delta" else []
    return [(0, event["delta"]["text"])] if event["type"] == "content_block_delta" else []


@dataclass
class Crowd:
    """Visits to the server at `port`; `expected` are the solo answers to questions(model)."""

    port: int
    model: str
    expected: list[Any]
    chance: random.Random
    texts: list[dict[int, str]] = field(default_factory=list)  # of the same answers
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def run(self, visits: int, at_once: int) -> None:
        """That many visits, so many at the same time."""
        left = iter(range(visits))

        async def visitor() -> None:
            for _ in left:
                visit = self.chance.choices(VISITS, WEIGHTS)[0]
                self.counts[visit.__name__] += 1
                with suppress(ConnectionError, asyncio.IncompleteReadError):
                    await visit(self)

        await asyncio.gather(*(visitor() for _ in range(at_once)))

    def long_request(self) -> bytes:
        """A request that would run long: up to the context limit, streamed or not."""
        words = "word " * self.chance.choice([1, 20, 80])
        body = {
            "model": self.model,
            "max_tokens": 300,
            "ignore_eos": True,
            "stream": self.chance.random() < 0.5,
        }
        if self.chance.random() < 0.5:
            body |= {"messages": [{"role": "user", "content": words}]}
            return request(CHAT, json.dumps(body).encode())
        return request(TEXT, json.dumps(body | {"prompt": [words] * self.chance.choice([1, 3])}).encode())

    async def send(self, data: bytes, *, wait: float, reset: bool = False) -> None:
        """Connect, send, wait, vanish: with a reset or with an orderly end."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        await asyncio.sleep(wait)
        if reset:
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        writer.close()


async def stays(crowd: Crowd) -> None:
    """A good client: it waits for its answer, and asks again when told that the queue is full."""
    number = crowd.chance.randrange(len(crowd.expected))
    path, body = questions(crowd.model)[number]
    for _ in range(200):
        status, reply = await ask(crowd.port, path, body)
        if status != 429:
            break
        crowd.counts["told to wait"] += 1
        await asyncio.sleep(0.1)
    crowd.counts["checked"] += 1
    if answer_of(reply) != crowd.expected[number]:
        crowd.wrong.append(f"question {number}: status {status}, {json.dumps(reply)[:300]}")


async def streams(crowd: Crowd) -> None:
    """A good client that reads its answer as it comes."""
    number = crowd.chance.randrange(len(crowd.expected))
    path, body = questions(crowd.model)[number]
    for _ in range(200):
        status, texts = await ask_streaming(crowd.port, path, body)
        if status != 429:
            break
        crowd.counts["told to wait"] += 1
        await asyncio.sleep(0.1)
    crowd.counts["checked"] += 1
    if texts != crowd.texts[number]:
        crowd.wrong.append(f"question {number} streamed: status {status}, {texts!r}"[:400])


async def vanishes(crowd: Crowd) -> None:
    """Cuts its request anywhere (before, in, after the headers; in the body) or leaves while it runs."""
    data = crowd.long_request()
    cut = crowd.chance.choice([0, crowd.chance.randrange(len(data)), len(data), len(data)])
    await crowd.send(data[:cut], wait=crowd.chance.uniform(0, 0.3), reset=crowd.chance.random() < 0.5)


async def cancels(crowd: Crowd) -> None:
    """Leaves once the first bytes of its answer came, in decode."""
    reader, writer = await asyncio.open_connection("127.0.0.1", crowd.port)
    writer.write(crowd.long_request())
    with suppress(TimeoutError):
        await asyncio.wait_for(reader.read(crowd.chance.randrange(1, 2000)), crowd.chance.uniform(0.05, 1))
    writer.close()


async def reads_slowly(crowd: Crowd) -> None:
    """A small window and a few bytes now and then."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, ("127.0.0.1", crowd.port))
    body = {"model": crowd.model, "prompt": [5], "max_tokens": 300, "ignore_eos": True, "stream": True}
    try:
        await loop.sock_sendall(raw, request(TEXT, json.dumps(body | {"logprobs": 20}).encode()))
        for _ in range(crowd.chance.randrange(10)):
            with suppress(TimeoutError):  # a short answer is over, and the connection idle
                await asyncio.wait_for(loop.sock_recv(raw, 50), 0.2)
            await asyncio.sleep(0.05)
    finally:
        raw.close()


async def sends_garbage(crowd: Crowd) -> None:
    """Bytes that are not HTTP, headers without end, a body that is not JSON, TLS."""
    noise = crowd.chance.randbytes(crowd.chance.randrange(1, 5000))
    data = crowd.chance.choice(
        [
            noise,
            b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-Pad: " + b"x" * 100_000,
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
            + b"".join(b"X-%d: y\r\n" % i for i in range(3000))
            + b"\r\n",
            request(CHAT, noise),
            request(CHAT, b"[" * 20_000),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise,
            b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n" + noise,
        ]
    )
    await crowd.send(data, wait=crowd.chance.uniform(0, 0.1))


async def pipelines(crowd: Crowd) -> None:
    """Several requests at once, then it leaves."""
    data = b"".join(crowd.long_request() for _ in range(crowd.chance.randrange(2, 5)))
    await crowd.send(data, wait=crowd.chance.uniform(0, 0.3))


async def half_sends(crowd: Crowd) -> None:
    """Promises more than it sends, and waits."""
    await crowd.send(request(CHAT, b'{"model": "x', length=5000), wait=crowd.chance.uniform(0.2, 1))


VISITS: list[Visit] = [stays, streams, vanishes, cancels, reads_slowly, sends_garbage, pipelines, half_sends]
WEIGHTS = [2, 2, 5, 3, 1, 2, 1, 1]


@dataclass(frozen=True)
class Growth:
    """Resident memory over a run: medians of its second and of its last quarter, in bytes."""

    second: float
    last: float

    @classmethod
    def of(cls, samples: list[float]) -> Growth:
        quarter = len(samples) // 4
        return cls(_median(samples[quarter : 2 * quarter]), _median(samples[-quarter:]))

    @property
    def share(self) -> float:
        return self.last / self.second - 1


async def solo(port: int, model: str) -> tuple[list[Any], list[dict[int, str]]]:
    """The answers to questions(model), asked one after the other, and their texts."""
    asked = questions(model)
    replies = [await ask(port, path, body) for path, body in asked]
    assert all(status == 200 for status, _ in replies), replies
    texts = [texts_of(path, reply) for (path, _), (_, reply) in zip(asked, replies, strict=True)]
    return [answer_of(reply) for _, reply in replies], texts


async def besiege(
    crowd: Crowd,
    *,
    visits: int,
    at_once: int,
    resident: Callable[[], float],
    until: Callable[[int], bool],
) -> list[float]:
    """Waves of visits while `until(waves so far)` is false; resident memory after each wave."""
    samples: list[float] = []
    while not until(len(samples)):
        await crowd.run(visits=visits, at_once=at_once)
        samples.append(resident())
    return samples


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def clock(seconds: float) -> Callable[[int], bool]:
    """An `until` of so many seconds from now, and at least eight waves."""
    end = time.monotonic() + seconds
    return lambda waves: waves >= 8 and time.monotonic() >= end
