"""Server-sent events, and work that stops when its client goes away.

Closing the engine's generator is what aborts a request, so everything here is written to close it
on every path: end, error, disconnect, cancellation.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quickdraft.server.answer import Answer
from quickdraft.server.engine import Output
from quickdraft.server.errors import ApiError, api_error

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


async def chat_events(
    answer: Answer, outputs: AsyncGenerator[Output, None], on_error: Callable[[ApiError], None]
) -> AsyncGenerator[bytes, None]:
    """The events of one streamed answer; a failure is the last event, after which nothing follows."""
    yield _event(answer.first_chunk())
    try:
        async with aclosing(outputs):
            async for output in outputs:
                answer.add(output)
                chunk = answer.delta(output)
                if chunk is not None:
                    yield _event(chunk)
        yield _event(answer.last_chunk())
        if answer.call.include_usage:
            yield _event(answer.usage_chunk())
        yield b"data: [DONE]\n\n"
    except Exception as error:  # the status line is gone; the client must still hear of it
        failure = api_error(error)
        on_error(failure)
        yield _event(failure.body())


class EventStream(Response):
    """A text/event-stream response; calls `on_end(client_gone)` once, whatever happens."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], on_end: Callable[[bool], None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = True
        try:
            await unless_disconnected(receive, self._send_all(send))
            gone = False
        except ClientGone:
            pass
        finally:
            self._on_end(gone)

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(value: dict[str, Any]) -> bytes:
    # ASCII only: some clients split lines at U+2028 and U+0085 too.
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
