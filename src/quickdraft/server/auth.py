"""API keys: a layer outside the application that lets nothing pass without one.

It knows no routes: whatever is behind it, known or not, is closed but for GET and HEAD of
front.OPEN_PATHS and of the web page's files, which hold no secret. Keys are kept as digests,
compared in constant time, and never shown.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quickdraft.server.errors import ApiError, ErrorStyle
from quickdraft.server.front import OPEN_PATHS
from quickdraft.server.page.files import PAGE_FILES

_OPEN: Final = frozenset((*OPEN_PATHS, *PAGE_FILES))
_CHALLENGE: Final = {"WWW-Authenticate": "Bearer"}


class KeyCheck:
    """`app` behind keys; without any key everything passes."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode("ascii")) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._digests or scope["type"] == "lifespan" or _is_open(scope):
            await self._app(scope, receive, send)
            return
        given = list(_given(scope["headers"]))
        if True in [self._known(key) for key in given]:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _refusal(bool(given), scope["path"])(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _known(self, key: bytes) -> bool:
        """Compares with every key, however early one fits."""
        digest, known = _digest(key), False
        for one in self._digests:
            known |= hmac.compare_digest(one, digest)
        return known


def _is_open(scope: Scope) -> bool:
    return scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and scope["path"] in _OPEN


def _given(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[bytes]:
    """Keys in Authorization: Bearer and x-api-key."""
    for name, value in headers:
        if name.lower() == b"x-api-key":
            yield value.strip()
        elif name.lower() == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                yield key.strip()


def _refusal(given: bool, path: str) -> Response:
    what = "the API key is not known" if given else "an API key is needed"
    return ApiError(
        f"{what}. hint: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        status=401,
        code="invalid_api_key",
        headers=_CHALLENGE,
    ).response(ErrorStyle.of(path))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
