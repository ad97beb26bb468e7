"""What stands before the application: liveness, version, and whether requests are let in at all.

The front listens before a model is loaded and after an engine failed. It answers /health and
/version itself, and the web page's files while a model is being loaded, so that the page can say so;
everything else reaches the application only while it serves. It counts what is in
flight, so that a stopping server knows when it is done. It knows nothing of models or requests.
"""

from __future__ import annotations

import asyncio
from typing import Final, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quickdraft import __version__
from quickdraft.server.engine import AsyncEngine
from quickdraft.server.errors import ApiError, ErrorStyle, engine_down, retry_after
from quickdraft.server.limits import Limits
from quickdraft.server.page.files import is_page, serve_page

State = Literal["loading", "ready", "draining", "failed"]
OPEN_PATHS: Final = ("/health", "/version")  # answered here, and without a key


class Front:
    """The outermost application but for keys. `open` and `drain` may be called from any thread."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._app: ASGIApp | None = None
        self._engine: AsyncEngine | None = None
        self._draining = False
        self.in_flight = 0  # requests inside the application

    def open(self, app: ASGIApp, engine: AsyncEngine) -> None:
        """The model is loaded: let requests in."""
        self._engine, self._app = engine, app

    def drain(self) -> None:
        """Let no new request in."""
        self._draining = True

    @property
    def engine(self) -> AsyncEngine | None:
        return self._engine

    @property
    def state(self) -> State:
        if self._engine is not None and self._engine.failure is not None:
            return "failed"
        if self._draining:
            return "draining"
        if self._app is None or self._engine is None:
            return "loading"
        return "ready" if self._engine.alive else "failed"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            return
        response = self._too_many_headers(scope) or self._own(scope)
        if response is None and self.state == "loading" and is_page(scope):
            response = await serve_page(Request(scope))
        response = response or self._refusal(scope)
        if response is not None:
            await response(scope, receive, send)
            return
        assert self._app is not None, "ready"
        self.in_flight += 1
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not self._draining:
                raise
            # The last seconds are over; uvicorn would print a traceback for each that is still here.
        finally:
            self.in_flight -= 1

    def _own(self, scope: Scope) -> Response | None:
        """The answer of this layer's own endpoints."""
        if scope["path"] not in OPEN_PATHS:
            return None
        if scope["method"] not in ("GET", "HEAD"):
            message = f"Method Not Allowed: {scope['method'][:20]} {scope['path']}"
            return ApiError(message, status=405, headers={"Allow": "GET, HEAD"}).response()
        if scope["path"] == "/version":
            return JSONResponse({"version": __version__})
        return self._refusal(scope) or JSONResponse({"status": "ok"})

    def _refusal(self, scope: Scope) -> Response | None:
        error = self._not_serving()
        return error.response(ErrorStyle.of(scope["path"])) if error is not None else None

    def _not_serving(self) -> ApiError | None:
        match self.state:
            case "ready":
                return None
            case "loading":
                return _unavailable("the model is being loaded", "model_loading")
            case "draining":
                return _unavailable("the server is shutting down", "shutting_down")
        return engine_down()

    def _too_many_headers(self, scope: Scope) -> Response | None:
        headers = scope["headers"]
        size = sum(len(name) + len(value) + 4 for name, value in headers) + len(scope["raw_path"])
        size += len(scope["query_string"])
        if len(headers) <= self._limits.headers and size <= self._limits.header_bytes:
            return None
        message = (
            f"the request's headers are too large; got {len(headers)} lines and {size} bytes, "
            f"expected at most {self._limits.headers} and {self._limits.header_bytes}"
        )
        return ApiError(
            message, status=431, code="headers_too_large", headers={"Connection": "close"}
        ).response(ErrorStyle.of(scope["path"]))


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(message, status=503, code=code, headers=retry_after())
