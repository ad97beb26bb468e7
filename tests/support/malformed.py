"""Requests that are nearly right, and more connections than a server takes: both must end in clear errors."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import suppress
from typing import Any

from tests.support.abuse import questions, request

JUNK: list[Any] = [
    None, True, -1, 0, 2**63, 1e308, "", "x" * 300, "\u0000", "\ud7ff", [], [[]], {}, {"a": {"b": []}},
    [None],
]  # fmt: skip


def malformed(chance: random.Random, model: str) -> bytes:
    """One request, spoilt: a value replaced, a field added, JSON cut or bytes flipped, a header that lies."""
    path, body = chance.choice(questions(model))
    body = json.loads(json.dumps(body | {"max_tokens": 2} if "max_tokens" in body else body))
    match chance.randrange(5):
        case 0:
            body[chance.choice(list(body))] = chance.choice(JUNK)
        case 1:
            body[chance.choice(["frobnicate", "n", "stop", "tools", "messages"])] = chance.choice(JUNK)
        case 2:
            raw = json.dumps(body).encode()
            return request(path, raw[: chance.randrange(len(raw))])
        case 3:
            noisy = bytearray(json.dumps(body).encode())
            for _ in range(chance.randrange(1, 6)):
                noisy[chance.randrange(len(noisy))] = chance.randrange(256)
            return request(path, bytes(noisy))
        case _:
            odd = chance.choice([b"text/plain", b"application/xml", b"", b"application/json; charset=x;;"])
            whole = request(path, json.dumps(body).encode())
            return whole.replace(b"application/json", odd, 1)
    return request(path, json.dumps(body).encode())


async def send_malformed(port: int, model: str, seed: int, count: int, at_once: int) -> Counter[int]:
    """How often each status came; AssertionError for an error without a message."""
    chance, statuses = random.Random(seed), Counter[int]()
    left = iter([malformed(chance, model) for _ in range(count)])

    async def client() -> None:
        for data in left:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
            try:
                writer.write(data)
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                status = int(head.split()[1])
                statuses[status] += 1
                if status != 200:
                    length = next(line for line in head.split("\r\n") if line.startswith("content-length:"))
                    body = json.loads(await reader.readexactly(int(length.partition(":")[2])))
                    assert body["error"]["message"], (data, body)
            finally:
                writer.close()

    await asyncio.gather(*(client() for _ in range(at_once)))
    return statuses


async def flood(port: int, connections: int) -> int:
    """Opens so many connections, holds them and lets go; how many were told that there are too many.
    Returns once the server lets others in again; AssertionError when it does not within 20 s."""
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def told(reader: asyncio.StreamReader) -> bool:
        with suppress(TimeoutError, ConnectionError):
            return b" 503 " in await asyncio.wait_for(reader.read(4096), 1)
        return False

    try:
        for _ in range(connections):
            with suppress(ConnectionError):
                opened.append(await asyncio.open_connection("127.0.0.1", port))
        for _, writer in opened:
            with suppress(ConnectionError):
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")  # and never the end
        refused = sum(await asyncio.gather(*(told(reader) for reader, _ in opened)))
    finally:
        for _, writer in opened:
            writer.close()
    for _ in range(200):
        if await _healthy(port):
            return refused
        await asyncio.sleep(0.1)
    raise AssertionError("the server lets nobody in after a flood of connections")


async def _healthy(port: int) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return (await reader.read(4096)).startswith(b"HTTP/1.1 200 ")
    except ConnectionError:
        return False
    finally:
        writer.close()
