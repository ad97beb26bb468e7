"""Schemas of tools that calls are held to: what pydantic writes, references, options, and broken ones."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from quickdraft.engine.async_engine import AsyncEngine
from quickdraft.types import ToolCallParser
from tests.support.live_server import complete_app, live_server
from tests.support.thinking_opened import open_thinker

ASK: dict[str, Any] = {
    "model": "thinker", "messages": [{"role": "user", "content": "hi"}], "seed": 4, "max_tokens": 400,
    "temperature": 0.7, "parallel_tool_calls": False, "tool_choice": "required",
}  # fmt: skip


@pytest.fixture(scope="module", params=["qwen3_coder", "hermes", "json"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def url(form: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    engine = AsyncEngine(open_thinker(tmp_path_factory.mktemp("thinker")))
    app = complete_app(engine, thinking_budget=1, tool_call_parser=ToolCallParser(form))
    with live_server(app) as url:
        yield url
    engine.shutdown()


def ask(url: str, parameters: dict[str, Any], strict: bool, **more: Any) -> httpx.Response:
    tool = {"type": "function", "function": {"name": "f", "strict": strict, "parameters": parameters}}
    body = {**ASK, "tools": [tool], **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)


def of_x(**schema: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"x": schema},
        "required": ["x"],
        "$defs": {"color": {"enum": ["red", "green"], "type": "string"}},
    }


NULL = {"type": "null"}
FOLLOWED: dict[str, dict[str, Any]] = {
    "reference": of_x(**{"$ref": "#/$defs/color", "description": "of it"}),
    "optional reference": of_x(anyOf=[{"$ref": "#/$defs/color"}, NULL]),
    "optional text": of_x(anyOf=[{"type": "string", "maxLength": 3, "pattern": "^[a-c]+$"}, NULL]),
    "text or number": of_x(
        anyOf=[{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 0, "maximum": 9}]
    ),
    "slashes": of_x(type="string", pattern=r"^a/b\/c\\/d$"),
    "all in a reference": {
        "$ref": "#/$defs/all",
        "$defs": {"all": {"properties": {"b": {"type": "boolean"}}, "required": ["b"]}},
    },
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", FOLLOWED)
def test_followed(url: str, name: str, strict: bool) -> None:
    for seed in range(3):
        answer = ask(url, FOLLOWED[name], strict, seed=seed).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), FOLLOWED[name])


BROKEN: dict[str, dict[str, Any]] = {
    "enum null": of_x(enum=None),
    "enum text": of_x(enum="ab"),
    "required": {**of_x(type="boolean"), "required": [["x"]]},
    "length": of_x(type="string", minLength='1}/ | "x'),
    "fraction": of_x(type="string", maxLength=1.5),
    "lengths": of_x(type="string", minLength=5, maxLength=2),
    "pattern": of_x(type="string", pattern="("),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", BROKEN)
def test_broken(url: str, name: str, strict: bool) -> None:
    reply = ask(url, BROKEN[name], strict)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith("tools")


def test_options_without_end_and_texts_that_end_early(url: str, form: str) -> None:
    circle = of_x(anyOf=[{"$ref": "#/properties/x"}, {"type": "string"}])
    closing = of_x(const="a\n</parameter>\nb")
    for schema in (circle, closing):
        status = ask(url, schema, True).status_code
        assert status == 400 if form == "qwen3_coder" else status in (200, 400)


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Paint(BaseModel):
    """Paints."""

    color: Color
    other: Color | None
    coats: Annotated[int, Field(ge=1, le=3)]
    note: Annotated[str, Field(max_length=3)] | None


def test_a_pydantic_model_through_the_official_client(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        tools = [openai.pydantic_function_tool(Paint)]
        answer = client.chat.completions.parse(**ASK, tools=tools)
        (call,) = answer.choices[0].message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, Paint)
        with client.chat.completions.stream(**ASK, tools=tools) as stream:
            answer = stream.get_final_completion()
        (again,) = answer.choices[0].message.tool_calls or ()
        assert again.function.parsed_arguments == call.function.parsed_arguments
        asked = {**ASK, "tool_choice": "none"}
        answer = client.chat.completions.parse(**asked, tools=tools, response_format=Paint)
        assert isinstance(answer.choices[0].message.parsed, Paint)
