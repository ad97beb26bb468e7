"""The web page in headless Chromium over a scripted engine, for the tests that drive it.

Needs Debian's `chromium` (or any Chromium named chromium, chromium-browser or google-chrome) and the package
playwright, which drives it; tests are skipped with that reason where one is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.live_server import complete_app, live_server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
REPLY = (
    "# Title\n\nSome **bold** text, `code` and a [link](https://example.com/a).\n\n"
    "- one\n- two\n\n```python\nprint(1 < 2)\n```\n\n<script>window.hacked = 1</script> ünd 🎉."
)


@pytest.fixture(scope="module")
def page_engine() -> FakeEngine:
    return FakeEngine(max_context_tokens=100_000, sources=("prediction", "lookup", "mtp"))


@pytest.fixture(scope="module")
def page_url(page_engine: FakeEngine) -> Iterator[str]:
    with live_server(complete_app(page_engine)) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Not for longer than a module: its driver runs an event loop in this thread, and others want their own.
    playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium was found on this machine")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, page_url: str, page_engine: FakeEngine) -> Iterator[Any]:
    """The page, opened; afterwards it must have reported no error and asked nobody but its server."""
    page_engine.reply, page_engine.step_seconds = REPLY, 0.0
    page_engine.requests.clear()
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
    page.on("request", lambda one: None if one.url.startswith(page_url) else wrong.append(one.url))
    page.goto(page_url)
    page.wait_for_selector("#model:has-text('fake')")
    yield page
    page.close()
    assert not wrong
