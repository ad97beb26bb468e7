"""`prediction` and `speculation` of a request, over a tiny model: what is drafted, counted and refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quickdraft.engine.async_engine import AsyncEngine
from quickdraft.engine.opened import EngineConfig, open_model
from quickdraft.types import Speculation
from tests.server.test_errors import error_of
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import complete_app, live_server
from tests.support.tiny import write_tiny_llama

OPTIONS: dict[str, Any] = {"model": "tiny", "seed": 5, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
CHAT = {**OPTIONS, "messages": [{"role": "user", "content": "hello there"}]}
RAW = {**OPTIONS, "prompt": "hello there"}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    path: Path = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")
    engine = AsyncEngine(open_model(path, EngineConfig(threads=1, kv_memory_bytes=1 << 20)))
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module", params=["auto", "lookup@8"])
def tiny(real: AsyncEngine, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    """A server whose own speculation is `auto`, and one that leaves predictions out by default."""
    app = complete_app(real, served_names=("tiny",), speculation=Speculation.parse(request.param))
    with (
        live_server(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client,
    ):
        yield client


def predicted(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


def details(usage: Any) -> tuple[int, int]:
    found = usage.completion_tokens_details
    return found.accepted_prediction_tokens, found.rejected_prediction_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prediction_is_drafted_and_changes_nothing(tiny: openai.OpenAI, temperature: float) -> None:
    options = {**CHAT, "temperature": temperature}
    plain = tiny.chat.completions.create(**options)
    assert details(plain.usage) == (0, 0), "no prediction was given"
    text = plain.choices[0].message.content
    for content, least in (
        (text, 10),
        ([{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}], 10),
        (text[:40] + "quite another text" + text[40:], 4),
        ("nothing of it", 0),
        ("", 0),
    ):
        answer = tiny.chat.completions.create(**options, **predicted(content))
        assert answer.choices[0].message.content == text
        timings = answer.model_extra["timings"]
        accepted, rejected = details(answer.usage)
        assert accepted >= least and accepted == timings["accepted"].get("prediction", 0)
        assert accepted + rejected == timings["drafted"].get("prediction", 0)
        assert timings["steps"] + sum(timings["accepted"].values()) == answer.usage.completion_tokens
        assert answer.model_extra["speculation"] in ("auto", "prediction+lookup@8")


def test_in_a_stream_and_for_raw_prompts(tiny: openai.OpenAI) -> None:
    greedy = {"temperature": 0.0}
    text = tiny.completions.create(**RAW, **greedy).choices[0].text
    body = {**RAW, **greedy, "extra_body": {"ignore_eos": True, **predicted(text)}}
    whole = tiny.completions.create(**body)
    chunks = list(tiny.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].text == text == "".join(c.choices[0].text for c in chunks if c.choices)
    assert details(whole.usage)[0] > 10 and details(chunks[-1].usage)[0] > 10
    two = tiny.completions.create(**{**body, "prompt": ["hello there", "hello there"]})
    assert [choice.text for choice in two.choices] == [text, text]
    assert details(two.usage)[0] > 20, "each of the prompts follows it"


@pytest.mark.parametrize("speculation", ["off", "auto", "lookup@4", "prediction", "lookup+prediction@9"])
def test_a_request_says_who_drafts(tiny: openai.OpenAI, speculation: str) -> None:
    extra = {"ignore_eos": True, "speculation": speculation}
    own = {**CHAT, "temperature": 0.0}
    text = tiny.chat.completions.create(**own).choices[0].message.content
    mine = predicted(text) if speculation not in ("off", "lookup@4") else {}
    answer = tiny.chat.completions.create(**{**own, **mine, "extra_body": extra})
    assert answer.choices[0].message.content == text
    timings = answer.model_extra["timings"]
    assert answer.model_extra["speculation"] == speculation
    names = "lookup+prediction" if speculation == "auto" else speculation.partition("@")[0]
    allowed = set(names.split("+"))
    assert set(timings["drafted"]) == set(timings["accepted"]) <= allowed
    assert bool(mine) == (timings["accepted"].get("prediction", 0) > 0)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({**predicted("x"), "speculation": "off"}, "prediction", "with speculation 'off'"),
        ({**predicted("x"), "speculation": "lookup@4"}, "prediction", "prediction among them"),
        (predicted("x" * 9_999), "prediction", "at most 512, the context"),
        (predicted("x " * 400), "prediction", "at most 512, the context"),
        ({"prediction": "x"}, "prediction", "valid dictionary"),
        ({"prediction": {"content": "x"}}, "prediction.type", "required"),
        ({"prediction": {"type": "text", "content": "x"}}, "prediction.type", "'content'"),
        ({"prediction": {"type": "content"}}, "prediction.content", "required"),
        (predicted(3), "prediction.content", "valid string"),
        (predicted([{"type": "image_url"}]), "prediction.content", "image_url"),
        ({"prediction": {"type": "content", "content": "x", "more": 1}}, "prediction.more", "unknown"),
        ({"speculation": "corpus"}, "speculation", "sources this server has: lookup"),
        ({"speculation": "lookup@65"}, "speculation", "@1..@64"),
        ({"speculation": "auto@8"}, "speculation", "off, auto, or"),
        ({"speculation": ""}, "speculation", "off, auto, or"),
        ({"speculation": ["lookup"]}, "speculation", "valid string"),
    ],
    ids=lambda value: str(value)[:50],
)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_what_is_refused(
    http: httpx.Client, engine: FakeEngine, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    what = {"messages": CHAT["messages"]} if path.startswith("chat") else {"prompt": "hi"}
    error = error_of(http.post(f"/v1/{path}", json={"model": "fake", **what, **fields}), 400)
    assert error["param"] == param and message in error["message"] and engine.requests == []
