"""The web page in headless Chromium over a scripted engine: what people do with it, what it must not do."""

from __future__ import annotations

from typing import Any

import pytest

from quickdraft.server.app import create_app
from quickdraft.server.auth import KeyCheck
from quickdraft.server.front import Front
from tests.e2e.conftest import REPLY
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import LIMITS, complete_app, live_server


@pytest.fixture
def engine(page_engine: FakeEngine) -> FakeEngine:
    return page_engine


def ask(page: Any, text: str, *, wait: bool = True) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")
    if wait:
        page.wait_for_selector("#regenerate")


def test_an_answer_streams_with_tints_and_markdown_and_runs_nothing(page: Any, engine: FakeEngine) -> None:
    ask(page, "hello <b>there</b>")
    answer = page.locator(".answer > .text")
    assert answer.locator("h3").inner_text() == "Title" and answer.locator("strong").inner_text() == "bold"
    assert answer.locator("li").count() == 2 and answer.locator("pre code").inner_text() == "print(1 < 2)"
    link = answer.locator("a")
    assert link.get_attribute("href") == "https://example.com/a" and "noopener" in link.get_attribute("rel")
    assert "<script>window.hacked = 1</script> ünd 🎉." in answer.inner_text()
    assert page.evaluate("window.hacked") is None and page.locator(".log script").count() == 0
    assert page.locator(".asked .text").inner_text() == "hello <b>there</b>"
    # Two of three tokens of a step came from a draft.
    drafted = answer.locator(".from-lookup").count()
    assert drafted > answer.locator(".from-model").count() > 10
    tokens = len(engine.tokenizer.encode(REPLY)) + 1
    facts = page.locator(".facts").inner_text()
    assert f"{tokens} tokens · " in facts and "tokens/s" in facts and "2.9" in facts
    assert page.locator("#status").inner_text().startswith("The answer is complete.")


def test_a_conversation_goes_on_and_an_answer_is_made_again(page: Any, engine: FakeEngine) -> None:
    engine.reply = "yes"
    ask(page, "first")
    ask(page, "second", wait=False)
    page.wait_for_selector("article:nth-of-type(4) #regenerate")
    prompts = [engine.tokenizer.decode(ids, skip_special=False) for ids, _ in engine.requests]
    assert all(part in prompts[1] for part in ("first", "yes", "second"))
    page.click("#regenerate")
    page.wait_for_selector("article:nth-of-type(4) #regenerate")
    assert engine.requests[2][0] == engine.requests[1][0] and page.locator(".asked").count() == 2
    page.click("#new")
    assert page.locator(".asked").count() == 0 and page.locator("#conversations option").count() == 2
    page.select_option("#conversations", "0")
    assert page.locator(".asked").count() == 2
    page.click("#clear")
    assert page.locator("#conversations option").count() == 1 and page.locator(".asked").count() == 0


@pytest.mark.parametrize("way", ["Escape", "button"])
def test_stopping_aborts_the_request(page: Any, engine: FakeEngine, way: str) -> None:
    engine.reply, engine.step_seconds = "long " * 5000, 0.01
    ask(page, "go on", wait=False)
    page.wait_for_selector(".from-lookup >> nth=3")
    if way == "Escape":
        page.focus("#stop")
        page.keyboard.press("Escape")
    else:
        page.click("#stop")
    page.wait_for_selector(".facts:has-text('stopped')")
    page.wait_for_timeout(200)
    assert engine.running == set() and page.evaluate("document.activeElement.id") == "send"


def test_settings_reach_the_request_and_errors_are_sentences(page: Any, engine: FakeEngine) -> None:
    fields = {"temperature": "0.5", "top_p": "0.9", "max_tokens": "7", "seed": "42", "system": "Be brief."}
    for name, value in {**fields, "speculation": "mtp+lookup@8"}.items():
        page.fill(f"#set-{name}", value)
    ask(page, "hi")
    prompt, params = engine.requests[-1]
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.5, 0.9, 7, 42)
    assert str(params.speculation) == "mtp+lookup@8"
    assert "Be brief." in engine.tokenizer.decode(prompt, skip_special=False)
    assert "cut at the most tokens" in page.locator(".facts").inner_text()


def test_a_refusal_is_shown_as_a_sentence(browser: Any, page_url: str) -> None:
    page = browser.new_page()
    page.goto(page_url)
    page.wait_for_selector("#model:has-text('fake')")
    page.click("#settings-toggle") if page.locator("#settings").is_hidden() else None
    page.fill("#set-speculation", "nonsense")
    ask(page, "hi", wait=False)
    page.wait_for_selector(".answer .problem:not([hidden])")
    shown = page.locator(".answer .problem").inner_text()
    assert "speculation" in shown and shown.endswith(".")
    page.close()


