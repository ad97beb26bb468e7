"""Server-sent events, and work that stops when its client goes away.

Closing the answer is what aborts its requests, so everything here is written to close it on every
path: end, error, disconnect, cancellation.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quickdraft.server.answer import Answer
from quickdraft.server.errors import ApiError, ErrorStyle, api_error
from quickdraft.server.shapes import Shape

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; when the client disconnects first, cancel it, wait for it and raise ClientGone."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Framing:
    """How an API's events go over the wire. `named`: each carries its "type" as the name of the event;
    `end` closes a complete answer; `ping` is what may be sent at any time and says nothing."""

    named: bool = False
    end: bytes = b"data: [DONE]\n\n"
    ping: bytes = b": ping\n\n"

    def event(self, value: dict[str, Any]) -> bytes:
        # ASCII only: some clients split lines at U+2028 and U+0085 too.
        data = f"data: {json.dumps(value, separators=(',', ':'))}\n\n"
        return (f"event: {value['type']}\n{data}" if self.named else data).encode()


OPENAI_FRAMING: Final = Framing()


async def answer_events(
    answer: Answer,
    shape: Shape,
    framing: Framing,
    on_error: Callable[[ApiError], None],
    *,
    fields: Mapping[str, str],
    style: ErrorStyle,
) -> AsyncGenerator[bytes, None]:
    """The events of one streamed answer; a failure is the last event, after which nothing follows."""
    try:
        for chunk in shape.first():
            yield framing.event(chunk)
        async with aclosing(answer.run()) as outputs:
            async for choice, output in outputs:
                for delta in shape.deltas(choice, output):
                    yield framing.event(delta)
                if choice.finish_reason is not None:
                    yield framing.event(shape.last(choice))
        if answer.call.include_usage:
            yield framing.event(shape.usage_chunk())
        if framing.end:
            yield framing.end
    except Exception as error:  # the status line is gone; the client must still hear of it
        failure = api_error(error, fields, style)
        on_error(failure)
        yield framing.event(shape.failed(failure))


class EventStream(Response):
    """A text/event-stream response over an answer, which it closes.

    After `ping_seconds` without an event a `ping` is sent: it keeps proxies and clients from
    giving up while a prompt waits or is read. Calls `on_end(client_gone)` once, whatever happens.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: Answer,
        events: AsyncGenerator[bytes, None],
        on_end: Callable[[bool], None],
        ping_seconds: float,
        ping: bytes,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._answer, self._events, self._on_end = answer, events, on_end
        self._ping_seconds, self._ping_event = ping_seconds, ping
        self._sent_at = 0.0
        self._sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = True
        try:
            await unless_disconnected(receive, self._send_all(send))
            gone = False
        except ClientGone:
            pass
        finally:
            await self._answer.aclose()
            self._on_end(gone)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._sent_at = asyncio.get_running_loop().time()
        pings = asyncio.create_task(self._ping(send))
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await self._send(send, event)
                    # With Outputs in store nothing above waits: let others run, and the news in that
                    # the client has gone.
                    await asyncio.sleep(0)
        finally:
            pings.cancel()
            await asyncio.gather(pings, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, event: bytes) -> None:
        self._sending = True
        await send({"type": "http.response.body", "body": event, "more_body": True})
        self._sending = False
        self._sent_at = asyncio.get_running_loop().time()

    async def _ping(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            left = self._sent_at + self._ping_seconds - loop.time()
            if left <= 0 and not self._sending:  # a blocked send says that nobody reads
                await self._send(send, self._ping_event)
            await asyncio.sleep(left if left > 0 else self._ping_seconds)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
