"""Anthropic's Messages API, driven by the official client: answers, streams, history and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from quickdraft.server.limits import Limits
from quickdraft.text.chat_template import ChatTemplate
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import complete_app, live_server
from tests.support.thinking_model import CALL, REPLY, THINKING_TEMPLATE

USER: dict[str, Any] = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "default": None}}}
LOOK: dict[str, Any] = {"name": "look", "description": "Löok.", "input_schema": SCHEMA}
CHAT_LOOK = {"type": "function", "function": {"name": "look", "description": "Löok.", "parameters": SCHEMA}}
TEMPLATE = ChatTemplate(THINKING_TEMPLATE)


@pytest.fixture
def claude(base_url: str, engine: FakeEngine) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def create(client: anthropic.Anthropic, **options: Any) -> Any:
    adaptive = {"type": "adaptive"}
    given = {"model": "fake", "max_tokens": 500, "messages": [USER], "tools": [LOOK], "thinking": adaptive}
    merged = {key: value for key, value in {**given, **options}.items() if value is not None}
    return client.messages.create(**merged)


def blocks(message: Any) -> list[dict[str, Any]]:
    """Contents without the ids of calls, which are drawn."""
    return [block.model_dump(exclude={"id"}) for block in message.content]


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.requests[-1][0], skip_special=False)


def test_whole_answer(claude: anthropic.Anthropic, thinker: FakeEngine) -> None:
    answer = create(claude)
    thought, said, *calls = answer.content
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "fake")
    assert (answer.stop_reason, answer.stop_sequence) == ("tool_use", None)
    assert (thought.thinking, said.text) == ("hm, wörld", "Let me look.") and thought.signature
    assert [(c.name, c.input) for c in calls] == [("look", {"n": n, "at": " é"}) for n in (3, 4)]
    assert len({c.id for c in calls}) == 2 and all(c.id.startswith("toolu_") for c in calls)
    usage, prompt = answer.usage, len(thinker.requests[0][0])
    assert (usage.cache_read_input_tokens, usage.input_tokens) == (1, prompt - 1)
    assert usage.output_tokens == answer.model_extra["timings"]["completion_tokens"]
    assert prompt_of(thinker) == TEMPLATE.render([USER], tools=[CHAT_LOOK], enable_thinking=True)


REPLIES = {
    "calls": REPLY,
    "reasoning only": "hm, hm",
    "no reasoning": "\n</think>\n\nfine",
    "a call that is none": "a</think>b\n\n<tool_call>\n{}\n</tool_call>",
    "an open call": "a</think>b" + CALL[:-30],
    "nothing": "",
}


@pytest.mark.parametrize("tokens_per_step", [1, 1000])
@pytest.mark.parametrize("options", [{}, {"stop_sequences": ["Let"]}, {"max_tokens": 100}], ids=str)
@pytest.mark.parametrize("reply", REPLIES)
def test_stream_equals_whole(
    claude: anthropic.Anthropic,
    thinker: FakeEngine,
    reply: str,
    options: dict[str, Any],
    tokens_per_step: int,
) -> None:
    thinker.reply, thinker.tokens_per_step = REPLIES[reply], tokens_per_step
    whole = create(claude, **options)
    messages = claude.messages.stream(
        model="fake", messages=[USER], tools=[LOOK], thinking={"type": "adaptive"},
        **{"max_tokens": 500, **options},
    )  # fmt: skip
    with messages as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    ending = {"stop_reason", "stop_sequence", "usage"}
    assert final.model_dump(include=ending) == whole.model_dump(include=ending)
    known = [{k: v for k, v in one.items() if k != "parsed_output"} for one in blocks(final)]
    assert known == blocks(whole)
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    starts = [kind for kind in kinds if kind in ("content_block_start", "content_block_stop")]
    assert starts == ["content_block_start", "content_block_stop"] * len(whole.content)


@pytest.mark.parametrize(
    ("reply", "options", "reason", "sequence"),
    [
        ("</think>fine", {}, "end_turn", None),
        ("</think>fine", {"max_tokens": 3}, "max_tokens", None),
        ("</think>one two", {"stop_sequences": ["x", " two"]}, "stop_sequence", " two"),
        ("</think>" + "long " * 999, {"max_tokens": 99999}, "model_context_window_exceeded", None),
    ],
)
def test_stop_reasons(
    claude: anthropic.Anthropic,
    thinker: FakeEngine,
    reply: str,
    options: dict[str, Any],
    reason: str,
    sequence: str | None,
) -> None:
    thinker.reply = reply
    answer = create(claude, **options)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)


def test_history_goes_back_into_the_template(claude: anthropic.Anthropic, thinker: FakeEngine) -> None:
    """What came back is sent back as it came, and renders as the text the model wrote."""
    first = create(claude, system="Be brief.")
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": content, **more}
        for call, content, more in zip(
            first.content[2:],
            ("seen", [{"type": "text", "text": "not there"}]),
            ({}, {"is_error": True}),
            strict=True,
        )
    ]
    thinker.reply = "ok</think>done"
    content = [*results, {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}}]
    history = [
        USER,
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": content},
    ]
    assert blocks(create(claude, system="Be brief.", messages=history))[1]["text"] == "done"
    system = {"role": "system", "content": "Be brief."}
    start = TEMPLATE.render([system, USER], tools=[CHAT_LOOK], enable_thinking=True)
    results_text = (
        "<tool_response>\nseen\n</tool_response>\n<tool_response>\nError: not there\n</tool_response>"
    )
    expected = f"{start}{REPLY}<|im_end|>\n<|im_start|>user\n{results_text}<|im_end|>\n"
    assert prompt_of(thinker).startswith(f"{expected}<|im_start|>user\ngo on<|im_end|>\n")


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ({"thinking": None}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"output_config": {"effort": "low"}}, {"enable_thinking": True, "reasoning_effort": "low"}),
        ({"output_config": {"effort": "high"}}, {"enable_thinking": True}),
        ({"tool_choice": {"type": "none"}}, {"enable_thinking": True, "tools": None}),
        ({"extra_body": {"chat_template_kwargs": {"preserve_thinking": False}}},
         {"enable_thinking": True, "preserve_thinking": False}),
    ],
    ids=str,
)  # fmt: skip
def test_options_reach_the_template(
    claude: anthropic.Anthropic, thinker: FakeEngine, options: dict[str, Any], variables: dict[str, Any]
) -> None:
    create(claude, **options)
    shown = {"tools": [CHAT_LOOK], **variables}
    given = {key: value for key, value in shown.items() if value is not None}
    assert prompt_of(thinker) == TEMPLATE.render([USER], **given)


def test_sampling_fields_reach_the_engine(claude: anthropic.Anthropic, thinker: FakeEngine) -> None:
    extra = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "speculation": "off"}
    answer = create(claude, max_tokens=9, stop_sequences=["zz"], extra_body=extra)
    params = thinker.requests[-1][1]
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 7, 3)
    assert (params.max_tokens, params.stop, str(params.speculation)) == (9, ("zz",), "off")
    assert (answer.model_extra["seed"], answer.model_extra["speculation"]) == (3, "off")


def test_one_call_at_a_time(claude: anthropic.Anthropic, thinker: FakeEngine) -> None:
    answer = create(claude, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"surprise": 1}, "unknown field 'surprise'"),
    ({"max_token": 5}, "did you mean 'max_tokens'"),
    ({"max_tokens": 0}, "'max_tokens'"),
    ({"temperature": -1}, "'temperature'"),
    ({"stop_sequences": [""]}, "'stop_sequences'"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "no images"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "assistant", "content": "So"}]}, "the last message is the assistant's"),
    ({"messages": [{"role": "assistant", "content": "So"}] * 2 + [USER], "system": [IMAGE]}, "'system'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tools": [LOOK, LOOK]}, "tools[1]"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display"),
    ({"output_config": {"effort": "max"}}, "No such effort"),
    ({"service_tier": "priority"}, "'service_tier'"),
    ({"speed": "fast"}, "'speed'"),
    ({"mcp_servers": [{"url": "x"}]}, "'mcp_servers'"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "'context_management'"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=lambda value: str(value)[:50])
def test_refusals_name_the_field(
    http: httpx.Client, thinker: FakeEngine, fields: dict[str, Any], message: str
) -> None:
    reply = http.post("/v1/messages", json={"model": "fake", "max_tokens": 9, "messages": [USER], **fields})
    assert reply.status_code == 400, reply.text
    assert reply.json().keys() == {"type", "error"} and reply.json()["type"] == "error"
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert message in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"service_tier": "auto", "speed": "standard", "mcp_servers": [], "metadata": {"user_id": "u"}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"tools": [{**LOOK, "type": "custom", "cache_control": {"type": "ephemeral"}, "strict": False}]},
    ],
    ids=str,
)
def test_what_changes_nothing_is_accepted(
    http: httpx.Client, thinker: FakeEngine, fields: dict[str, Any]
) -> None:
    body = {"model": "fake", "max_tokens": 9, "messages": [USER], **fields}
    reply = http.post("/v1/messages?beta=true", json=body, headers={"anthropic-beta": "some-beta-2030-01-01"})
    assert reply.status_code == 200, reply.text


def test_errors_have_their_own_shape(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    def fails(kind: type[anthropic.APIStatusError], **options: Any) -> tuple[int, str, str]:
        with pytest.raises(kind) as caught:
            create(claude, tools=[], thinking=None, **options)
        error = caught.value.body["error"]
        return caught.value.status_code, error["type"], error["message"]

    found = fails(anthropic.NotFoundError, model="claude-9")
    assert found[:2] == (404, "not_found_error") and "served here: fake" in found[2]
    found = fails(anthropic.BadRequestError, messages=[{"role": "user", "content": "long " * 200}])
    assert found[1] == "invalid_request_error" and found[2].startswith("prompt is too long: ")
    large = [{"role": "user", "content": "x" * (12 << 20)}]
    assert fails(anthropic.APIStatusError, messages=large)[:2] == (413, "request_too_large")
    engine.capacity = 0
    assert fails(anthropic.RateLimitError)[:2] == (429, "rate_limit_error")
    engine.capacity, engine.error_at_step = None, 0
    assert fails(anthropic.InternalServerError)[:2] == (500, "api_error")
    engine.alive = False
    assert fails(anthropic.InternalServerError)[:2] == (529, "overloaded_error")


def test_an_error_in_a_stream_is_its_last_event(claude: anthropic.Anthropic, engine: FakeEngine) -> None:
    engine.error_at_step = 1
    with pytest.raises(anthropic.APIStatusError, match="NaN in the logits"):
        list(create(claude, tools=None, thinking=None, stream=True))


def test_versions_and_other_paths(http: httpx.Client, engine: FakeEngine) -> None:
    body = {"model": "fake", "max_tokens": 9, "messages": [USER]}
    for version, status in (("2023-06-01", 200), ("2029-01-01", 200), ("2023-01-01", 400), ("new", 400)):
        reply = http.post("/v1/messages", json=body, headers={"anthropic-version": version})
        assert reply.status_code == status
    reply = http.get("/v1/messages/batches")
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")


def test_pings_are_events() -> None:
    body = {"model": "fake", "max_tokens": 9, "messages": [USER], "stream": True}
    limits = Limits(ping_seconds=0.02)
    with live_server(complete_app(FakeEngine(step_seconds=0.2), limits=limits), limits) as url:
        text = httpx.post(f"{url}/v1/messages", json=body, trust_env=False, timeout=20).text
    names = [line.partition(": ")[2] for line in text.splitlines() if line.startswith("event: ")]
    assert names[:2] == ["message_start", "ping"] and names[-1] == "message_stop"
    assert "[DONE]" not in text and not any(line.startswith(":") for line in text.splitlines())


@pytest.mark.parametrize("options", [{}, {"system": "Be brief."}, {"tool_choice": {"type": "none"}}], ids=str)
def test_count_is_the_prompt_of_the_same_request(
    claude: anthropic.Anthropic, thinker: FakeEngine, options: dict[str, Any]
) -> None:
    thinking = {"type": "adaptive"}
    given = {"model": "fake", "messages": [USER], "tools": [LOOK], "thinking": thinking, **options}
    counted = claude.messages.count_tokens(**given).input_tokens
    usage = create(claude, **options).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.count_tokens(**{**given, "model": "claude-9"})
    with pytest.raises(anthropic.BadRequestError, match="unknown field 'max_tokens'"):
        claude.messages.count_tokens(**given, extra_body={"max_tokens": 5})