def test_keys_of_the_keyboard(page: Any) -> None:
    page.focus("#message")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#message") == "one\ntwo"
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert (
        page.locator("#compare").is_visible() and page.evaluate("document.activeElement.id") == "tab-compare"
    )
    page.keyboard.press("ArrowLeft")
    page.reload()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_side_by_side_says_whether_the_texts_are_equal(page: Any, engine: FakeEngine) -> None:
    page.click("#tab-compare")
    page.click("#compare-run")
    page.wait_for_selector("#verdict:has-text('Equal')")
    plain, drafted = (params for _, params in engine.requests)
    assert plain.speculation.off and drafted.speculation.auto and plain.seed == drafted.seed
    replies = iter(["one text", "another text"])
    engine.reply = lambda ids: engine.tokenizer.encode(next(replies))
    page.click("#compare-run")
    page.wait_for_selector("#verdict:has-text('differ')")


def test_the_monitor_reads_only_while_it_is_shown(page: Any, engine: FakeEngine) -> None:
    asked: list[str] = []
    page.on("request", lambda one: asked.append(one.url) if one.url.endswith("/metrics") else None)
    page.click("#tab-monitor")
    page.wait_for_selector("#tiles dd")
    page.wait_for_timeout(2500)
    assert len(asked) >= 2
    label = page.locator(".chart svg[role=img]").first.get_attribute("aria-label")
    assert label.startswith("Tokens per second. ")
    assert page.locator("#tiles").inner_text().count("%") >= 1
    page.click("#tab-chat")
    page.wait_for_timeout(300)
    before = len(asked)
    page.wait_for_timeout(2500)
    assert len(asked) == before


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Any) -> None:
    with live_server(complete_app(FakeEngine(), keys=("key-of-anna",))) as url:
        page = browser.new_page()
        page.goto(url)
        for key in ("key-of-bert", "key-of-anna"):
            page.wait_for_selector("#key-dialog[open]")
            page.fill("#key", key)
            page.click("#key-dialog button.main")
            page.wait_for_selector("#model:has-text('know'), #model:has-text('fake')")
        page.wait_for_selector("#model:has-text('fake')")
        ask(page, "hi")
        assert "hello wörld" in page.locator(".answer").inner_text()
        assert page.evaluate("localStorage.length") == 0
        page.close()


def test_conversations_are_remembered_only_on_request(page: Any, engine: FakeEngine) -> None:
    engine.reply = "remember me"
    ask(page, "hi")
    page.reload()
    assert page.locator(".asked").count() == 0 and page.evaluate("localStorage.length") == 0
    page.check("#set-remember")
    ask(page, "hi again")
    page.reload()
    assert "remember me" in page.locator(".answer > .text").inner_text()
    assert page.locator(".answer .from-lookup").count() > 0
    page.uncheck("#set-remember")
    assert page.evaluate("localStorage.length") == 0


@pytest.mark.parametrize("look", ["light", "dark"])
def test_axe_finds_nothing_serious(page: Any, engine: FakeEngine, look: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    page.select_option("#set-look", look)
    ask(page, "hi")
    for view in ("chat", "compare", "monitor"):
        page.click(f"#tab-{view}")
        if view == "compare":
            page.click("#compare-run")
            page.wait_for_selector("#verdict:has-text('Equal')")
        if view == "monitor":
            page.wait_for_selector("#tiles dd")
        found = axe.run(page).response["violations"]
        serious = [
            (one["id"], [node["html"][:200] for node in one["nodes"]])
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
        assert not serious, (view, serious)


def test_a_narrow_screen_does_not_scroll_sideways(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    page.reload()
    page.wait_for_selector("#model:has-text('fake')")
    assert page.locator("#settings").is_hidden()
    ask(page, "word " * 60)
    for view in ("chat", "compare", "monitor"):
        page.click(f"#tab-{view}")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.click("#settings-toggle")
    assert page.locator("#set-temperature").is_visible()


def test_the_page_comes_before_the_model_and_says_so(browser: Any) -> None:
    front, engine = Front(LIMITS), FakeEngine()
    with live_server(KeyCheck(front, ())) as url:
        page = browser.new_page()
        page.goto(url)
        page.wait_for_selector("#model:has-text('being loaded')")
        front.open(create_app(engine), engine)
        page.wait_for_selector("#model:has-text('fake, context')")
        assert page.locator("#model.problem").count() == 0
        page.close()
