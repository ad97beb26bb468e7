"""Tools and thinking over HTTP: what the template is given, what comes back, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import ReasoningParser, TokenizerData, ToolCallParser
from tests.support.byte_tokenizer import byte_tokenizer_data
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import complete_app, live_server
from tests.support.thinking_model import THINKING_TEMPLATE, thinking_tokenizer_data

USER: dict[str, Any] = {"role": "user", "content": "hi"}
LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "strict": False,
        "description": "Löok.",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer", "default": None}}},
    },
}
CALL = (
    "<tool_call>\n<function=look>\n<parameter=n>\n3\n</parameter>\n<parameter=at>\n é\n</parameter>\n"
    "</function>\n</tool_call>"
)
REPLY = "hm, wörld\n</think>\n\nLet me look.\n\n" + CALL + "\n" + CALL.replace("3", "4")
TEMPLATE = ChatTemplate(THINKING_TEMPLATE)


@pytest.fixture
def thinker(engine: FakeEngine) -> Iterator[FakeEngine]:
    """The engine of a model that thinks and calls tools."""
    plain = engine.tokenizer, engine.chat_template
    engine.tokenizer, engine.chat_template = Tokenizer(thinking_tokenizer_data()), TEMPLATE
    engine.reply, engine.max_context_tokens = REPLY, 4096
    yield engine
    engine.tokenizer, engine.chat_template = plain


def create(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "fake", "messages": [USER], "tools": [LOOK], **options})


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.requests[-1][0], skip_special=False)


def test_whole_answer(client: openai.OpenAI, thinker: FakeEngine) -> None:
    answer = create(client)
    choice, message = answer.choices[0], answer.choices[0].message
    assert choice.finish_reason == "tool_calls"
    assert (message.model_extra["reasoning_content"], message.content) == ("hm, wörld", "Let me look.")
    assert [(c.type, c.function.name) for c in message.tool_calls] == [("function", "look")] * 2
    assert [c.function.arguments for c in message.tool_calls] == [
        '{"n": 3, "at": " é"}',
        '{"n": 4, "at": " é"}',
    ]
    assert len({c.id for c in message.tool_calls}) == 2 and all(
        c.id.startswith("call_") for c in message.tool_calls
    )
    thought = len(thinker.tokenizer.encode("hm, wörld\n</think>"))
    assert answer.usage.completion_tokens_details.reasoning_tokens == thought
    assert prompt_of(thinker) == TEMPLATE.render([USER], tools=[LOOK])


def streamed(client: openai.OpenAI, **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message that the deltas of a stream add up to, its finish reason, and the chunks."""
    chunks = list(create(client, stream=True, **options))
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        message["reasoning_content"] += (delta.model_extra or {}).get("reasoning_content", "")
        for call in delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(message["tool_calls"]) and call.function.arguments == ""
                message["tool_calls"].append([call.type, call.function.name, ""])
            else:
                message["tool_calls"][call.index][2] += call.function.arguments
    message["finish_reason"] = chunks[-1].choices[0].finish_reason
    return message, chunks


REPLIES = {
    "calls": REPLY,
    "reasoning only": "hm, hm",
    "no reasoning": "\n</think>\n\nfine",
    "a call that is none": "a</think>b\n\n<tool_call>\n{}\n</tool_call>",
    "an open call": "a</think>b" + CALL[:-30],
    "text behind": "</think>" + CALL + " there",
}


@pytest.mark.parametrize("tokens_per_step", [1, 3, 1000])
@pytest.mark.parametrize(
    "options", [{}, {"stop": "Let"}, {"stop": "é\n"}, {"max_tokens": 9}, {"logprobs": True}], ids=str
)
@pytest.mark.parametrize("reply", REPLIES)
def test_stream_equals_whole(
    client: openai.OpenAI, thinker: FakeEngine, reply: str, options: dict[str, Any], tokens_per_step: int
) -> None:
    thinker.reply, thinker.tokens_per_step = REPLIES[reply], tokens_per_step
    whole = create(client, **options).choices[0]
    message, chunks = streamed(client, **options)
    calls = [["function", c.function.name, c.function.arguments] for c in whole.message.tool_calls or []]
    assert message == {
        "content": whole.message.content or "",
        "reasoning_content": whole.message.model_extra.get("reasoning_content", ""),
        "tool_calls": calls,
        "finish_reason": whole.finish_reason,
    }
    if options.get("logprobs"):
        given = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
        assert given == whole.logprobs.content


