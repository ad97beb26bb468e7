"""Requests to a server without keys must name this machine: no name that somebody else may own.

Such a server is on loopback, and any web page that this machine's browser shows may send requests there.
Browsers keep a page from reading the answers of another site, but whoever owns the page's own name can
let it point at loopback: then our answers are the page's own site's. An address or localhost in the Host
header cannot be such a name. It knows no routes but those that tell nothing (front.OPEN_PATHS).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from quickdraft.server.errors import ApiError, ErrorStyle
from quickdraft.server.front import OPEN_PATHS


class HostCheck:
    """`app` for requests whose Host header is an address or localhost; others get 403. A request without
    one comes from no browser and passes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            unknown = next((host for host in _hosts(scope["headers"]) if not _is_no_name(host)), None)
            if unknown is not None:
                await _refusal(unknown).response(ErrorStyle.of(scope["path"]))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _hosts(headers: Iterable[tuple[bytes, bytes]]) -> Iterable[str]:
    return (value.decode("latin-1").strip() for name, value in headers if name.lower() == b"host")


def _is_no_name(host: str) -> bool:
    """An address or localhost, with or without a port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refusal(host: str) -> ApiError:
    return ApiError(
        f"without an API key this server answers requests to an address or to localhost only; got Host "
        f"{host[:80]!a}. hint: start it with an API key (or with --insecure), or let the proxy in front "
        "of it send 'Host: localhost'",
        status=403,
        code="unknown_host",
    )
