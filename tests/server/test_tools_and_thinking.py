"""Tools and thinking over HTTP: what the template is given, what comes back, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from quickdraft.text.chat_template import ChatTemplate
from tests.support.fake_engine import FakeEngine
from tests.support.thinking_model import CALL, REPLY, THINKING_TEMPLATE

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
TEMPLATE = ChatTemplate(THINKING_TEMPLATE)


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
        ({"stop": "</function>"}, "Let me look.", "stop"),
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


def test_arguments_stream_as_they_are_written(client: openai.OpenAI, thinker: FakeEngine) -> None:
    thinker.reply = "</think>" + CALL.replace("é", "a long string that is written in many steps")
    thinker.tokens_per_step = 1
    calls = [call for chunk in streamed(client)[1] for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.name for call in calls if call.id] == ["look"]
    pieces = [call.function.arguments for call in calls[1:]]
    assert len(pieces) > 20 and json.loads("".join(pieces))["n"] == 3
    assert all(call.index == 0 and call.function.name is None for call in calls[1:])


@pytest.mark.parametrize("max_tokens", range(45, 130, 12))
def test_a_call_that_is_cut_off_keeps_what_was_written(
    client: openai.OpenAI, thinker: FakeEngine, max_tokens: int
) -> None:
    thinker.reply = "</think>" + CALL
    full = '{"n": 3, "at": " é"}'
    choice = create(client, max_tokens=max_tokens).choices[0]
    calls = choice.message.tool_calls or []
    assert all(full.startswith(call.function.arguments) for call in calls)
    if choice.finish_reason == "tool_calls":
        assert [call.function.arguments for call in calls] == [full]
    else:
        assert choice.finish_reason == "length"


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


def test_tokenize_counts_tools_and_variables(http: httpx.Client, thinker: FakeEngine) -> None:
    body = {"messages": [USER], "tools": [LOOK], "chat_template_kwargs": {"enable_thinking": False}}
    ids = http.post("/tokenize", json=body).json()["tokens"]
    text = thinker.tokenizer.decode(ids, skip_special=False)
    assert text == TEMPLATE.render([USER], tools=[LOOK], enable_thinking=False)
    reply = http.post("/tokenize", json={"prompt": "hi", "tools": [LOOK]})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tools"


def test_tool_schemas_reach_the_template_as_they_were_sent(http: httpx.Client, thinker: FakeEngine) -> None:
    tool = json.dumps(LOOK, ensure_ascii=False)
    assert '"default": null' in tool
    body = f'{{"model": "fake", "messages": [{json.dumps(USER)}], "tools": [{tool}]}}'.encode()
    headers = {"content-type": "application/json"}
    assert http.post("/v1/chat/completions", content=body, headers=headers).status_code == 200
    assert tool in prompt_of(thinker)
