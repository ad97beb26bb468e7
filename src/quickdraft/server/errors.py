"""What clients see when something is wrong: OpenAI's error shape and the right HTTP status.

Every failure of a request becomes an ApiError here; nothing else in the server builds error bodies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
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
_log = logging.getLogger("quickdraft.server")


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

    def body(self) -> dict[str, Any]:
        """{"error": {"message", "type", "param", "code"}}."""
        kind = {429: "rate_limit_error", 404: "not_found_error"}.get(self.status, "invalid_request_error")
        if self.status >= 500:
            kind = "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def api_error(error: Exception, fields: Mapping[str, str] = OWN_FIELDS) -> ApiError:
    """The ApiError for anything a request can raise; unexpected ones are logged and become 500.

    `fields` gives the endpoint's own names for fields it calls differently.
    """
    match error:
        case ApiError():
            return error
        case ContextTooLong():
            param = fields.get("prompt", "prompt")
            return ApiError(
                f"This model's maximum context length is {error.max_context_tokens} tokens, but "
                f"'{param}' holds {error.prompt_size} and leaves no room to answer.",
                param=param,
                code="context_length_exceeded",
            )
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
