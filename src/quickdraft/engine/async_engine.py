"""AsyncEngine: one thread runs the engine, coroutines submit requests and receive Outputs.

It owns the thread, the hand-over in both directions and the limit on open requests; it knows
nothing of HTTP. Closing the Outputs that `generate` returns aborts the request within one step. When
the engine itself fails, every open request gets an EngineError, `alive` turns False for good and
`failure` says why.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from quickdraft.engine.grammar import Grammars
from quickdraft.engine.llm import Output, output_of
from quickdraft.engine.metrics import EngineMetrics
from quickdraft.engine.opened import Opened
from quickdraft.engine.outputs import Outputs
from quickdraft.engine.request import Request
from quickdraft.errors import BadParameter, CapacityError, EngineError
from quickdraft.speculate.constraint import Constraint
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import SamplingParams

FLUSH_SECONDS: Final = 5.0  # most time an orderly end spends on writing the prefix cache to disk
Deliver = Callable[[Output | Exception], None]


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request
    deliver: Deliver
    after: str | None = None


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class AsyncEngine:
    """The engine behind a server. Construct it with an opened model; `shutdown` joins the thread.

    At most `max_queue` requests may be open beyond those the scheduler runs at a time; None sets no
    limit.
    """

    def __init__(self, opened: Opened, *, max_queue: int | None = None) -> None:
        self.opened = opened
        self._running_limit = opened.engine.scheduler.max_sequences
        self._max_queue = max_queue
        self._open: set[str] = set()  # requests the engine has not ended yet
        self._inbox: deque[_Submit | _Abort] = deque()
        self._wake = threading.Condition()
        self._stop = False
        self._failure: Exception | None = None
        self._waiting: dict[str, Deliver] = {}
        self._silent: set[str] = set()  # requests the engine has that emitted nothing yet
        self._behind: dict[str, list[_Submit]] = {}  # what waits for one of these
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
    def grammars(self) -> Grammars:
        """Compiles what requests may be held to; UnsupportedError without a tokenizer."""
        return self.opened.grammars

    @property
    def sources(self) -> tuple[str, ...]:
        """Draft sources requests may name."""
        return self.opened.sources

    @property
    def alive(self) -> bool:
        return self._failure is None and not self._stop and self._thread.is_alive()

    @property
    def failure(self) -> Exception | None:
        """What the engine failed with; None while it runs and after an orderly shutdown."""
        return self._failure

    def metrics(self) -> EngineMetrics:
        """The engine's counts now; any thread may ask."""
        return self.opened.engine.metrics()

    def validate(
        self, prompt_ids: Sequence[int], params: SamplingParams, prediction: Sequence[int] = ()
    ) -> None:
        """Raise what `generate` would raise, before anything is queued."""
        self.opened.validate(prompt_ids, params, prediction)
        eos = () if params.ignore_eos else self.opened.eos_ids
        if params.min_tokens and len({*params.stop_token_ids, *eos}) >= self._vocabulary_size:
            raise BadParameter(
                "stop_token_ids", got="every token of the vocabulary, with min_tokens above 0",
                expected="at least one token that does not stop",
            )  # fmt: skip

    @property
    def _vocabulary_size(self) -> int:
        return self.opened.runner.model.config.vocabulary_size

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        marks: Sequence[int] = (),
        prediction: Sequence[int] = (),
        constraint: Constraint | None = None,
        after: str | None = None,
    ) -> Outputs:
        """Queue a request now; its Outputs must be iterated to the end or closed. `marks`, `prediction`,
        `constraint`: see Opened.request. `after`: the id of an earlier request with the same prompt; until
        that has read it this one waits, to find it in the prefix cache.

        RequestError for a bad one, CapacityError when the queue is full, EngineError when the engine
        is not running.
        """
        request = self.opened.request(request_id, prompt_ids, params, marks, prediction, constraint)
        outputs = Outputs(lambda: self._send(_Abort(request_id)))
        self._send(_Submit(request, outputs.deliver, after))
        return outputs

    def shutdown(self) -> None:
        """Stop the thread after its current step and close the model; requests still running get an
        EngineError. May be called again."""
        with self._wake:
            self._stop = True
            self._wake.notify()
        self._thread.join()
        self.opened.close()

    def _send(self, item: _Submit | _Abort) -> None:
        with self._wake:
            if self._failure is not None or self._stop:
                if isinstance(item, _Submit):
                    raise EngineError("the engine is not running", got=self._failure)
                return
            if isinstance(item, _Submit):
                self._check_room()
                self._open.add(item.request.request_id)
            self._inbox.append(item)
            self._wake.notify()

    def _check_room(self) -> None:
        if self._max_queue is None or len(self._open) < self._running_limit + self._max_queue:
            return
        raise CapacityError(
            "the queue is full",
            got=f"{len(self._open)} open requests",
            expected=f"at most {self._running_limit} running and {self._max_queue} waiting",
            hint="try again later",
        )

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
        if reason is None:
            self._flush()

    def _flush(self) -> None:
        """Clients have heard of the end; write what a restart would want."""
        deadline = time.monotonic() + FLUSH_SECONDS
        while time.monotonic() < deadline and self.opened.engine.idle():
            pass

    def _take_inbox(self) -> bool:
        """Handle what was sent; with nothing to do, tidy up, then sleep. False: time to stop."""
        engine = self.opened.engine
        while True:
            busy = bool(self._inbox) or engine.has_work or engine.idle()
            with self._wake:
                while not (self._inbox or self._stop or busy):
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
            self._forget(item.request_id)
            self.opened.engine.abort(item.request_id)
            self._spoke(item.request_id)
            return
        self._waiting[item.request.request_id] = item.deliver
        caches = self.opened.engine.scheduler.cache is not None
        if item.after in self._silent and caches:
            self._behind.setdefault(item.after, []).append(item)
        else:
            self._add(item)

    def _add(self, item: _Submit) -> None:
        self._silent.add(item.request.request_id)
        try:
            self.opened.engine.add(item.request)
        except Exception as error:  # this request only; the engine is untouched
            self._deliver(item.request.request_id, error)

    def _spoke(self, request_id: str) -> None:
        """This request has read its prompt, or ended: what waited for it need not wait longer."""
        self._silent.discard(request_id)
        for item in self._behind.pop(request_id, ()):
            if item.request.request_id in self._waiting:  # not aborted since
                self._add(item)

    def _deliver(self, request_id: str, item: Output | Exception) -> None:
        deliver = self._waiting.get(request_id)
        if deliver is None:
            return
        ended = isinstance(item, Exception) or item.finish_reason is not None
        if ended:
            self._forget(request_id)
        try:
            deliver(item)
        except RuntimeError:  # the client's event loop is closed
            ended = True
            self._forget(request_id)
            self.opened.engine.abort(request_id)
        if ended or (not isinstance(item, Exception) and item.tokens):
            self._spoke(request_id)

    def _forget(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        with self._wake:
            self._open.discard(request_id)

    def _close(self, reason: Exception | None) -> None:
        with self._wake:
            self._failure = reason
            self._stop = True
            pending = [item for item in self._inbox if isinstance(item, _Submit)]
            self._inbox.clear()
            self._open.clear()
        error = EngineError("the engine stopped", got=repr(reason) if reason else "shutdown")
        for deliver in [*self._waiting.values(), *(item.deliver for item in pending)]:
            try:
                deliver(error)
            except RuntimeError:  # that client's event loop is closed; nobody is left to tell
                continue
        self._waiting.clear()
