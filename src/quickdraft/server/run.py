"""Run the application under uvicorn: one process, our own log lines instead of its access log."""

from __future__ import annotations

import logging
from typing import Final

import uvicorn
from fastapi import FastAPI

SHUTDOWN_SECONDS: Final = 3  # how long running answers may go on after Ctrl-C


def server_of(app: FastAPI, host: str, port: int) -> uvicorn.Server:
    """A configured uvicorn server that has not started."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    return uvicorn.Server(config)


def serve(app: FastAPI, host: str, port: int) -> None:
    """Serve until the process is told to stop; one line per request on stderr."""
    log = logging.getLogger("quickdraft")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    server_of(app, host, port).run()
