"""GET /openapi.json: every endpoint with what it takes and gives, for programs.

One line per endpoint in ENDPOINTS; request bodies are those the pydantic models read (openapi_schemas.py),
answers are described by the fields that are always there. A test compares the paths with the routes, and
schemathesis compares the rest with a running server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel

from quickdraft import __version__
from quickdraft.server.anthropic_schemas import COUNT_OFF, MESSAGES_OFF, CountRequest, MessagesRequest
from quickdraft.server.body import CHAT_OFF, COMPLETION_OFF, NOTHING_OFF, OffFields
from quickdraft.server.errors import ErrorStyle
from quickdraft.server.front import OPEN_PATHS
from quickdraft.server.openapi_schemas import JsonSchema, request_schemas
from quickdraft.server.responses_schemas import RESPONSES_OFF, ResponsesRequest
from quickdraft.server.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_SCHEMAS: Final = "#/components/schemas/"
_JSON, _EVENTS = "application/json", "text/event-stream"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path. `answer` names the fields a 200 always has, with their JSON types."""

    method: str
    path: str
    summary: str
    answer: dict[str, str] = field(default_factory=dict)
    request: type[BaseModel] | None = None
    off: OffFields = field(default_factory=dict)  # fields that may only be off
    streams: bool = False
    query: tuple[str, ...] = ()
    content: str = _JSON


_CHOICES: Final = {
    "id": "string", "object": "string", "created": "integer", "model": "string", "choices": "array",
    "usage": "object",
}  # fmt: skip
_COUNT: Final = {"count": "integer", "max_model_len": "integer", "tokens": "array"}
_STORED: Final = {"id": "string", "object": "string", "output": "array", "status": "string"}
_LISTED: Final = {"object": "string", "data": "array"}
ENDPOINTS: Final = (
    Endpoint("post", "/v1/chat/completions", "Answer messages", _CHOICES, ChatRequest, CHAT_OFF, True),
    Endpoint("post", "/v1/completions", "Continue texts", _CHOICES, CompletionRequest, COMPLETION_OFF, True),
    Endpoint("post", "/v1/responses", "Answer items", _STORED, ResponsesRequest, RESPONSES_OFF, True),
    Endpoint("get", "/v1/responses/{response_id}", "A stored response", _STORED, query=("stream",)),
    Endpoint("delete", "/v1/responses/{response_id}", "Forget one", {"id": "string", "deleted": "boolean"}),
    Endpoint(
        "get", "/v1/responses/{response_id}/input_items", "What it answered", _LISTED,
        query=("order", "limit", "after"),
    ),
    Endpoint(
        "post", "/v1/messages", "Answer messages, as Anthropic's API",
        {"id": "string", "type": "string", "role": "string", "content": "array", "usage": "object"},
        MessagesRequest, MESSAGES_OFF, True,
    ),
    Endpoint(
        "post", "/v1/messages/count_tokens", "Count a prompt's tokens", {"input_tokens": "integer"},
        CountRequest, COUNT_OFF,
    ),
    *(
        endpoint
        for prefix in ("", "/v1")
        for endpoint in (
            Endpoint("post", f"{prefix}/tokenize", "Text to ids", _COUNT, TokenizeRequest, NOTHING_OFF),
            Endpoint("post", f"{prefix}/detokenize", "Ids to text", {"prompt": "string"}, DetokenizeRequest),
        )
    ),
    Endpoint("get", "/v1/models", "What is served", _LISTED),
    Endpoint("get", "/v1/models/{name}", "One of them", {"id": "string", "max_model_len": "integer"}),
    Endpoint("get", "/load", "Queue and cache now", {"server_load": "integer", "kv_cache": "object"}),
    Endpoint("get", "/metrics", "Counters for Prometheus", content="text/plain"),
    Endpoint("get", "/health", "Whether requests are served", {"status": "string"}),
    Endpoint("get", "/version", "quickdraft's version", {"version": "string"}),
    Endpoint("get", "/openapi.json", "This document", {"openapi": "string", "paths": "object"}),
)  # fmt: skip
# Statuses of an error, by whether the request has a body.
_WITH_BODY: Final = (400, 401, 404, 405, 408, 413, 415, 429, 431, 503, 504, 529)
_WITHOUT: Final = (400, 401, 404, 405, 431, 503)


def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method] = _operation(endpoint)
    models = {one.request: one.off for one in ENDPOINTS if one.request is not None}
    text = {"type": "string"}
    schemas = {
        **request_schemas(models, _SCHEMAS),
        "OpenAIError": _always({"error": _always({"message": text, "type": text, "param": {}, "code": {}})}),
        "AnthropicError": _always(
            {"type": {"const": "error"}, "error": _always({"type": text, "message": text})}
        ),
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "quickdraft",
            "version": __version__,
            "description": "Unknown fields, and known ones with an unsupported value, are a 400 that names "
            "them; null means absent. Where the server has no keys, none is asked for.",
        },
        "paths": paths,
        "security": [{"bearer": []}, {"key": []}],
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    answer: JsonSchema = _always({name: {"type": kind} for name, kind in endpoint.answer.items()})
    content: dict[str, Any] = {endpoint.content: {"schema": answer if endpoint.answer else {}}}
    if endpoint.streams:
        content[_EVENTS] = {"schema": {"type": "string"}}
    anthropic = ErrorStyle.of(endpoint.path) is ErrorStyle.ANTHROPIC
    error = {"$ref": _SCHEMAS + ("AnthropicError" if anthropic else "OpenAIError")}
    responses: dict[str, Any] = {"200": {"description": endpoint.summary, "content": content}}
    for status in _WITH_BODY if endpoint.request is not None else _WITHOUT:
        responses[str(status)] = {"description": "An error", "content": {_JSON: {"schema": error}}}
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": responses}
    if endpoint.request is not None:
        body = {"schema": {"$ref": _SCHEMAS + endpoint.request.__name__}}
        operation["requestBody"] = {"required": True, "content": {_JSON: body}}
    if endpoint.path in OPEN_PATHS:
        operation["security"] = []
    named = [part[1:-1] for part in endpoint.path.split("/") if part.startswith("{")]
    parameters = [(name, "path") for name in named] + [(name, "query") for name in endpoint.query]
    if parameters:
        operation["parameters"] = [
            {"name": name, "in": where, "required": where == "path", "schema": {"type": "string"}}
            for name, where in parameters
        ]
    return operation


def _always(properties: dict[str, Any]) -> JsonSchema:
    return {"type": "object", "properties": properties, "required": list(properties)}
