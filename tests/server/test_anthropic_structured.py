"""Forced tools, schemas and thinking budgets in the Anthropic and Responses APIs, over a tiny model that
would write anything: only what holds it can give it form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from quickdraft.engine.async_engine import AsyncEngine
from tests.support.live_server import complete_app, live_server
from tests.support.thinking_opened import open_thinker

USER = {"role": "user", "content": "hi"}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
TOOLS = [{"name": name, "input_schema": SCHEMA, "strict": True} for name in ("look", "ask")]
FUNCTIONS = [{"type": "function", "name": one["name"], "parameters": SCHEMA, "strict": True} for one in TOOLS]
EXTRA = {"seed": 5}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    engine = AsyncEngine(open_thinker(tmp_path_factory.mktemp("model")))
    with live_server(complete_app(engine, served_names=("tiny",))) as url:
        yield url
    engine.shutdown()


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def responses(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def fits(value: Any) -> bool:
    return value.keys() == {"n", "ok"} and 0 <= value["n"] <= 99 and isinstance(value["ok"], bool)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "ask"}], ids=str)
def test_a_forced_tool_is_called(
    claude: anthropic.Anthropic, responses: openai.OpenAI, choice: dict[str, Any]
) -> None:
    one = {**choice, "disable_parallel_tool_use": True}
    message = claude.messages.create(
        model="tiny", max_tokens=400, messages=[USER], tools=TOOLS, tool_choice=one, extra_body=EXTRA
    )
    assert message.stop_reason == "tool_use"
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert call.name in ({choice["name"]} if "name" in choice else {"look", "ask"}) and fits(call.input)
    own: Any = {"type": "function", "name": "ask"} if "name" in choice else "required"
    response = responses.responses.create(
        model="tiny", input="hi", max_output_tokens=400, tools=FUNCTIONS, tool_choice=own,
        parallel_tool_calls=False, reasoning={"effort": "none"}, extra_body=EXTRA,
    )  # fmt: skip
    (item,) = [item for item in response.output if item.type == "function_call"]
    assert (item.name, json.loads(item.arguments)) == (call.name, call.input), (
        "the same request, the same call"
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_followed(claude: anthropic.Anthropic, responses: openai.OpenAI, stream: bool) -> None:
    format_ = {"type": "json_schema", "schema": SCHEMA}
    body = {**EXTRA, "output_config": {"format": format_}}
    given = {"model": "tiny", "max_tokens": 200, "messages": [USER], "extra_body": body}
    message = claude.messages.create(**given)
    text = "".join(block.text for block in message.content)
    if stream:
        events = claude.messages.create(**given, stream=True)
        assert text == "".join(e.delta.text for e in events if e.type == "content_block_delta")
    assert fits(json.loads(text)) and message.stop_reason == "end_turn"
    response = responses.responses.create(
        model="tiny", input="hi", max_output_tokens=200, reasoning={"effort": "none"}, extra_body=EXTRA,
        text={"format": {**format_, "name": "answer"}},
    )  # fmt: skip
    assert response.output_text == text


@pytest.mark.parametrize("budget", [0, 7])
def test_a_thinking_budget_is_kept(claude: anthropic.Anthropic, budget: int) -> None:
    thinking = {"type": "enabled", "budget_tokens": budget}
    given: dict[str, Any] = {"model": "tiny", "max_tokens": 60, "messages": [USER], "thinking": thinking}
    free = {**given, "thinking": {"type": "adaptive"}}
    thoughts = [claude.messages.create(**one, extra_body=EXTRA).content for one in (free, given)]
    assert thoughts[0][0].type == "thinking" and len(thoughts[0]) == 1
    assert thoughts[1][-1].type == "text", "it was closed, and an answer followed"


def test_errors_name_the_field(claude: anthropic.Anthropic, responses: openai.OpenAI) -> None:
    bad = {"type": "object", "properties": {"a": {"type": "nothing"}}}
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema"):
        claude.messages.create(
            model="tiny", max_tokens=9, messages=[USER],
            extra_body={"output_config": {"format": {"type": "json_schema", "schema": bad}}},
        )  # fmt: skip
    with pytest.raises(openai.BadRequestError) as caught:
        text: Any = {"format": {"type": "json_schema", "name": "a", "schema": bad}}
        responses.responses.create(model="tiny", input="hi", text=text)
    assert caught.value.param == "text.format.schema"
    with pytest.raises(anthropic.BadRequestError, match="one of the tools: look, ask"):
        choice: Any = {"type": "tool", "name": "other"}
        claude.messages.create(model="tiny", max_tokens=9, messages=[USER], tools=TOOLS, tool_choice=choice)
