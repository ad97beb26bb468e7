"""The life of a server process: listen, load, serve, drain, end.

uvicorn runs one process with our own log lines instead of its access log. The socket listens before
the model is loaded. A first SIGTERM or SIGINT lets running answers finish, a second ends at once.
When loading or the engine fails, clients are told, and `serve` raises what happened.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from quickdraft.errors import EngineError
from quickdraft.server.auth import KeyCheck
from quickdraft.server.engine import AsyncEngine
from quickdraft.server.front import Front
from quickdraft.server.hosts import HostCheck
from quickdraft.server.limits import Limits
from quickdraft.server.protocol import guarded

# After the last answer, or once none may go on: for error messages to leave and connections to close.
LAST_SECONDS: Final = 2.0
Loaded = tuple[ASGIApp, AsyncEngine]
Load = Callable[[], Loaded]
_log = logging.getLogger("quickdraft.server")


def server_config(app: ASGIApp, limits: Limits) -> uvicorn.Config:
    """uvicorn's settings for any application of ours."""
    return uvicorn.Config(
        app,
        http=guarded(limits),
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=limits.header_bytes,
        timeout_keep_alive=limits.keep_alive_seconds,  # type: ignore[arg-type]  # it takes any number
        timeout_graceful_shutdown=LAST_SECONDS,  # type: ignore[arg-type]
    )


class LifeCycle(uvicorn.Server):
    """A server that follows its Front: drains on a signal, and ends when the engine has failed.

    `failure` is what ended it, when something did.
    """

    def __init__(self, config: uvicorn.Config, front: Front, drain_seconds: float) -> None:
        super().__init__(config)
        self._front, self._drain_seconds = front, drain_seconds
        self._told_to_stop = False
        self._until: float | None = None  # when answers must have ended, on time.monotonic
        self._stopped_engine = False
        self.failure: BaseException | None = None

    def load(self, load: Load) -> None:
        """Open the front with what `load` returns, or end with what it raises. For a thread."""
        try:
            self._front.open(*load())
        except BaseException as error:
            self.failure = error

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain. Second: end at once."""
        if self._told_to_stop:
            _log.error("second signal: ending at once")
            os._exit(128 + sig)
        self._told_to_stop = True
        _log.info("stopping: running answers have %g s", self._drain_seconds)
        self._front.drain()

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: is it time to end?"""
        self._follow()
        return await super().on_tick(counter)

    def _follow(self) -> None:
        engine, state = self._front.engine, self._front.state
        if self.failure is None and engine is not None and engine.failure is not None:
            self.failure = EngineError("the engine failed", got=repr(engine.failure))
            _log.error("%s; ending", self.failure)
        if self.failure is None and state != "draining":
            return
        now = time.monotonic()
        if self._until is None:
            seconds = self._drain_seconds if self.failure is None else LAST_SECONDS
            self._until = now + seconds
        if self._front.in_flight == 0:
            self.should_exit = True
        elif now >= self._until and not self._stopped_engine:
            _log.info("aborting %d answers", self._front.in_flight)
            self._stopped_engine = True
            self._until = now + LAST_SECONDS
            if engine is not None:
                threading.Thread(target=engine.shutdown, daemon=True).start()
        elif now >= self._until:
            self.should_exit = True


def serve(
    sockets: Sequence[socket.socket],
    load: Load,
    *,
    keys: Sequence[str] = (),
    any_host: bool = False,
    limits: Limits,
    drain_seconds: float,
) -> None:
    """Serve on `sockets` until told to stop; `load` gives application and engine meanwhile. Without `keys`,
    requests must name this machine (hosts.py) unless `any_host`.

    Raises what `load` raised, or EngineError when the engine failed.
    """
    _log_to_stderr()
    front = Front(limits)
    app: ASGIApp = KeyCheck(front, keys) if keys or any_host else HostCheck(front)
    server = LifeCycle(server_config(app, limits), front, drain_seconds)
    loading = threading.Thread(target=server.load, args=(load,), name="quickdraft-load", daemon=True)
    loading.start()
    try:
        server.run(sockets=list(sockets))
    finally:
        if front.engine is not None:
            front.engine.shutdown()
    if loading.is_alive():  # told to stop meanwhile; nothing can end native code in order
        os._exit(0)
    if server.failure is not None:
        raise server.failure


def _log_to_stderr() -> None:
    log = logging.getLogger("quickdraft")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
