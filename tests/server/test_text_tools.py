"""/tokenize and /detokenize in vLLM's shapes, at both paths; /version."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

import quickdraft
from tests.support.byte_tokenizer import IM_START
from tests.support.fake_engine import FakeEngine

MESSAGES = [{"role": "user", "content": "hello <|im_end|>"}]


@pytest.fixture(params=["", "/v1"])
def prefix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_round_trip(http: httpx.Client, engine: FakeEngine, prefix: str) -> None:
    text = "<|im_start|>hello wörld 🎉\n"
    reply = http.post(f"{prefix}/tokenize", json={"prompt": text, "return_token_strs": True})
    ids = engine.tokenizer.encode(text, special=True)
    assert reply.json() == {
        "count": len(ids),
        "max_model_len": 512,
        "tokens": ids,
        "token_strs": [engine.tokenizer.token_text(token) for token in ids],
    }
    assert ids[0] == IM_START
    back = http.post(f"{prefix}/detokenize", json={"model": "fake", "tokens": ids})
    assert back.json() == {"prompt": text}
    assert http.post(f"{prefix}/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    "more", [{}, {"add_generation_prompt": False}, {"add_special_tokens": False}], ids=str
)
def test_messages_give_the_ids_the_chat_endpoint_uses(
    http: httpx.Client, engine: FakeEngine, more: dict[str, Any]
) -> None:
    tokens = http.post("/tokenize", json={"messages": MESSAGES, **more}).json()["tokens"]
    http.post("/v1/chat/completions", json={"model": "fake", "messages": MESSAGES})
    used = engine.requests[0][0]
    if more.get("add_generation_prompt", True):
        assert tokens == used
    else:
        assert tokens == used[: len(tokens)] and engine.tokenizer.decode(used[len(tokens) :]) == "assistant\n"


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("tokenize", {}, "prompt", "either 'prompt' or 'messages'"),
    ("tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt", "either"),
    ("tokenize", {"prompt": 5}, "prompt", "valid string"),
    ("tokenize", {"prompt": "a", "surprise": 1}, "surprise", "unknown field"),
    ("tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt", "messages"),
    ("tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens", "template"),
    ("tokenize", {"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ("tokenize", {"prompt": "a", "return_token_strs": 1}, "return_token_strs", "boolean"),
    ("detokenize", {}, "tokens", "required"),
    ("detokenize", {"tokens": "abc"}, "tokens", "a list of token ids"),
    ("detokenize", {"tokens": [1, "a"]}, "tokens[1]", "a token id"),
    ("detokenize", {"tokens": [1, -1]}, "tokens[1]", "an id in 0.."),
    ("detokenize", {"tokens": [268]}, "tokens[0]", "0..267"),
    ("detokenize", {"tokens": [1] * ((1 << 20) + 1)}, "tokens", "at most 1048576"),
    ("detokenize", {"tokens": [1], "prompt": "a"}, "prompt", "unknown field"),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_requests(http: httpx.Client, path: str, body: dict[str, Any], param: str, message: str) -> None:
    reply = http.post(f"/{path}", json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param and message in error["message"]


def test_unknown_model_and_body_limit(http: httpx.Client) -> None:
    for path, body in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [1]})):
        assert http.post(f"/{path}", json={**body, "model": "gpt-4"}).status_code == 404
        big = b" " * (13 << 20)
        reply = http.post(f"/{path}", content=big, headers={"Content-Type": "application/json"})
        assert reply.status_code == 413


def test_version(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": quickdraft.__version__}
    assert http.head("/version").status_code == 200 and http.post("/version").status_code == 405
