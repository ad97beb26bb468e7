"""Everything wrong a client can send, and an engine that fails: clear errors, the server stays up."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import MAX_BODY_BYTES
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import complete_app, live_server

USER = [{"role": "user", "content": "hi"}]
PATH = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def still_serving(http: httpx.Client, engine: FakeEngine) -> Iterator[None]:
    """After every test here the server answers, and nothing it started is left running."""
    yield
    engine.alive, engine.failure, engine.reply = True, None, "hello"
    engine.fail_at_step = engine.error_at_step = None
    reply = http.post(PATH, json={"model": "fake", "messages": USER})
    assert reply.status_code == 200 and engine.running == set()


def error_of(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == {404: "not_found_error"}.get(
        status, "server_error" if status >= 500 else "invalid_request_error"
    )
    return dict(error)


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"temprature": 1}, "temprature", "did you mean 'temperature'"),
    ({"guided_json": {}}, "guided_json", "unknown field"),
    ({"stream_options": {"surprise": 1}, "stream": True}, "stream_options.surprise", "unknown"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream true"),
    ({"n": 0}, "n", "1..64"),
    ({"n": 65}, "n", "got 65"),
    ({"n": True}, "n", "valid integer"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ({"tool_choice": "required"}, "tool_choice", "required"),
    ({"store": True}, "store", "not supported"),
    ({"thinking_budget": 5}, "thinking_budget", "does not think"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "high"),
    ({"temperature": "1"}, "temperature", "valid number"),
    ({"temperature": -1}, "temperature", "[0, 100]"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"top_k": 1.5}, "top_k", "valid integer"),
    ({"top_k": -1}, "top_k", "[0,"),
    ({"min_p": 2}, "min_p", "[0, 1]"),
    ({"presence_penalty": 3}, "presence_penalty", "[-2, 2]"),
    ({"repetition_penalty": 0}, "repetition_penalty", "[0.01"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "[-100, 100]"),
    ({"logit_bias": {"999999": 1}}, "logit_bias", "ids in"),
    ({"logit_bias": [1]}, "logit_bias", "valid dictionary"),
    ({"seed": 2**64}, "seed", "integer"),
    ({"seed": "1"}, "seed", "valid integer"),
    ({"stop": ""}, "stop", "1 to 1000"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop": [1]}, "stop[0]", "valid string"),
    ({"stop": 5}, "stop", "valid list"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "[0,"),
    ({"max_tokens": 0}, "max_tokens", "[1,"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "same as max_tokens (5)"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "at most max_tokens 5"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs to be true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "[0, 20]"),
    ({"logprobs": 3}, "logprobs", "valid boolean"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"speculation": "magic"}, "speculation", "hint: for example lookup@16"),
    ({"speculation": "dflash2+lookup@8"}, "speculation", "sources this server has: lookup"),
    ({"speculation": 3}, "speculation", "valid string"),
    ({"user": 3}, "user", "valid string"),
    ({"metadata": {"a": 1}}, "metadata.a", "valid string"),
    ({"messages": None}, "messages", "required"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "hi"}, "messages", "valid list"),
    ({"messages": ["hi"]}, "messages[0]", "valid dictionary"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role", "'system'"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "valid string"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
        "image_url",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content", "part 0"),
    ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content", "part 0"),
    ({"messages": [{**USER[0], "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id", "required"),
    ({"messages": [{**USER[0], "tool_call_id": "x"}]}, "messages[0]", "tool_call_id"),
    ({"model": None}, "model", "required"),
    ({"model": 5}, "model", "valid string"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD_FIELDS, ids=lambda value: str(value)[:50])
def test_bad_fields(
    http: httpx.Client, engine: FakeEngine, fields: dict[str, Any], param: str, message: str
) -> None:
    error = error_of(http.post(PATH, json={"model": "fake", "messages": USER, **fields}), 400)
    assert error["param"] == param and message in error["message"] and param in error["message"]
    assert error["code"] in {
        "unknown_parameter", "unsupported_parameter", "invalid_value", "missing_required_parameter"
    }  # fmt: skip
    assert engine.requests == []


BAD_BODIES: dict[str, bytes] = {
    "empty": b"",
    "cut off": json.dumps({"model": "fake", "messages": USER}).encode()[:-5],
    "not an object": b"[1, 2]",
    "a null": b"null",
    "nan": b'{"model": "fake", "temperature": NaN}',
    "infinity": b'{"model": "fake", "temperature": -Infinity}',
    "deep list": b"[" * 500_000,
    "deep object": b'{"a":' * 100_000,
    "deep and closed": b'{"messages":' + b"[" * 500 + b"]" * 500 + b"}",
    "not utf-8": b'{"model": "\xff\xfe"}',
    "utf-16": '{"model": "fake"}'.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "huge integer": b'{"seed": ' + b"9" * 10_000 + b"}",
    "garbage": os.urandom(1 << 20),
    "text garbage": b"x" * (1 << 20),
    "two values": b"{} {}",
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_bad_bodies(http: httpx.Client, name: str) -> None:
    error = error_of(http.post(PATH, content=BAD_BODIES[name], headers=JSON), 400)
    assert error["code"] == "invalid_json" and len(error["message"]) < 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"model": "fake", "messages": [{"role": "user", "content": "a\\ud83d"}]}', "messages[0].content"),
        ('{"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stop": "\\udc00"}', "stop"),
        ('{"model": "\\ud800", "messages": [{"role": "user", "content": "hi"}]}', "model"),
        ('{"model": "fake", "messages": [{"role": "user", "content": "hi"}], "\\ud800": 1}', "?"),
        (
            '{"model": "fake", "messages": [{"role": "user", "content": '
            '[{"type": "text", "text": "\\ud83d"}]}]}',
            "messages[0].content[0].text",
        ),
        ('{"model": "fake", "messages": [{"role": "user", "content": "hi"}], "seed": 1e999}', "seed"),
        ('{"model": "fake", "messages": [{"role": "user", "content": "hi"}], "min_p": 1e999}', "min_p"),
    ],
)
def test_lone_surrogates_and_overflows_name_the_field(http: httpx.Client, body: str, param: str) -> None:
    assert error_of(http.post(PATH, content=body, headers=JSON), 400)["param"] == param


def test_half_an_emoji_each_is_a_whole_one(http: httpx.Client, engine: FakeEngine) -> None:
    body = '{"model": "fake", "messages": [{"role": "user", "content": "\\ud83c\\udf89"}]}'
    assert http.post(PATH, content=body, headers=JSON).status_code == 200
    assert "🎉" in engine.tokenizer.decode(engine.requests[0][0])


def test_unknown_model_lists_those_served(client: openai.OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.NotFoundError, match=r"fake, fake\.Q4_1") as caught:
        client.chat.completions.create(model="gpt-4o", messages=USER)
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    error_of(http.get("/v1/models/gpt-4o"), 404)


def test_prompt_too_long_has_both_numbers(client: openai.OpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "ab" * 400}])
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
    assert "512" in caught.value.message and "819" in caught.value.message
    assert engine.requests == []


def test_ten_megabyte_prompt(http: httpx.Client) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "word " * (2 << 20)}]}
    assert error_of(http.post(PATH, json=body), 400)["code"] == "context_length_exceeded"


def test_body_limit_by_length_and_by_count(http: httpx.Client) -> None:
    big = b" " * (MAX_BODY_BYTES + 1)
    assert error_of(http.post(PATH, content=big, headers=JSON), 413)["code"] == "body_too_large"
    chunks = (b" " * (1 << 20) for _ in range(14))  # sent chunked, without a length
    assert error_of(http.post(PATH, content=chunks, headers=JSON), 413)["code"] == "body_too_large"


def test_other_content_types_paths_and_methods(http: httpx.Client) -> None:
    good = json.dumps({"model": "fake", "messages": USER})
    error = error_of(http.post(PATH, content=good, headers={"Content-Type": "text/plain"}), 415)
    assert "application/json" in error["message"]
    assert http.post(
        PATH, content=good, headers={"Content-Type": "application/json; charset=utf-8"}
    ).is_success
    error_of(http.get("/nothing"), 404)
    error_of(http.get(PATH), 405)


def raw(base_url: str, data: bytes, *, half_close: bool = False) -> bytes:
    host, port = base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        return connection.recv(65536)


def test_connection_cut_in_the_body(base_url: str) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    raw(base_url, head + b'Content-Length: 1000\r\n\r\n{"model": "fa', half_close=True)


def test_bytes_that_are_not_http(base_url: str) -> None:
    assert raw(base_url, b"\x16\x03\x01\x02\x00 hello\r\n\r\n").startswith(b"HTTP/1.1 400")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    assert b" 400 " in raw(base_url, head + b"Content-Length: -5\r\n\r\n{}").split(b"\r\n")[0]


def test_engine_failure_whole(http: httpx.Client, engine: FakeEngine) -> None:
    engine.fail_at_step = 1
    reply = http.post(PATH, json={"model": "fake", "messages": USER})
    assert error_of(reply, 503)["code"] == "engine_unavailable" and int(reply.headers["retry-after"]) > 0
    health = http.get("/health")
    assert error_of(health, 503)["type"] == "server_error" and int(health.headers["retry-after"]) > 0
    reply = http.post(PATH, json={"model": "fake", "messages": USER})
    assert error_of(reply, 503)["code"] == "engine_unavailable" and len(engine.requests) == 1


def test_engine_failure_streamed(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.fail_at_step = 1
    text = ""
    with pytest.raises(openai.APIError, match="a scripted failure"):
        for chunk in client.chat.completions.create(model="fake", messages=USER, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == "hello w"


def test_failed_request(client: openai.OpenAI, http: httpx.Client, engine: FakeEngine) -> None:
    engine.error_at_step = 1
    with pytest.raises(openai.APIError, match="NaN in the logits"):
        list(client.chat.completions.create(model="fake", messages=USER, stream=True))
    reply = http.post(PATH, json={"model": "fake", "messages": USER})
    error = error_of(reply, 500)
    assert "NaN in the logits" in error["message"] and error["code"] == "request_failed"
    assert http.get("/health").status_code == 200


def test_unexpected_error_is_a_clean_500(
    http: httpx.Client, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(prompt_ids: Any) -> list[int]:
        raise KeyError("secret detail")

    engine.reply = explode
    error = error_of(http.post(PATH, json={"model": "fake", "messages": USER}), 500)
    assert "secret" not in error["message"] and "secret detail" in caplog.text


def test_template_refusal_is_400(engine: FakeEngine) -> None:
    from quickdraft.text.chat_template import ChatTemplate

    refusing = FakeEngine(chat_template=ChatTemplate("{{ raise_exception('roles must alternate') }}"))
    mute = FakeEngine(chat_template=None)
    for fake, part in ((refusing, "roles must alternate"), (mute, "no chat template")):
        with live_server(complete_app(fake)) as url:
            reply = httpx.post(url + PATH, json={"model": "fake", "messages": USER}, trust_env=False)
            assert part in error_of(reply, 400)["message"]
