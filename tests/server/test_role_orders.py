"""Conversations in odd orders, over templates that take all and templates that refuse some: an answer,
or a 400 with the template's own sentence, never a 500."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.tokenizer import Tokenizer
from tests.server.test_tools_and_thinking import LOOK
from tests.support.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer_data
from tests.support.fake_engine import FakeEngine
from tests.support.hermes_model import HERMES_TEMPLATE, STRICT_TEMPLATE
from tests.support.thinking_model import THINKING_TEMPLATE

TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "thinking": THINKING_TEMPLATE,
    "hermes": HERMES_TEMPLATE,
    "strict": STRICT_TEMPLATE,
}
FIRST, NOBODY, TURNS = "Only the first message", "Nobody asks anything", "roles must alternate"
NO_CALLS = "knows no tool calls"


def said(role: str, content: Any = "x", **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"n": 1}'}}
USER, SYSTEM, DEVELOPER, ASSISTANT = map(said, ("user", "system", "developer", "assistant"))
RESULT = said("tool", tool_call_id="call_1")
# A conversation -> what the templates say that refuse it.
ORDERS: dict[str, tuple[list[dict[str, Any]], dict[str, str]]] = {
    "developer": ([DEVELOPER, USER], {}),
    "two developers": ([DEVELOPER, DEVELOPER, USER], {"thinking": FIRST, "strict": TURNS}),
    "developer after system": ([SYSTEM, DEVELOPER, USER], {"thinking": FIRST, "strict": TURNS}),
    "system in the middle": ([USER, ASSISTANT, SYSTEM, USER], {"thinking": FIRST, "strict": TURNS}),
    "system at the end": ([USER, SYSTEM], {"thinking": FIRST}),
    "only a system": ([SYSTEM], {"thinking": NOBODY, "strict": "There is no user"}),
    "two users": ([USER, USER], {"strict": TURNS}),
    "assistant first": ([ASSISTANT, USER], {"strict": TURNS}),
    "assistant last": ([USER, ASSISTANT], {}),
    "two assistants": ([USER, ASSISTANT, ASSISTANT, USER], {"strict": TURNS}),
    "tool without a call": ([USER, said("tool")], {}),
    "tool first": ([RESULT, USER], {"strict": TURNS}),
    "tool of an unknown call": ([USER, said("tool", tool_call_id="never")], {}),
    "empty": ([said("system", ""), said("user", ""), said("assistant", ""), said("user", [])], {}),
    "names": ([said("system", name="a"), said("user", name="b"), said("assistant", name="c"), USER], {}),
    "content null with calls": (
        [USER, said("assistant", None, tool_calls=[CALL]), RESULT], {"plain": NO_CALLS, "strict": NO_CALLS}),
    "results in a row": (
        [USER, said("assistant", None, tool_calls=[CALL, {**CALL, "id": "call_2"}]),
         said("tool", "b", tool_call_id="call_2"), said("tool", "a", tool_call_id="call_1")],
        {"plain": NO_CALLS, "strict": NO_CALLS},
    ),
    "calls without results": (
        [USER, said("assistant", tool_calls=[CALL]), USER], {"plain": NO_CALLS, "strict": NO_CALLS}),
}  # fmt: skip


@pytest.fixture(params=TEMPLATES)
def template(request: pytest.FixtureRequest, engine: FakeEngine) -> Iterator[str]:
    data = byte_tokenizer_data(chat_template=TEMPLATES[request.param])
    plain = engine.tokenizer, engine.chat_template
    engine.tokenizer, engine.chat_template = Tokenizer(data), ChatTemplate.of(data)
    engine.max_context_tokens = 4096
    yield request.param
    engine.tokenizer, engine.chat_template = plain


@pytest.mark.parametrize("order", ORDERS)
def test_an_answer_or_a_sentence(http: httpx.Client, engine: FakeEngine, template: str, order: str) -> None:
    messages, refusals = ORDERS[order]
    reply = http.post("/v1/chat/completions", json={"model": "fake", "messages": messages})
    if template in refusals:
        assert reply.status_code == 400 and refusals[template] in reply.json()["error"]["message"]
        assert engine.requests == []
    else:
        assert reply.status_code == 200, reply.text
        shown = engine.tokenizer.decode(engine.requests[0][0], skip_special=False)
        texts = [m["content"] for m in messages if isinstance(m["content"], str)]
        assert all(text in shown for text in texts)


CHANGES: list[tuple[dict[str, Any], str]] = [
    (said("user", None), "messages[0].content"),
    ({"role": "user"}, "messages[0].content"),
    (said("assistant", None), "messages[0].content"),
    (said("critic"), "messages[0].role"),
    ({"content": "x"}, "messages[0].role"),
    (said("user", 5), "messages[0].content"),
    (said("user", {"type": "text", "text": "x"}), "messages[0].content"),
    (said("user", [{"type": "text"}]), "messages[0].content"),
    (said("user", tool_call_id="x"), "messages[0]"),
]


@pytest.mark.parametrize(("message", "param"), CHANGES, ids=str)
def test_bad_messages_are_named(
    http: httpx.Client, engine: FakeEngine, message: dict[str, Any], param: str
) -> None:
    reply = http.post("/v1/chat/completions", json={"model": "fake", "messages": [message]})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param and not engine.requests


@pytest.mark.parametrize("template", ["hermes"], indirect=True)
def test_results_keep_their_order_and_calls_their_text(
    http: httpx.Client, engine: FakeEngine, template: str
) -> None:
    """Results stand where the client put them: which call they answer is the client's word."""
    http.post("/v1/chat/completions", json={"model": "fake", "messages": ORDERS["results in a row"][0]})
    shown = engine.tokenizer.decode(engine.requests[0][0], skip_special=False)
    assert shown.count('<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>') == 2
    assert "<tool_response>\nb\n</tool_response>\n<tool_response>\na\n</tool_response><|im_end|>" in shown


@pytest.mark.parametrize("template", ["hermes"], indirect=True)
@pytest.mark.parametrize("tokens_per_step", [1, 7, 1000])
def test_hermes_calls_come_back(
    http: httpx.Client, engine: FakeEngine, template: str, tokens_per_step: int
) -> None:
    """What the template shows is how the answer is read; what came back renders as it was written."""
    calls = "\n".join(
        f'<tool_call>\n{{"name": "look", "arguments": {{"n": {n}}}}}\n</tool_call>' for n in (1, 2)
    )
    engine.reply, engine.tokens_per_step = f"So.\n{calls}", tokens_per_step
    body = {"model": "fake", "messages": [USER], "tools": [LOOK]}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] == "So."
    assert [c["function"] for c in message["tool_calls"]] == [
        {"name": "look", "arguments": '{"n": 1}'}, {"name": "look", "arguments": '{"n": 2}'}
    ]  # fmt: skip
    results = [said("tool", tool_call_id=call["id"]) for call in message["tool_calls"]]
    http.post("/v1/chat/completions", json={**body, "messages": [USER, message, *results]})
    shown = engine.tokenizer.decode(engine.requests[-1][0], skip_special=False)
    assert f"<|im_start|>assistant\nSo.\n{calls}<|im_end|>" in shown
