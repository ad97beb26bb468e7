"""The page's files: complete, of this server alone, nothing inline; and how they are sent."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from quickdraft.server.page.files import PAGE_FILES, POLICY
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import complete_app, live_server

NAMES = sorted(PAGE_FILES)
TEXTS = {name: file.body.decode() for name, file in PAGE_FILES.items()}
# Neither is fetched: a namespace, and patterns and words that begin with a scheme.
HARMLESS = re.compile(r"http://www\.w3\.org/2000/svg|https\?:|http, https")


def test_every_file_of_the_folder_is_served() -> None:
    folder = Path(__file__).parents[2] / "src" / "quickdraft" / "server" / "page"
    static = {one.name for one in folder.iterdir() if one.suffix not in (".py", ".pyc") and one.is_file()}
    assert {name.removeprefix("/page/") for name in NAMES} == static - {"index.html"} | {"/"}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_file_names_is_here_and_nothing_is_elsewhere(name: str) -> None:
    text = TEXTS[name]
    assert not re.search(r"https?://", HARMLESS.sub("", text))
    for imported in re.findall(r'from "\./([^"]+)"', text):
        assert f"/page/{imported}" in PAGE_FILES
    for linked in re.findall(r'(?:src|href)="(page/[^"]+)"', text):
        assert f"/{linked}" in PAGE_FILES
    assert len(text.splitlines()) <= 300


def test_nothing_is_inline_and_no_text_becomes_html() -> None:
    index = TEXTS["/"]
    assert re.findall(r"<script(?![^>]*\bsrc=)", index) == [] and "<style" not in index
    assert not re.search(r"\son\w+=|\sstyle=|javascript:", index)
    for name in NAMES:
        if name.endswith(".js"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", TEXTS[name]
            )
    assert "'unsafe" not in POLICY and "default-src 'none'" in POLICY


def test_how_they_are_sent() -> None:
    app = complete_app(FakeEngine(), keys=("secret-key",))
    with live_server(app) as url, httpx.Client(base_url=url, trust_env=False) as client:
        for name, file in PAGE_FILES.items():
            reply = client.get(name)
            assert reply.status_code == 200 and reply.content == file.body
            assert reply.headers["content-security-policy"] == POLICY
            assert reply.headers["content-type"] == file.media_type
            again = client.get(name, headers={"If-None-Match": file.tag})
            assert again.status_code == 304 and again.content == b""
        for name in ("/page/", "/page/files.py", "/page/none.js", "/page/../page/files.py"):
            assert client.get(name).status_code == 401
            assert client.get(name, headers={"x-api-key": "secret-key"}).status_code == 404
