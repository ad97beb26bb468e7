"""OpenAI's Responses API, driven by the official client: answers, streams, conversations, refusals."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from quickdraft.text.chat_template import ChatTemplate
from tests.server.test_errors import error_of
from tests.support.fake_engine import FakeEngine
from tests.support.thinking_model import CALL, REPLY, THINKING_TEMPLATE

USER: dict[str, Any] = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "default": None}}}
FUNCTION = {"name": "look", "description": "Löok.", "parameters": SCHEMA}
LOOK: dict[str, Any] = {"type": "function", **FUNCTION, "strict": False}
CHAT_LOOK = {"type": "function", "function": FUNCTION}
TEMPLATE = ChatTemplate(THINKING_TEMPLATE)


def create(client: openai.OpenAI, **options: Any) -> Any:
    given = {"model": "fake", "input": "hi", "tools": [LOOK], **options}
    return client.responses.create(**{key: value for key, value in given.items() if value is not None})


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.requests[-1][0], skip_special=False)


def without_drawn(value: Any) -> Any:
    """A JSON value without ids, times and numbers of events."""
    if isinstance(value, list):
        return [without_drawn(one) for one in value]
    if not isinstance(value, dict):
        return value
    drawn = {"id", "call_id", "item_id", "created_at", "completed_at", "sequence_number"}
    return {key: without_drawn(one) for key, one in value.items() if key not in drawn}


def test_whole_answer(client: openai.OpenAI, thinker: FakeEngine) -> None:
    answer = create(client, metadata={"a": "b"}, max_output_tokens=500, instructions="Be brief.")
    thought, said, *calls = answer.output
    assert (answer.object, answer.status, answer.model, answer.error) == (
        "response",
        "completed",
        "fake",
        None,
    )
    assert (thought.content[0].text, thought.summary) == ("hm, wörld", [])
    assert (said.content[0].text, answer.output_text) == ("Let me look.", "Let me look.")
    assert [(c.name, c.arguments) for c in calls] == [("look", f'{{"n": {n}, "at": " é"}}') for n in (3, 4)]
    assert {item.status for item in answer.output} == {"completed"}
    assert len({item.id for item in answer.output}) == 4 and len({c.call_id for c in calls}) == 2
    usage = answer.usage
    assert usage.input_tokens == len(thinker.requests[0][0])
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 1
    thought_tokens = len(thinker.tokenizer.encode("hm, wörld\n</think>"))
    assert usage.output_tokens_details.reasoning_tokens == thought_tokens
    assert (answer.metadata, answer.max_output_tokens, answer.instructions) == ({"a": "b"}, 500, "Be brief.")
    assert answer.tools[0].model_dump(exclude_none=True)["parameters"]["properties"]["n"]["type"] == "integer"
    system = {"role": "system", "content": "Be brief."}
    assert prompt_of(thinker) == TEMPLATE.render([system, USER], tools=[CHAT_LOOK])


REPLIES = {
    "calls": REPLY,
    "reasoning only": "hm, hm",
    "a call that is none": "a</think>b\n\n<tool_call>\n{}\n</tool_call>",
    "an open call": "a</think>b" + CALL[:-30],
    "text behind": "</think>" + CALL + " there",
    "nothing": "",
}
SEALED = {"include": ["reasoning.encrypted_content"], "store": False}


@pytest.mark.parametrize("tokens_per_step", [1, 1000])
@pytest.mark.parametrize(
    "options", [{}, {"max_output_tokens": 60}, {"reasoning": {"summary": "auto"}}, SEALED], ids=str
)
@pytest.mark.parametrize("reply", REPLIES)
def test_stream_equals_whole(
    client: openai.OpenAI, thinker: FakeEngine, reply: str, options: dict[str, Any], tokens_per_step: int
) -> None:
    """The last event holds the whole response, and the events before it add up to the same."""
    thinker.reply, thinker.tokens_per_step = REPLIES[reply], tokens_per_step
    whole = create(client, **options).to_dict()
    events = [event.to_dict() for event in create(client, stream=True, **options)]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert without_drawn(events[-1]["response"]) == without_drawn(whole)
    output = events[-1]["response"]["output"]
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == output
    added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    assert [item["id"] for item in added] == [item["id"] for item in output]
    assert not any(item.get("arguments") or item.get("content") for item in added)
    for index, item in enumerate(output):
        own = [e for e in events if e.get("output_index") == index]
        text = "".join(e["delta"] for e in own if e["type"].endswith(".delta"))
        done = [
            e.get("text", e.get("arguments"))
            for e in own
            if e["type"].endswith(("text.done", "arguments.done"))
        ]
        parts = item.get("content") or item.get("summary") or [{"text": item.get("arguments")}]
        assert [text] == done == [part["text"] for part in parts]


def test_the_client_puts_a_stream_together(client: openai.OpenAI, thinker: FakeEngine) -> None:
    with client.responses.stream(model="fake", input="hi", tools=[LOOK]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.done") == 2
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]


@pytest.mark.parametrize(
    ("reply", "options", "statuses"),
    [
        ("</think>fine", {"max_output_tokens": 3}, ["incomplete"]),
        ("hm</think>fine", {"max_output_tokens": 4}, ["completed", "incomplete"]),
        ("</think>" + CALL, {"max_output_tokens": 60}, ["incomplete"]),
    ],
)
def test_a_limit_makes_it_incomplete(
    client: openai.OpenAI, thinker: FakeEngine, reply: str, options: dict[str, Any], statuses: list[str]
) -> None:
    thinker.reply = reply
    answer = create(client, **options)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in answer.output] == statuses


def results(answer: Any) -> list[dict[str, Any]]:
    calls = [item for item in answer.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": c.call_id, "output": "seen"} for c in calls]


@pytest.mark.parametrize("how", ["previous_response_id", "items", "sealed", "summary"])
def test_a_conversation_goes_on_as_the_model_wrote_it(
    client: openai.OpenAI, thinker: FakeEngine, how: str
) -> None:
    """Stored or sent back: the next prompt begins with the last one and the answer to it."""
    options: dict[str, Any] = {"sealed": SEALED, "summary": {"reasoning": {"summary": "auto"}}}.get(how, {})
    first = create(client, instructions="Be brief.", **options)
    thinker.reply = "ok</think>done"
    if how == "previous_response_id":
        more: dict[str, Any] = {"previous_response_id": first.id, "input": results(first)}
    else:
        output = [item.model_dump(exclude_none=True) for item in first.output]
        if how == "sealed":
            output[0].pop("content")  # as clients do that must not show what was thought
        more = {"input": [USER, *output, *results(first)]}
    second = create(client, instructions="Be brief.", **options, **more)
    assert second.output_text == "done"
    start = TEMPLATE.render([{"role": "system", "content": "Be brief."}, USER], tools=[CHAT_LOOK])
    assert prompt_of(thinker).startswith(
        start + REPLY + "<|im_end|>\n<|im_start|>user\n<tool_response>\nseen"
    )
    if how == "previous_response_id":
        third = create(client, previous_response_id=second.id, input="and?", tools=None)
        assert third.previous_response_id == second.id
        assert "Be brief." not in prompt_of(thinker), "instructions are those of the request"
        assert prompt_of(thinker).count("<|im_start|>user") == 3


def test_leading_systems_are_one(client: openai.OpenAI, thinker: FakeEngine) -> None:
    items = [{"role": "developer", "content": [{"type": "input_text", "text": "Two."}]}, USER]
    create(client, instructions="One.", input=items, tools=None)
    assert prompt_of(thinker) == TEMPLATE.render([{"role": "system", "content": "One.\n\nTwo."}, USER])


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ({"reasoning": {"effort": "none"}}, {"enable_thinking": False}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"tool_choice": "none"}, {"tools": None}),
        ({"extra_body": {"chat_template_kwargs": {"preserve_thinking": False}}},
         {"preserve_thinking": False}),
    ],
    ids=str,
)  # fmt: skip
def test_options_reach_the_template(
    client: openai.OpenAI, thinker: FakeEngine, options: dict[str, Any], variables: dict[str, Any]
) -> None:
    create(client, **options)
    given = {"tools": [CHAT_LOOK], **variables}
    shown = {key: value for key, value in given.items() if value is not None}
    assert prompt_of(thinker) == TEMPLATE.render([USER], **shown)


def test_sampling_fields_reach_the_engine(client: openai.OpenAI, thinker: FakeEngine) -> None:
    extra = {"seed": 3, "speculation": "off"}
    answer = create(client, temperature=0.5, top_p=0.9, max_output_tokens=9, extra_body=extra)
    params = thinker.requests[-1][1]
    assert (params.temperature, params.top_p, params.seed, params.max_tokens) == (0.5, 0.9, 3, 9)
    assert (str(params.speculation), answer.temperature, answer.top_p) == ("off", 0.5, 0.9)
    assert (answer.model_extra["seed"], answer.model_extra["speculation"]) == (3, "off")
    assert (
        len([i for i in create(client, parallel_tool_calls=False).output if i.type == "function_call"]) == 1
    )


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}
SEAL = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "gAAAA"}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"surprise": 1}, "surprise", "unknown field"),
    ({"max_tokens": 5}, "max_tokens", "unknown field"),
    ({"max_output_tokens": 0}, "max_output_tokens", "[1,"),
    ({"temperature": -1}, "temperature", "[0, 100]"),
    ({"input": []}, "input", "at least 1"),
    ({"input": [IMAGE]}, "input[0].message.content", "no images"),
    ({"input": [USER, {"type": "item_reference", "id": "x"}]}, "input", "item 1 has type 'item_reference'"),
    ({"input": [USER, SEAL]}, "input[1].encrypted_content", "this server sent"),
    ({"input": [USER, {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{"}]},
     "input[1].arguments", "JSON object"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tool 0 has type 'web_search'"),
    ({"tools": [LOOK, LOOK]}, "tools[1]", "each name once"),
    ({"tool_choice": "sometimes"}, "tool_choice", "sometimes"),
    ({"reasoning": {"effort": "max"}}, "None", "No such effort"),
    ({"reasoning": {"summary": "concise"}}, "reasoning.summary", "auto"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", "needs 'name' and 'schema'"),
    ({"include": ["file_search_call.results"]}, "include[0]", "encrypted_content"),
    ({"truncation": "auto"}, "truncation", "auto"),
    ({"background": True}, "background", "true"),
    ({"top_logprobs": 2}, "top_logprobs", "got 2"),
    ({"conversation": "conv_1"}, "conversation", "conv_1"),
    ({"max_tool_calls": 2}, "max_tool_calls", "not supported"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "at least 1 item"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", "False"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), BAD, ids=lambda value: str(value)[:50])
def test_refusals_name_the_field(
    http: httpx.Client, thinker: FakeEngine, fields: dict[str, Any], param: str, message: str
) -> None:
    reply = http.post("/v1/responses", json={"model": "fake", "input": "hi", **fields})
    error = error_of(reply, 400)
    assert str(error["param"]) == param and message in error["message"]


def test_earlier_calls_that_a_template_does_not_know_are_named(
    http: httpx.Client, engine: FakeEngine
) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    items = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}, call]
    reply = http.post("/v1/responses", json={"model": "fake", "input": items})
    assert error_of(reply, 400)["param"] == "input[2]"
    use = [{"type": "text", "text": "x"}, {"type": "tool_use", "id": "c", "name": "look", "input": {}}]
    messages = [items[0], {"role": "assistant", "content": use}, items[0]]
    reply = http.post("/v1/messages", json={"model": "fake", "max_tokens": 5, "messages": messages})
    assert reply.status_code == 400 and "'messages[1].content[1]'" in reply.json()["error"]["message"]


def test_what_changes_nothing_is_accepted(http: httpx.Client, thinker: FakeEngine) -> None:
    off = {
        "background": False, "truncation": "disabled", "service_tier": "auto", "top_logprobs": 0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "conversation": None, "user": "u",
        "safety_identifier": "s", "prompt_cache_key": "k", "context_management": [],
    }  # fmt: skip
    reply = http.post("/v1/responses", json={"model": "fake", "input": "hi", **off})
    assert reply.status_code == 200, reply.text


def test_errors(client: openai.OpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.NotFoundError, match="served here: fake"):
        create(client, model="gpt-9", tools=None)
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, input="long " * 200, tools=None)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    engine.error_at_step = 1
    with pytest.raises(openai.InternalServerError, match="NaN in the logits"):
        create(client, tools=None)
    events = list(create(client, tools=None, stream=True))
    assert events[-1].type == "response.failed"
    assert "NaN in the logits" in events[-1].response.error.message
    assert (events[-1].response.status, events[-1].sequence_number) == ("failed", len(events) - 1)
