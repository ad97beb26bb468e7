"""From bytes of a request to a JSON object that holds no null and no field quickdraft cannot honour.

Three rules live here: a body has a size limit, null means absent everywhere, and a known OpenAI
field that quickdraft lacks is accepted only with the value that means "off".
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from starlette.requests import Request

from quickdraft.server.errors import ApiError, field_path
from quickdraft.server.limits import Limits

MAX_DEPTH: Final = 64
_NEVER: Final[Callable[[Any], bool]] = lambda value: False  # noqa: E731
_ONE: Final[Callable[[Any], bool]] = lambda value: value == 1 and not isinstance(value, bool)  # noqa: E731
OffFields = Mapping[str, Callable[[Any], bool]]
# Known OpenAI fields without an implementation here -> is this value the one that means "off"?
CHAT_OFF: Final[OffFields] = {
    "n": _ONE,
    "tools": lambda value: value == [],
    "tool_choice": lambda value: value in ("none", "auto"),
    "parallel_tool_calls": lambda value: isinstance(value, bool),  # concerns tools only
    "functions": lambda value: value == [],
    "function_call": lambda value: value in ("none", "auto"),
    "response_format": lambda value: value == {"type": "text"},
    "store": lambda value: value is False,
    "modalities": lambda value: value == ["text"],
    "reasoning_effort": lambda value: value == "none",
    "service_tier": lambda value: value in ("auto", "default"),
    "verbosity": lambda value: value == "medium",
    "audio": _NEVER,
    "prediction": _NEVER,
    "web_search_options": _NEVER,
    "prompt_cache_retention": _NEVER,
}
COMPLETION_OFF: Final[OffFields] = {"n": _ONE, "best_of": _ONE, "suffix": _NEVER}
NOTHING_OFF: Final[OffFields] = {}


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body; 415 when it is not declared as JSON, 413 when it is too large, 408 when it
    takes too long."""
    limit_bytes = limits.body_bytes
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Also keeps web pages out: a browser sends JSON to another origin only after asking.
    if kind != "application/json":
        raise ApiError(
            f"the body must be JSON; got Content-Type {kind[:80]!r}, expected application/json",
            status=415,
            code="unsupported_media_type",
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit_bytes:
                    raise _too_large(limit_bytes)
    except TimeoutError as error:
        raise ApiError(
            f"the body did not arrive within {limits.body_seconds:g} s; got {len(body)} bytes",
            status=408,
            code="body_timeout",
            headers={"Connection": "close"},
        ) from error
    return bytes(body)


def parse_body(body: bytes, off: OffFields) -> dict[str, Any]:
    """The JSON object in `body`, without nulls and without the fields in `off` that are off."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise ApiError(f"the body is not valid JSON: {reason}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(f"the body must be a JSON object; got {type(value).__name__}", code="invalid_json")
    cleaned: dict[str, Any] = _clean(value, ())
    return _without_off_fields(cleaned, off)


def _clean(value: Any, path: tuple[int | str, ...]) -> Any:
    """`value` without nulls; ApiError for nesting beyond MAX_DEPTH and for lone surrogates."""
    if isinstance(value, str):
        _check_unicode(value, path)
    elif isinstance(value, dict):
        _check_depth(path)
        for key in value:
            _check_unicode(key, (*path, key))
        return {key: _clean(item, (*path, key)) for key, item in value.items() if item is not None}
    elif isinstance(value, list):
        _check_depth(path)
        return [_clean(item, (*path, index)) for index, item in enumerate(value)]
    return value


def _check_depth(path: tuple[int | str, ...]) -> None:
    if len(path) > MAX_DEPTH:
        raise ApiError(f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")


def _check_unicode(text: str, path: tuple[int | str, ...]) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = field_path(path)
        raise ApiError(
            f"'{where}' is not valid Unicode: lone surrogate at character {error.start}. "
            "hint: the text was probably cut in the middle of a character",
            param=where,
            code="invalid_value",
        ) from error


def _without_off_fields(body: dict[str, Any], off: OffFields) -> dict[str, Any]:
    for name in sorted(body.keys() & off.keys()):
        if not off[name](body[name]):
            shown = json.dumps(body[name])[:80]
            raise ApiError(
                f"'{name}' is not supported with this value; got {shown}",
                param=name,
                code="unsupported_parameter",
            )
    return {name: value for name, value in body.items() if name not in off}


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(f"the body is larger than {limit_bytes} bytes", status=413, code="body_too_large")


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
