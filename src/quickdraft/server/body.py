"""From bytes of a request to a JSON object that holds no null and no field quickdraft cannot honour.

Three rules live here: bodies have limits of size, number and time, null means absent everywhere but
in JSON schemas,
and a known OpenAI field that quickdraft lacks is accepted only with the value that means "off".
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from starlette.requests import Request

from quickdraft.server.errors import ApiError, field_path, retry_after
from quickdraft.server.limits import Limits

MAX_DEPTH: Final = 64
MAX_VALUES: Final = 1 << 21  # in one body, at all depths
NEVER: Final[Callable[[Any], bool]] = lambda value: False  # noqa: E731
_ONE: Final[Callable[[Any], bool]] = lambda value: value == 1 and not isinstance(value, bool)  # noqa: E731
OffFields = Mapping[str, Callable[[Any], bool]]
Path = tuple[int | str, ...]
# Known OpenAI fields without an implementation here -> is this value the one that means "off"?
CHAT_OFF: Final[OffFields] = {
    "functions": lambda value: value == [],
    "function_call": lambda value: value in ("none", "auto"),
    "store": lambda value: value is False,
    "modalities": lambda value: value == ["text"],
    "service_tier": lambda value: value in ("auto", "default"),
    "verbosity": lambda value: value == "medium",
    "audio": NEVER,
    "web_search_options": NEVER,
    "prompt_cache_retention": NEVER,
}
COMPLETION_OFF: Final[OffFields] = {"best_of": _ONE, "suffix": NEVER}
_SCHEMAS: Final = (("response_format", "json_schema", "schema"), ("structured_outputs", "json"))
NOTHING_OFF: Final[OffFields] = {}


class Bodies:
    """Reads bodies, all of them together within limits.all_bodies_bytes: what `read` gave must be
    given back with `release` once it has been worked on."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.held_bytes = 0

    async def read(self, request: Request) -> bytes:
        """The whole body; 415 when it is not declared as JSON, 413 when it is too large, 408 when it
        takes too long, 429 when too much is being sent at once."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        # Also keeps web pages out: a browser sends JSON to another origin only after asking.
        if kind != "application/json":
            raise ApiError(
                f"the body must be JSON; got Content-Type {kind[:80]!r}, expected application/json",
                status=415,
                code="unsupported_media_type",
            )
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._limits.body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                async for chunk in request.stream():
                    body += chunk
                    self._hold(len(chunk))
                    if len(body) > self._limits.body_bytes:
                        raise self._too_large()
        except BaseException as error:
            self.release(len(body))
            if isinstance(error, TimeoutError):
                raise self._too_slow(len(body)) from error
            raise
        return bytes(body)

    def release(self, count: int) -> None:
        """A body of `count` bytes is no longer needed."""
        self.held_bytes -= count

    def _hold(self, count: int) -> None:
        self.held_bytes += count
        if self.held_bytes > self._limits.all_bodies_bytes:
            raise ApiError(
                f"more than {self._limits.all_bodies_bytes} bytes of requests are being read at once. "
                "hint: try again later",
                status=429,
                code="too_much_at_once",
                headers=retry_after(),
            )

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._limits.body_bytes} bytes"
        return ApiError(message, status=413, code="body_too_large")

    def _too_slow(self, count: int) -> ApiError:
        return ApiError(
            f"the body did not arrive within {self._limits.body_seconds:g} s; got {count} bytes",
            status=408,
            code="body_timeout",
            headers={"Connection": "close"},
        )


def parse_body(body: bytes, off: OffFields, verbatim: Callable[[Path], bool] | None = None) -> dict[str, Any]:
    """The JSON object in `body`, without nulls and without the fields in `off` that are off. In objects
    whose path is `verbatim` (default: inside the schema of a tool) null is a value and stays."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise ApiError(f"the body is not valid JSON: {reason}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(f"the body must be a JSON object; got {type(value).__name__}", code="invalid_json")
    cleaned: dict[str, Any] = _Cleaning(verbatim or _is_schema).clean(value, ())
    return without_off_fields(cleaned, off)


class _Cleaning:
    """Takes the nulls out of one body, counting what it holds."""

    def __init__(self, verbatim: Callable[[Path], bool]) -> None:
        self._left, self._verbatim = MAX_VALUES, verbatim

    def clean(self, value: Any, path: Path) -> Any:
        """`value` without nulls; ApiError for nesting beyond MAX_DEPTH, more than MAX_VALUES values
        and lone surrogates."""
        if isinstance(value, str):
            _check_unicode(value, path)
        elif isinstance(value, dict):
            self._count(len(value), path)
            for key in value:
                _check_unicode(key, (*path, key))
            keep = self._verbatim(path)
            return {key: self.clean(v, (*path, key)) for key, v in value.items() if keep or v is not None}
        elif isinstance(value, list):
            self._count(len(value), path)
            return [self.clean(item, (*path, index)) for index, item in enumerate(value)]
        return value

    def _count(self, values: int, path: Path) -> None:
        self._left -= values
        if self._left < 0:
            raise ApiError(f"the body holds more than {MAX_VALUES} values", code="invalid_json")
        if len(path) > MAX_DEPTH:
            raise ApiError(f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")


def _is_schema(path: Path) -> bool:
    """Inside a JSON schema, where null is a value."""
    tool = len(path) > 3 and path[0] == "tools" and path[3] == "parameters"
    return tool or any(len(path) > len(one) and path[: len(one)] == one for one in _SCHEMAS)


def _check_unicode(text: str, path: Path) -> None:
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


def without_off_fields(body: dict[str, Any], off: OffFields) -> dict[str, Any]:
    """`body` without the fields in `off`, all of which must be off; ApiError for one that is not."""
    for name in sorted(body.keys() & off.keys()):
        if not off[name](body[name]):
            shown = json.dumps(body[name])[:80]
            raise ApiError(
                f"'{name}' is not supported with this value; got {shown}",
                param=name,
                code="unsupported_parameter",
            )
    return {name: value for name, value in body.items() if name not in off}


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