@pytest.mark.parametrize(
    ("options", "content", "finish"),
    [
        ({}, "Let me look.", "tool_calls"),
        ({"stop": "Let me"}, "", "stop"),
        ({"stop": "</function>"}, "Let me look.\n\n" + CALL.split("</function>")[0], "stop"),
        ({"max_tokens": 100}, None, "length"),
    ],
)
def test_finish_reasons(
    client: openai.OpenAI, thinker: FakeEngine, options: dict[str, Any], content: str | None, finish: str
) -> None:
    choice = create(client, **options).choices[0]
    assert choice.finish_reason == finish
    if content is not None:
        assert choice.message.content == content


def test_one_call_at_a_time(client: openai.OpenAI, thinker: FakeEngine) -> None:
    assert len(create(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    assert len(streamed(client, parallel_tool_calls=False)[0]["tool_calls"]) == 1


@pytest.mark.parametrize(
    "options", [{"tool_choice": "none"}, {"tools": []}, {"tools": openai.NOT_GIVEN}], ids=str
)
def test_without_tools_calls_are_text(
    client: openai.OpenAI, thinker: FakeEngine, options: dict[str, Any]
) -> None:
    choice = create(client, **options).choices[0]
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    assert choice.message.content == REPLY.partition("</think>\n\n")[2]
    assert prompt_of(thinker) == TEMPLATE.render([USER])


def test_history_goes_back_into_the_template(client: openai.OpenAI, thinker: FakeEngine) -> None:
    """What came back is sent back as it came, and renders as the text the model wrote."""
    message = create(client).choices[0].message
    result = [{"role": "tool", "tool_call_id": call.id, "content": "seen"} for call in message.tool_calls]
    thinker.reply = "ok</think>done"
    history = [USER, message.model_dump(exclude_none=True), *result]
    assert create(client, messages=history).choices[0].message.content == "done"
    first = TEMPLATE.render([USER], tools=[LOOK])
    assert prompt_of(thinker).startswith(
        first + REPLY + "<|im_end|>\n<|im_start|>user\n<tool_response>\nseen"
    )


def test_variables_reach_the_template_and_marks_the_engine(
    client: openai.OpenAI, thinker: FakeEngine
) -> None:
    for extra, variables in [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"chat_template_kwargs": {"enable_thinking": False, "preserve_thinking": False}},
         {"enable_thinking": False, "preserve_thinking": False}),
    ]:  # fmt: skip
        create(client, extra_body=extra)
        assert prompt_of(thinker) == TEMPLATE.render([USER], tools=[LOOK], **variables)
        assert bool(thinker.marks[-1]) == ("preserve_thinking" in variables)


def test_without_thinking_the_answer_is_content(client: openai.OpenAI, thinker: FakeEngine) -> None:
    thinker.reply = "yes </think> no"
    answer = create(client, extra_body={"enable_thinking": False})
    assert answer.choices[0].message.content == "yes </think> no"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def function(**changes: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "look", **changes}}]}


def history(**call: Any) -> dict[str, Any]:
    calls = [{"id": "a", "function": {"name": "f", "arguments": "{}", **call}}]
    return {"messages": [USER, {"role": "assistant", "tool_calls": calls}]}


ARGUMENTS = "messages[1].tool_calls[0].function.arguments"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "required"}, "tool_choice", "cannot be forced"),
    ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice", "cannot be forced"),
    ({"tool_choice": "any"}, "tool_choice", "auto or none"),
    ({"tool_choice": 5}, "tool_choice", "auto or none"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "valid boolean"),
    ({"tools": "look"}, "tools", "valid list"),
    ({"tools": [LOOK, LOOK]}, "tools[1]", "each name once"),
    (function(name="two words"), "tools[0].function.name", "pattern"),
    (function(name=None), "tools[0].function.name", "required"),
    (function(strict=True), "tools[0].function.strict", "follow the schema"),
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


def test_tokenize_counts_tools_and_variables(http: httpx.Client, thinker: FakeEngine) -> None:
    body = {"messages": [USER], "tools": [LOOK], "chat_template_kwargs": {"enable_thinking": False}}
    ids = http.post("/tokenize", json=body).json()["tokens"]
    text = thinker.tokenizer.decode(ids, skip_special=False)
    assert text == TEMPLATE.render([USER], tools=[LOOK], enable_thinking=False)
    reply = http.post("/tokenize", json={"prompt": "hi", "tools": [LOOK]})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tools"


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


def test_tool_schemas_reach_the_template_as_they_were_sent(http: httpx.Client, thinker: FakeEngine) -> None:
    tool = json.dumps(LOOK, ensure_ascii=False)
    assert '"default": null' in tool
    body = f'{{"model": "fake", "messages": [{json.dumps(USER)}], "tools": [{tool}]}}'.encode()
    headers = {"content-type": "application/json"}
    assert http.post("/v1/chat/completions", content=body, headers=headers).status_code == 200
    assert tool in prompt_of(thinker)
