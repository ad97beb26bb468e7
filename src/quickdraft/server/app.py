"""The HTTP application: the endpoints over one engine, every error in its API's shape.

It wires requests to the translator, the engine and an answer; parsing, shapes and streaming live
in their own modules. It never decides a token and owns no model. Whether a request gets here at all
is decided before: auth.py, front.py.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from quickdraft.errors import ConfigError
from quickdraft.server import responses_routes
from quickdraft.server.answer import Answer, Choice
from quickdraft.server.anthropic_shape import ANTHROPIC_FRAMING, MessageShape
from quickdraft.server.anthropic_translate import ANTHROPIC_FIELDS, AnthropicTranslator, check_version
from quickdraft.server.body import Bodies
from quickdraft.server.engine import AsyncEngine
from quickdraft.server.errors import CHAT_FIELDS, OWN_FIELDS, ApiError, ErrorStyle, api_error, engine_down
from quickdraft.server.limits import Limits
from quickdraft.server.metrics import CONTENT_TYPE, Metrics
from quickdraft.server.page.files import PAGE_FILES, serve_page
from quickdraft.server.request_log import CLIENT_GONE, RequestLog
from quickdraft.server.response_store import ResponseStore
from quickdraft.server.responses_shape import RESPONSES_FRAMING, ResponseShape
from quickdraft.server.responses_translate import RESPONSES_FIELDS, ResponsesTranslator
from quickdraft.server.shapes import ChatShape, CompletionShape, Shape
from quickdraft.server.stream import (
    OPENAI_FRAMING,
    ClientGone,
    EventStream,
    Framing,
    answer_events,
    unless_disconnected,
)
from quickdraft.server.structured import may_compile
from quickdraft.server.text_tools import TextTools
from quickdraft.server.translate import Call, Translator, unknown_model
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import ReasoningParser, Speculation, ToolCallParser

T = TypeVar("T")
INLINE_BODY_BYTES: Final = 16 << 10  # up to here parsing and tokenizing take about a millisecond


@dataclass(frozen=True, slots=True)
class Api:
    """How one endpoint reads its requests and writes its answers."""

    name: str
    id_prefix: str
    fields: Mapping[str, str]  # names of the layers below -> names of this endpoint
    translate: Callable[[bytes], Call]
    shape: Callable[[Answer, Tokenizer], Shape]
    framing: Framing = OPENAI_FRAMING
    errors: ErrorStyle = ErrorStyle.OPENAI


class Service:
    """The endpoints, as methods over one engine."""

    def __init__(self, engine: AsyncEngine, translator: Translator, limits: Limits) -> None:
        self._engine, self._translator, self._limits = engine, translator, limits
        self._bodies = Bodies(limits)
        self._started = int(time.time())
        self._text = TextTools(translator)
        self._metrics = Metrics(engine.name, engine.metrics)
        self._chat = Api("chat", "chatcmpl-", CHAT_FIELDS, translator.chat, ChatShape)
        self._completion = Api("completion", "cmpl-", OWN_FIELDS, translator.completion, CompletionShape)
        self._store = ResponseStore()
        self._responses = Api(
            "responses",
            "resp_",
            RESPONSES_FIELDS,
            ResponsesTranslator(translator, self._store).responses,
            lambda answer, tokenizer: ResponseShape(answer, tokenizer, self._store),
            RESPONSES_FRAMING,
        )
        self._anthropic = AnthropicTranslator(translator)
        self._messages = Api(
            "messages",
            "msg_",
            ANTHROPIC_FIELDS,
            self._anthropic.messages,
            MessageShape,
            ANTHROPIC_FRAMING,
            ErrorStyle.ANTHROPIC,
        )

    async def models(self) -> Response:
        data = [self._model(name) for name in self._translator.names]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, name: str) -> Response:
        if name not in self._translator.names:
            return unknown_model(name, self._translator.names).response()
        return JSONResponse(self._model(name))

    async def metrics(self) -> Response:
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE)

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, self._chat)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, self._completion)

    async def messages(self, request: Request) -> Response:
        return await self._answer(request, self._messages)

    async def responses(self, request: Request) -> Response:
        return await self._answer(request, self._responses)

    async def stored(self, request: Request, response_id: str) -> Response:
        """What is asked of a stored response: the response, its deletion, or the items before it."""
        works = {"GET": responses_routes.retrieve, "DELETE": responses_routes.delete}
        listing = request.url.path.endswith("/input_items")
        work = responses_routes.input_items if listing else works[request.method]
        try:
            return JSONResponse(work(self._store, response_id, request.query_params))
        except Exception as error:
            return api_error(error).response()

    async def count_tokens(self, request: Request) -> Response:
        return await self._convert(request, self._anthropic.count)

    async def tokenize(self, request: Request) -> Response:
        return await self._convert(request, self._text.tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._convert(request, self._text.detokenize)

    async def _answer(self, request: Request, api: Api) -> Response:
        log = RequestLog(f"{api.id_prefix}{uuid.uuid4().hex}")
        try:
            if not self._engine.alive:
                raise engine_down()
            check_version(request.headers)
            call = log.call = await self._read(request, api.translate)
            answer = self._new_answer(call, log)
            await answer.start(self._engine)
            log.answer = answer
            shape = api.shape(answer, self._translator.tokenizer)
            if call.stream:
                return self._stream(answer, shape, api, log)
            response = await self._complete(answer, shape, request)
        except (ClientGone, ClientDisconnect):
            log.status = CLIENT_GONE
            response = Response(status_code=CLIENT_GONE)  # nobody is there to read it
        except Exception as error:  # becomes an answer; unexpected ones are logged in api_error
            failure = api_error(error, api.fields, api.errors)
            log.status, log.error = failure.status_in(api.errors), failure.message
            response = failure.response(api.errors)
        self._ended(api, log)
        return response

    async def _convert(self, request: Request, work: Callable[[bytes], dict[str, Any]]) -> Response:
        style = ErrorStyle.of(request.url.path)
        try:
            check_version(request.headers)
            return JSONResponse(await self._read(request, work))
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE)
        except Exception as error:
            return api_error(error, style=style).response(style)

    async def _read(self, request: Request, work: Callable[[bytes], T]) -> T:
        """The body, worked on here when it is small and in a thread when it is not."""
        body = await self._bodies.read(request)
        try:
            # A small body may continue a long conversation that is stored here.
            long = len(body) > INLINE_BODY_BYTES or b'"previous_response_id"' in body
            if not long and not may_compile(body):
                return work(body)
            return await asyncio.to_thread(work, body)
        finally:
            self._bodies.release(len(body))

    def _new_answer(self, call: Call, log: RequestLog) -> Answer:
        def on_tokens(choice: Choice, tokens: int, gap: float | None) -> None:
            self._metrics.tokens(choice, tokens, gap, log.arrived)

        seconds = self._limits.request_seconds
        return Answer(
            log.request_id,
            call,
            self._translator.tokenizer,
            arrived=log.arrived,
            seconds=seconds,
            on_tokens=on_tokens,
        )

    async def _complete(self, answer: Answer, shape: Shape, request: Request) -> Response:
        async def collect() -> None:
            async with aclosing(answer.run()) as outputs:
                async for _ in outputs:
                    pass

        async with aclosing(answer):
            await unless_disconnected(request.receive, collect())
        return JSONResponse(shape.whole())

    def _stream(self, answer: Answer, shape: Shape, api: Api, log: RequestLog) -> Response:
        def on_error(failure: ApiError) -> None:
            log.status, log.error = failure.status_in(api.errors), failure.message

        def on_end(client_gone: bool) -> None:
            if client_gone:
                log.status = CLIENT_GONE
            self._ended(api, log)

        events = answer_events(answer, shape, api.framing, on_error, fields=api.fields, style=api.errors)
        return EventStream(answer, events, on_end, self._limits.ping_seconds, api.framing.ping)

    def _ended(self, api: Api, log: RequestLog) -> None:
        log.write()
        self._metrics.ended(api.name, log)

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
    reasoning_parser: ReasoningParser = ReasoningParser.AUTO,
    tool_call_parser: ToolCallParser = ToolCallParser.AUTO,
    thinking_budget: int | None = None,
    limits: Limits | None = None,
) -> FastAPI:
    """The application over `engine`. Requests may name the model engine.name or any of `served_names`;
    `speculation` and `thinking_budget` apply to requests that do not ask for one; the parsers say how answers
    are read. ConfigError for a budget of a model that does not think."""
    names = tuple(dict.fromkeys((engine.name, *served_names)))
    translator = Translator(engine, names, speculation, reasoning_parser, tool_call_parser, thinking_budget)
    if thinking_budget is not None and not translator.formats.reasoning:
        raise ConfigError("--thinking-budget is for models that think", got=f"model {engine.name}")
    service = Service(engine, translator, limits or Limits())
    app = FastAPI(title="quickdraft", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_api_route("/metrics", service.metrics, methods=["GET"])
    app.add_api_route("/v1/models", service.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", service.model, methods=["GET"])
    app.add_api_route("/v1/chat/completions", service.chat_completions, methods=["POST"])
    app.add_api_route("/v1/completions", service.completions, methods=["POST"])
    app.add_api_route("/v1/responses", service.responses, methods=["POST"])
    app.add_api_route("/v1/responses/{response_id}", service.stored, methods=["GET", "DELETE"])
    app.add_api_route("/v1/responses/{response_id}/input_items", service.stored, methods=["GET"])
    app.add_api_route("/v1/messages", service.messages, methods=["POST"])
    app.add_api_route("/v1/messages/count_tokens", service.count_tokens, methods=["POST"])
    for prefix in ("", "/v1"):
        app.add_api_route(f"{prefix}/tokenize", service.tokenize, methods=["POST"])
        app.add_api_route(f"{prefix}/detokenize", service.detokenize, methods=["POST"])
    for path in PAGE_FILES:
        app.add_api_route(path, serve_page, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _any_error)
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path[:200]}"
    style = ErrorStyle.of(request.url.path)
    return ApiError(message, status=error.status_code, headers=error.headers).response(style)


async def _any_error(request: Request, error: Exception) -> Response:
    return api_error(error).response(ErrorStyle.of(request.url.path))
