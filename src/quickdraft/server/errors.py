"""What clients see when something is wrong: an API's own error shape and the right HTTP status.

Every failure of a request becomes an ApiError here; nothing else in the server builds error bodies.
Paths under /v1/messages get Anthropic's shape, all others OpenAI's.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, Final

from starlette.responses import JSONResponse

from quickdraft.errors import (
    BadParameter,
    CapacityError,
    ContextTooLong,
    EngineError,
    RequestError,
    UnsupportedError,
)

RETRY_AFTER_SECONDS: Final = 5
# Names the layers below use -> the field a client of the chat endpoint wrote.
CHAT_FIELDS: Final[Mapping[str, str]] = {"logprobs": "top_logprobs", "prompt": "messages"}
OWN_FIELDS: Final[Mapping[str, str]] = {}
_ANTHROPIC_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_log = logging.getLogger("quickdraft.server")


class ErrorStyle(Enum):
    """Whose shape an error takes."""

    OPENAI = auto()
    ANTHROPIC = auto()

    @classmethod
    def of(cls, path: str) -> ErrorStyle:
        """The style of the API that a path belongs to."""
        return cls.ANTHROPIC if re.match(r"/v1/messages(/|$)", path) else cls.OPENAI


class ApiError(Exception):
    """An error with its HTTP status, in the parts of OpenAI's error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.headers = dict(headers or {})

    def body(self, style: ErrorStyle = ErrorStyle.OPENAI) -> dict[str, Any]:
        """{"error": {"message", "type", "param", "code"}}, or Anthropic's
        {"type": "error", "error": {"type", "message"}}."""
        if style is ErrorStyle.ANTHROPIC:
            other = "api_error" if self.status >= 500 else "invalid_request_error"
            kind = _ANTHROPIC_KINDS.get(self.status_in(style), other)
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = {429: "rate_limit_error", 404: "not_found_error"}.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def status_in(self, style: ErrorStyle) -> int:
        """The HTTP status: what is 503 elsewhere is Anthropic's 529, overloaded."""
        return 529 if style is ErrorStyle.ANTHROPIC and self.status == 503 else self.status

    def response(self, style: ErrorStyle = ErrorStyle.OPENAI) -> JSONResponse:
        return JSONResponse(self.body(style), status_code=self.status_in(style), headers=self.headers)


def api_error(
    error: Exception, fields: Mapping[str, str] = OWN_FIELDS, style: ErrorStyle = ErrorStyle.OPENAI
) -> ApiError:
    """The ApiError for anything a request can raise; unexpected ones are logged and become 500.

    `fields` gives the endpoint's own names for fields it calls differently.
    """
    match error:
        case ApiError():
            return error
        case ContextTooLong():
            return _too_long(error, fields.get("prompt", "prompt"), style)
        case BadParameter():
            name = fields.get(error.name, error.name)
            message = str(BadParameter(name, got=error.got, expected=error.expected, hint=error.hint))
            return ApiError(message, param=name, code="invalid_value")
        case UnsupportedError():
            return ApiError(str(error), code="unsupported")
        case RequestError():
            return ApiError(str(error), code="invalid_request")
        case CapacityError():
            return ApiError(str(error), status=429, code="queue_full", headers=retry_after())
        case EngineError():
            return engine_down(str(error))
    _log.error("unexpected error while serving a request", exc_info=error)
    return ApiError("internal error; the server's log has the details", status=500, code="internal_error")


def _too_long(error: ContextTooLong, param: str, style: ErrorStyle) -> ApiError:
    """In the words by which clients of each API know that they must shorten the conversation."""
    message = (
        f"This model's maximum context length is {error.max_context_tokens} tokens, but "
        f"'{param}' holds {error.prompt_size} and leaves no room to answer."
    )
    if style is ErrorStyle.ANTHROPIC:
        message = f"prompt is too long: {error.prompt_size} > {error.max_context_tokens - 1} maximum"
    return ApiError(message, param=param, code="context_length_exceeded")


@contextmanager
def told_as(places: Mapping[str, str]) -> Iterator[None]:
    """Errors raised inside name fields as their client wrote them: `places` maps the beginning of a path
    of the chat endpoint ("messages[2]") to this endpoint's ("input[5]")."""
    try:
        yield
    except BadParameter as error:
        name = _place(error.name, places)
        raise BadParameter(name, got=error.got, expected=error.expected, hint=error.hint) from error
    except ApiError as error:
        if error.param is None or (param := _place(error.param, places)) == error.param:
            raise
        message = error.message.replace(f"'{error.param}'", f"'{param}'")
        raise ApiError(
            message, status=error.status, param=param, code=error.code, headers=error.headers
        ) from error


def _place(path: str, places: Mapping[str, str]) -> str:
    """`path` with its longest beginning that is in `places` replaced."""
    known = [one for one in places if path == one or path.startswith((f"{one}.", f"{one}["))]
    if not known:
        return path
    longest = max(known, key=len)
    return places[longest] + path[len(longest) :]


def engine_down(message: str = "the engine is not running") -> ApiError:
    """503 with Retry-After: the engine failed or is stopping."""
    return ApiError(message, status=503, code="engine_unavailable", headers=retry_after())


def field_path(location: Iterable[int | str]) -> str:
    """("messages", 0, "content") -> "messages[0].content", printable and at most 100 characters."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")[:100].encode("utf-8", errors="replace").decode()


def retry_after() -> dict[str, str]:
    """The header that asks a client to wait."""
    return {"Retry-After": str(RETRY_AFTER_SECONDS)}
