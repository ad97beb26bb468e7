"""What chat requests may ask of a template, what is refused, and how the forms of answers are chosen."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.formats import Formats
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import ReasoningParser, TokenizerData, ToolCallParser
from tests.server.test_tools_and_thinking import LOOK, USER
from tests.support.byte_tokenizer import byte_tokenizer_data
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import complete_app, live_server
from tests.support.thinking_model import REPLY, thinking_tokenizer_data


def function(**changes: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "look", **changes}}]}


def history(**call: Any) -> dict[str, Any]:
    calls = [{"id": "a", "function": {"name": "f", "arguments": "{}", **call}}]
    return {"messages": [USER, {"role": "assistant", "tool_calls": calls}]}


ARGUMENTS = "messages[1].tool_calls[0].function.arguments"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "one of the tools"),
    ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice", "auto, none, required"),
    ({"tool_choice": "any"}, "tool_choice", "auto, none, required"),
    ({"tool_choice": 5}, "tool_choice", "auto, none, required"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "valid boolean"),
    ({"tools": "look"}, "tools", "valid list"),
    ({"tools": [LOOK, LOOK]}, "tools[1]", "each name once"),
    (function(name="two words"), "tools[0].function.name", "pattern"),
    (function(name=None), "tools[0].function.name", "required"),
    (function(strict=1), "tools[0].function.strict", "valid boolean"),
    (function(parameters=[]), "tools[0].function.parameters", "valid dictionary"),
    (function(extra=1), "tools[0].function.extra", "unknown field"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
    ({"enable_thinking": "no"}, "enable_thinking", "valid boolean"),
    ({"reasoning_effort": 3}, "reasoning_effort", "valid string"),
    ({"reasoning_effort": "none", "enable_thinking": True}, "reasoning_effort", "or no enable_thinking"),
    ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
     "enable_thinking", "the same"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "variable of thinking"),
    ({"chat_template_kwargs": {"colour": 1}}, "chat_template_kwargs.colour", "does not read it"),
    ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "valid dictionary"),
    (history(arguments="{"), ARGUMENTS, "JSON object"),
    (history(arguments="[1]"), ARGUMENTS, "JSON object"),
    (history(arguments='{"a": NaN}'), ARGUMENTS, "JSON object"),
    (history(arguments={"a": 1}), ARGUMENTS, "JSON object"),
    (history(arguments='{"a": ' + "[" * 500 + "]" * 500 + "}"), ARGUMENTS, "JSON object"),
    (history(arguments="[" * 200_000), ARGUMENTS, "JSON object"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": []}]}, "messages[1].content", "required"),
    ({"messages": [{**USER, "reasoning_content": "x"}]}, "messages[0]", "reasoning_content"),
    ({"messages": [{**USER, "tool_calls": history()["messages"][1]["tool_calls"]}]},
     "messages[0]", "tool_calls"),
]  # fmt: skip


def post(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "messages": [USER], "tools": [LOOK], **fields}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400, reply.text
    return dict(reply.json()["error"])


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_refused_fields(
    http: httpx.Client, thinker: FakeEngine, fields: dict[str, Any], param: str, message: str
) -> None:
    error = post(http, **fields)
    assert error["param"] == param and message in error["message"] and param in error["message"]
    assert thinker.requests == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reasoning_effort": "high"}, "No such effort: high"),
        ({"messages": [USER, {"role": "system", "content": ""}]}, "Only the first message"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "Nobody asks anything."),
    ],
)
def test_refusals_of_the_template(
    http: httpx.Client, thinker: FakeEngine, fields: dict[str, Any], message: str
) -> None:
    error = post(http, **fields)
    assert error["code"] == "invalid_request" and message in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "tools"),
        ({"tools": None, **history()}, "messages[1].tool_calls"),
        ({"tools": None, "enable_thinking": True}, "enable_thinking"),
        ({"tools": None, "reasoning_effort": "low"}, "reasoning_effort"),
        ({"tools": None, "chat_template_kwargs": {"preserve_thinking": False}},
         "chat_template_kwargs.preserve_thinking"),
        ({"tools": None, "messages": [USER, {"role": "assistant", "content": "", "reasoning_content": "x"}]},
         "messages[1].reasoning_content"),
    ],
)  # fmt: skip
def test_a_plain_model_refuses_what_it_would_ignore(
    http: httpx.Client, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    error = post(http, **fields)
    assert error["param"] == param and error["code"] == "unsupported_parameter" and engine.requests == []


def test_a_plain_model_takes_what_is_off_anyway(http: httpx.Client, engine: FakeEngine) -> None:
    off = {"enable_thinking": False, "reasoning_effort": "none", "tools": [LOOK], "tool_choice": "none"}
    reply = http.post("/v1/chat/completions", json={"model": "fake", "messages": [USER], **off})
    message = reply.json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "hello wörld 🎉!", "refusal": None}
    assert "reasoning_tokens" not in reply.json()["usage"]["completion_tokens_details"]


HERMES = "{% for t in tools %}{{ t | tojson }}{% endfor %}{{ messages[-1].content }}<tool_call>"
PLAIN = byte_tokenizer_data(chat_template=HERMES)


@pytest.mark.parametrize(
    ("data", "flags", "calls", "reasoning"),
    [
        (thinking_tokenizer_data(), {}, 2, "hm, wörld"),
        (thinking_tokenizer_data(), {"tool_call_parser": ToolCallParser.NONE}, 0, "hm, wörld"),
        (thinking_tokenizer_data(), {"reasoning_parser": ReasoningParser.NONE}, 2, None),
        (PLAIN, {}, None, None),
        (PLAIN, {"tool_call_parser": ToolCallParser.QWEN3_CODER}, 2, None),
        (PLAIN, {"tool_call_parser": ToolCallParser.NONE}, 0, None),
        (
            PLAIN,
            {"tool_call_parser": ToolCallParser.NONE, "reasoning_parser": ReasoningParser.QWEN3},
            0,
            None,
        ),
    ],
)
def test_parsers_are_found_or_named(
    data: TokenizerData, flags: dict[str, Any], calls: int | None, reasoning: str | None
) -> None:
    """`calls` None: the template takes tools, but nobody knows how its model calls them."""
    engine = FakeEngine(
        reply=REPLY, max_context_tokens=4096, tokenizer=Tokenizer(data), chat_template=ChatTemplate.of(data)
    )
    with live_server(complete_app(engine, **flags)) as url:
        reply = httpx.post(
            f"{url}/v1/chat/completions",
            json={"model": "fake", "messages": [USER], "tools": [LOOK]},
            timeout=20,
        )
    if calls is None:
        assert reply.status_code == 400 and "--tool-call-parser" in reply.json()["error"]["message"]
        return
    message = reply.json()["choices"][0]["message"]
    assert message.get("reasoning_content") == reasoning
    assert len(message.get("tool_calls", [])) == calls
    assert ("<tool_call>" in (message["content"] or "")) == (calls == 0)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (thinking_tokenizer_data(),
         "reasoning: split at think blocks; tool calls: read in the form qwen3_coder"),
        (PLAIN, "reasoning: not told from the answer; tool calls: in no known form"),
        (byte_tokenizer_data(), "reasoning: not told from the answer; tools: not in the chat template"),
        (byte_tokenizer_data(chat_template=None),
         "reasoning: not told from the answer; tools: not in the chat template"),
    ],
)  # fmt: skip
def test_what_was_found_is_said(data: TokenizerData, line: str) -> None:
    assert Formats.of(Tokenizer(data), ChatTemplate.of(data)).explain() == line
