"""The files of the web page and their HTTP answers.

They hold no secret and no state, so they are served without a key (auth.py); what the page shows comes
through the API, with the visitor's own key. The policy lets a page of ours load nothing but these
files, run no inline script, and talk to no other server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_INDEX: Final = "index.html"


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is sent."""

    body: bytes
    media_type: str
    tag: str  # its ETag


def page_files() -> Mapping[str, PageFile]:
    """URL path -> file: the index at /, everything else under /page/."""
    found: dict[str, PageFile] = {}
    for entry in sorted(resources.files(__package__ or "").iterdir(), key=lambda one: one.name):
        kind = _TYPES.get(entry.name.rpartition(".")[2])
        if kind is not None:
            body = entry.read_bytes()
            path = "/" if entry.name == _INDEX else f"/page/{entry.name}"
            found[path] = PageFile(body, kind, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return found


PAGE_FILES: Final = page_files()


def is_page(scope: Scope) -> bool:
    """Whether a request over HTTP asks for one of PAGE_FILES."""
    return scope["method"] in ("GET", "HEAD") and scope["path"] in PAGE_FILES


async def serve_page(request: Request) -> Response:
    """The file at the request's path, which is one of PAGE_FILES; 304 when the browser has it."""
    file = PAGE_FILES[request.url.path]
    headers = {
        "ETag": file.tag,
        "Cache-Control": "no-cache",
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
    }
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.media_type, headers=headers)
