"""AsyncEngine: one thread runs the engine, coroutines submit requests and receive Outputs.

It owns the thread and the hand-over in both directions; it knows nothing of HTTP. Closing the
iterator `generate` returns (or cancelling its task) aborts the request within one step. When the
engine itself fails, every waiting request gets an EngineError and `alive` turns False for good.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from quickdraft.engine.llm import Opened, Output, output_of
from quickdraft.engine.request import Request
from quickdraft.errors import EngineError
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import SamplingParams

Deliver = Callable[[Output | Exception], None]


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request
    deliver: Deliver


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class AsyncEngine:
    """The engine behind a server. Construct it with an opened model; `shutdown` joins the thread."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self._inbox: deque[_Submit | _Abort] = deque()
        self._wake = threading.Condition()
        self._stop = False
        self._failure: Exception | None = None
        self._waiting: dict[str, Deliver] = {}
        self._thread = threading.Thread(target=self._run, name="quickdraft-engine", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self.opened.name

    @property
    def max_context_tokens(self) -> int:
        return self.opened.max_context_tokens

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.opened.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self.opened.chat_template

    @property
    def sources(self) -> tuple[str, ...]:
        """Draft sources requests may name."""
        return self.opened.sources

    @property
    def alive(self) -> bool:
        return self._failure is None and not self._stop and self._thread.is_alive()

    def validate(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise what `generate` would raise, before anything is queued."""
        self.opened.validate(prompt_ids, params)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str
    ) -> AsyncGenerator[Output, None]:
        """Yield Outputs until one has a finish_reason; raises RequestError or EngineError."""
        request = self.opened.request(request_id, prompt_ids, params)
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[Output | Exception] = asyncio.Queue()

        def deliver(item: Output | Exception) -> None:
            loop.call_soon_threadsafe(outputs.put_nowait, item)

        self._send(_Submit(request, deliver))
        finished = False
        try:
            while not finished:
                item = await outputs.get()
                finished = isinstance(item, Exception) or item.finish_reason is not None
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if not finished:
                self._send(_Abort(request_id))

    def shutdown(self) -> None:
        """Stop the thread after its current step; requests still running get an EngineError."""
        with self._wake:
            self._stop = True
            self._wake.notify()
        self._thread.join()

    def _send(self, item: _Submit | _Abort) -> None:
        with self._wake:
            if self._failure is not None or self._stop:
                if isinstance(item, _Submit):
                    raise EngineError("the engine is not running", got=self._failure)
                return
            self._inbox.append(item)
            self._wake.notify()

    def _run(self) -> None:
        engine = self.opened.engine
        reason: Exception | None = None
        try:
            while self._take_inbox():
                for event in engine.step():
                    self._deliver(event.request.request_id, output_of(event))
        except Exception as error:  # whatever broke, clients must hear of it
            reason = error
        self._close(reason)

    def _take_inbox(self) -> bool:
        """Handle what was sent; sleep while there is nothing to do. False: time to stop."""
        engine = self.opened.engine
        while True:
            with self._wake:
                while not (self._inbox or self._stop or engine.has_work):
                    self._wake.wait()
                if self._stop:
                    return False
                items = list(self._inbox)
                self._inbox.clear()
            for item in items:
                self._handle(item)
            if engine.has_work:
                return True

    def _handle(self, item: _Submit | _Abort) -> None:
        if isinstance(item, _Abort):
            self._waiting.pop(item.request_id, None)
            self.opened.engine.abort(item.request_id)
            return
        self._waiting[item.request.request_id] = item.deliver
        try:
            self.opened.engine.add(item.request)
        except Exception as error:  # this request only; the engine is untouched
            self._deliver(item.request.request_id, error)

    def _deliver(self, request_id: str, item: Output | Exception) -> None:
        deliver = self._waiting.get(request_id)
        if deliver is None:
            return
        if isinstance(item, Exception) or item.finish_reason is not None:
            del self._waiting[request_id]
        try:
            deliver(item)
        except RuntimeError:  # the client's event loop is closed
            self._waiting.pop(request_id, None)
            self.opened.engine.abort(request_id)

    def _close(self, reason: Exception | None) -> None:
        with self._wake:
            self._failure = reason
            self._stop = True
            pending = [item for item in self._inbox if isinstance(item, _Submit)]
            self._inbox.clear()
        error = EngineError("the engine stopped", got=repr(reason) if reason else "shutdown")
        for deliver in [*self._waiting.values(), *(item.deliver for item in pending)]:
            try:
                deliver(error)
            except RuntimeError:  # that client's event loop is closed; nobody is left to tell
                continue
        self._waiting.clear()
