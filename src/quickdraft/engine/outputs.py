"""What one request of the AsyncEngine gives its consumer, handed over from the engine's thread.

It owns the queue between the two and nothing of the engine: aborting is a function it was given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quickdraft.engine.llm import Output


class Outputs:
    """The Outputs of one request, for one consumer in the loop that made it.

    Ends after the Output with a finish_reason; raises RequestError or EngineError. `aclose` before
    that aborts the request. Nothing is dropped: a slow consumer's Outputs wait here, and max_tokens
    bounds them.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self._finished = False

    def deliver(self, item: Output | Exception) -> None:
        """Hand over from any thread; RuntimeError when the consumer's loop is closed."""
        self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    def __aiter__(self) -> Outputs:
        return self

    async def __anext__(self) -> Output:
        if self._finished:
            raise StopAsyncIteration
        item = await self._items.get()
        self._finished = isinstance(item, Exception) or item.finish_reason is not None
        if isinstance(item, Exception):
            raise item
        return item

    async def aclose(self) -> None:
        """Abort the request unless it has ended; closing twice is fine."""
        if not self._finished:
            self._finished = True
            self._abort()
