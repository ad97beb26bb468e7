"""A real uvicorn server on a free loopback port, in a thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from quickdraft.server.app import create_app
from quickdraft.server.auth import KeyCheck
from quickdraft.server.engine import AsyncEngine
from quickdraft.server.front import Front
from quickdraft.server.limits import Limits
from quickdraft.server.run import server_config

LIMITS: Final = Limits()


def complete_app(
    engine: AsyncEngine, *, keys: Sequence[str] = (), limits: Limits = LIMITS, **options: Any
) -> KeyCheck:
    """Everything `serve` puts together: keys, front, application over a loaded engine."""
    front = Front(limits)
    front.open(create_app(engine, limits=limits, **options), engine)
    return KeyCheck(front, keys)


@contextmanager
def live_server(app: ASGIApp, limits: Limits = LIMITS) -> Iterator[str]:
    """Yields the base URL; the server is stopped and joined on the way out."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(server_config(app, limits))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        assert not thread.is_alive(), "the server did not stop"
