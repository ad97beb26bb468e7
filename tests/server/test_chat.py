"""Chat completions through the official client: whole and streamed, logprobs, stops, usage, echo fields."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import openai
import pytest

from tests.support.byte_tokenizer import IM_END, IM_START
from tests.support.fake_engine import FakeEngine

USER = [{"role": "user", "content": "hi"}]
REPLY = "hello wörld 🎉!"


def create(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "fake", "messages": USER, **options})


def stream(client: openai.OpenAI, **options: Any) -> list[Any]:
    return list(create(client, stream=True, **options))


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_whole_answer(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = create(client, seed=11)
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == "fake"
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", REPLY, "stop")
    assert choice.logprobs is None
    usage = answer.usage
    assert usage.prompt_tokens == len(engine.requests[0][0])
    assert usage.completion_tokens == len(engine.tokenizer.encode(REPLY)) + 1  # the stop token counts
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 1
    details = usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    extra = answer.model_extra
    assert extra["seed"] == 11 and extra["speculation"] == "auto"
    assert extra["prefix_cache"]["reason"] == "differs" and extra["prefix_cache"]["cached_token"] == 9
    assert extra["timings"]["steps"] + extra["timings"]["accepted"]["lookup"] == usage.completion_tokens


def test_the_prompt_is_the_rendered_template(client: openai.OpenAI, engine: FakeEngine) -> None:
    messages = [
        {"role": "developer", "content": "be <|im_end|> brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "tool_calls": None},
        {"role": "tool", "content": "d", "tool_call_id": "x"},
    ]
    create(client, messages=messages)
    ids, _ = engine.requests[0]
    assert engine.tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>system\nbe <|im_end|> brief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\nc<|im_end|>\n<|im_start|>tool\nd<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (ids.count(IM_START), ids.count(IM_END)) == (5, 4)


def test_parameters_reach_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True}
    extra |= {"stop_token_ids": [9], "speculation": "lookup@16"}
    options: dict[str, Any] = {"temperature": 0, "top_p": 0.5, "presence_penalty": 1, "frequency_penalty": -1}
    options |= {"logit_bias": {"5": -100}, "seed": 3, "stop": ["x", "y"], "max_completion_tokens": 4}
    answer = create(client, **options, extra_body=extra)
    assert answer.model_extra["speculation"] == "lookup@16"
    _, params = engine.requests[0]
    for name, value in {**extra, **options}.items():
        ours = getattr(params, {"max_completion_tokens": "max_tokens"}.get(name, name))
        shown = {"stop": ("x", "y"), "logit_bias": {5: -100.0}, "stop_token_ids": (9,)}.get(name, value)
        assert (str(ours) if name == "speculation" else ours) == shown
    create(client)
    _, params = engine.requests[1]
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (1.0, 1.0, None, None)
    assert params.logprobs is None and params.speculation.auto


def test_streamed_answer(client: openai.OpenAI) -> None:
    chunks = stream(client)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text_of(chunks) == REPLY
    assert all("\ufffd" not in (chunk.choices[0].delta.content or "") for chunk in chunks)
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1].model_extra["timings"]["completion_tokens"] > 0
    assert chunks[-1].model_extra["seed"] == 7 and chunks[-1].model_extra["speculation"] == "auto"
    assert len({chunk.id for chunk in chunks}) == 1 and all(c.usage is None for c in chunks)


def test_usage_chunk_when_asked_for(client: openai.OpenAI) -> None:
    chunks = stream(client, stream_options={"include_usage": True})
    assert chunks[-1].choices == [] and chunks[-1].usage == create(client).usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("tokens_per_step", [1, 2, 5, 100])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 4},  # ends inside ö
        {"stop": "wör"},
        {"stop": ["🎉", "zzz"]},
        {"stop": ["hello"]},
        {"stop": ["!!"]},
        {"stop": "h", "extra_body": {"min_tokens": 3}},
    ],
    ids=str,
)
def test_stream_equals_whole(
    client: openai.OpenAI, engine: FakeEngine, tokens_per_step: int, options: dict[str, Any]
) -> None:
    engine.tokens_per_step = tokens_per_step
    whole = create(client, **options)
    chunks = stream(client, **options)
    assert text_of(chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    for name in ("timings", "prefix_cache", "seed", "speculation"):
        assert chunks[-1].model_extra[name] == whole.model_extra[name]


def test_stop_text_is_not_returned_and_length_is_said(client: openai.OpenAI) -> None:
    choice = create(client, stop=["wör"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("hello ", "stop")
    choice = create(client, max_tokens=1).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("hello", "length")
    assert create(client, max_tokens=10**6).choices[0].message.content == REPLY


@pytest.mark.parametrize("top", [0, 2])
def test_logprobs(client: openai.OpenAI, top: int) -> None:
    answer = create(client, logprobs=True, top_logprobs=top)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert (content[0].token, content[0].logprob, bytes(content[0].bytes)) == ("hello", -0.5, b"hello")
    assert (content[-1].token, content[-1].bytes) == ("<|im_end|>", None)
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == REPLY
    assert [len(entry.top_logprobs) for entry in content] == [top] * len(content)
    streamed = [
        entry
        for chunk in stream(client, logprobs=True, top_logprobs=top)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == content


def test_logprobs_without_alternatives(client: openai.OpenAI) -> None:
    content = create(client, logprobs=True).choices[0].logprobs.content
    assert all(entry.top_logprobs == [] for entry in content)


async def ask_async(base_url: str) -> tuple[str, str]:
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", timeout=20) as client:
        whole = await client.chat.completions.create(model="fake", messages=USER)
        parts = await client.chat.completions.create(model="fake", messages=USER, stream=True)
        text = "".join([part.choices[0].delta.content or "" async for part in parts])
    return whole.choices[0].message.content, text


def test_async_client(base_url: str, engine: FakeEngine) -> None:
    import asyncio

    assert asyncio.run(ask_async(base_url)) == (REPLY, REPLY)


def test_values_that_mean_off_are_accepted(http: httpx.Client) -> None:
    off: dict[str, Any] = {
        "n": 1, "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "store": False,
        "logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}, "stream": False,
        "reasoning_effort": "none", "service_tier": "auto", "modalities": ["text"],
    }  # fmt: skip
    nulls = dict.fromkeys(
        [
            "temperature",
            "stop",
            "seed",
            "max_tokens",
            "tools",
            "logit_bias",
            "stream_options",
            "user",
            "audio",
        ]
    )
    for fields in (off, nulls, {"stream": True, "stream_options": {"include_usage": None}}):
        reply = http.post("/v1/chat/completions", json={"model": "fake", "messages": USER, **fields})
        assert reply.status_code == 200, reply.text


def test_models_and_health(client: openai.OpenAI, http: httpx.Client) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["fake", "fake.Q4_1"]
    assert models[0].model_extra["max_model_len"] == 512
    assert models[0].model_extra["speculation"] == {"default": "auto", "sources": ["lookup"]}
    assert client.models.retrieve("fake.Q4_1").id == "fake.Q4_1"
    assert create(client, model="fake.Q4_1").model == "fake.Q4_1"
    assert http.get("/health").status_code == 200


def test_raw_stream_bytes(http: httpx.Client, engine: FakeEngine) -> None:
    engine.reply = "line\u2028two\nthree"
    body = {"model": "fake", "messages": USER, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert "content-length" not in reply.headers
        raw = reply.read().decode()
    events = raw.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1]) and raw.isascii()
    assert json.loads(events[0].removeprefix("data: "))["object"] == "chat.completion.chunk"


def test_one_log_line_with_the_labels(client: openai.OpenAI, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="quickdraft.requests"):
        answer = create(client, user="me\nyou", metadata={"job": "7"})
        with pytest.raises(openai.BadRequestError):
            create(client, n=0)
    good, bad = (record.getMessage() for record in caplog.records if record.name == "quickdraft.requests")
    for part in (answer.id, r'user="me\nyou"', '{"job": "7"}', "status=200", "prompt_tokens=", "finish=stop"):
        assert part in good
    for part in (
        "cached_tokens=1", "completion_tokens=13", "drafted=lookup:9", "accepted=lookup:8",
        "speculation=auto", "queue_ms=1.0", "ttft_ms=",
        "prompt_ms=2.0", "decode_ms=4.0", "tokens_per_second=3250.0", "steps=5",
        "cache=differs@1:5/9",
    ):  # fmt: skip
        assert part in good
    assert "status=400" in bad and "bad value for 'n'" in bad
