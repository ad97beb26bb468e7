"""The HTTP application: three endpoints over one engine, every error in OpenAI's shape.

It wires requests to the translator, the engine and an answer; parsing, shapes and streaming live
in their own modules. It never decides a token and owns no model.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from quickdraft.server.answer import Answer
from quickdraft.server.body import read_body
from quickdraft.server.engine import AsyncEngine, Output
from quickdraft.server.errors import ApiError, api_error, engine_down
from quickdraft.server.request_log import CLIENT_GONE, RequestLog
from quickdraft.server.stream import ClientGone, EventStream, chat_events, unless_disconnected
from quickdraft.server.translate import ChatCall, Translator, unknown_model
from quickdraft.types import Speculation

MAX_BODY_BYTES: Final = 32 << 20
INLINE_BODY_BYTES: Final = 16 << 10  # up to here parsing and tokenizing take about a millisecond


class Service:
    """The endpoints, as methods over one engine."""

    def __init__(self, engine: AsyncEngine, translator: Translator, max_body_bytes: int) -> None:
        self._engine, self._translator, self._max_body_bytes = engine, translator, max_body_bytes
        self._started = int(time.time())

    async def health(self) -> Response:
        """200 when requests can be served, else 503 with Retry-After."""
        if not self._engine.alive:
            return engine_down().response()
        return JSONResponse({"status": "ok"})

    async def models(self) -> Response:
        data = [self._model(name) for name in self._translator.names]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, name: str) -> Response:
        if name not in self._translator.names:
            return unknown_model(name, self._translator.names).response()
        return JSONResponse(self._model(name))

    async def chat_completions(self, request: Request) -> Response:
        log = RequestLog(f"chatcmpl-{uuid.uuid4().hex}")
        try:
            call = log.call = await self._translate(request)
            if call.stream:
                return self._stream(call, log)
            response = await self._complete(call, log, request)
        except (ClientGone, ClientDisconnect):
            log.status = CLIENT_GONE
            response = Response(status_code=CLIENT_GONE)  # nobody is there to read it
        except Exception as error:  # becomes an answer; unexpected ones are logged in api_error
            failure = api_error(error)
            log.status, log.error = failure.status, failure.message
            response = failure.response()
        log.write()
        return response

    async def _translate(self, request: Request) -> ChatCall:
        if not self._engine.alive:
            raise engine_down()
        body = await read_body(request, self._max_body_bytes)
        if len(body) <= INLINE_BODY_BYTES:
            return self._translator.chat(body)
        return await asyncio.to_thread(self._translator.chat, body)

    async def _complete(self, call: ChatCall, log: RequestLog, request: Request) -> Response:
        answer = log.answer = self._answer(call, log)

        async def collect() -> None:
            async with aclosing(self._outputs(call, log)) as outputs:
                async for output in outputs:
                    answer.add(output)

        await unless_disconnected(request.receive, collect())
        return JSONResponse(answer.completion())

    def _stream(self, call: ChatCall, log: RequestLog) -> Response:
        answer = log.answer = self._answer(call, log)

        def on_error(failure: ApiError) -> None:
            log.status, log.error = failure.status, failure.message

        def on_end(client_gone: bool) -> None:
            if client_gone:
                log.status = CLIENT_GONE
            log.write()

        return EventStream(chat_events(answer, self._outputs(call, log), on_error), on_end)

    def _answer(self, call: ChatCall, log: RequestLog) -> Answer:
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None  # the translator made prompt ids with it
        return Answer(log.request_id, call, tokenizer)

    def _outputs(self, call: ChatCall, log: RequestLog) -> AsyncGenerator[Output, None]:
        return self._engine.generate(call.prompt_ids, call.params, request_id=log.request_id)

    def _model(self, name: str) -> dict[str, object]:
        speculation = {
            "default": str(self._translator.speculation),
            "sources": list(self._engine.sources),
        }
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "quickdraft",
            "max_model_len": self._engine.max_context_tokens,
            "speculation": speculation,
        }


def create_app(
    engine: AsyncEngine,
    *,
    served_names: Sequence[str] = (),
    speculation: Speculation = Speculation(auto=True),
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """The application over `engine`. Requests may name the model engine.name or any of `served_names`;
    `speculation` applies to requests that do not ask for one."""
    names = tuple(dict.fromkeys((engine.name, *served_names)))
    service = Service(engine, Translator(engine, names, speculation), max_body_bytes)
    app = FastAPI(title="quickdraft", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_api_route("/health", service.health, methods=["GET"])
    app.add_api_route("/v1/models", service.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", service.model, methods=["GET"])
    app.add_api_route("/v1/chat/completions", service.chat_completions, methods=["POST"])
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _any_error)
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path[:200]}"
    return ApiError(message, status=error.status_code, headers=error.headers).response()


async def _any_error(request: Request, error: Exception) -> Response:
    return api_error(error).response()
