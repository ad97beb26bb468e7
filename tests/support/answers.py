"""Answers of the four APIs in one form, whole or put together from the events of a stream.

What two answers to one question may differ in is left out: ids, times, and what was cached or drafted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic_core import from_json

PATHS = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
Event = dict[str, Any]


@dataclass
class Said:
    """One choice. `sources` are the texts of its token_sources, joined."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments
    finish: str = ""
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    sources: str = ""

    def more_arguments(self, text: str) -> None:
        name, arguments = self.calls[-1]
        self.calls[-1] = (name, arguments + text)


@dataclass
class Reply:
    """An answer: its choices, and its usage."""

    choices: list[Said] = field(default_factory=lambda: [Said()])
    prompt: int = 0
    tokens: int = 0
    thought: int = 0

    def choice(self, index: int) -> Said:
        while len(self.choices) <= index:
            self.choices.append(Said())
        return self.choices[index]


async def ask(client: httpx.AsyncClient, api: str, body: dict[str, Any]) -> Reply:
    """The answer to `body`, which says whether it is streamed; AssertionError for a refusal, for a stream
    that does not end in order, or whose last event differs from those before it."""
    response = await client.post(PATHS[api], json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return reply_of(api, [response.json()])
    lines = response.text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    if api in ("chat", "completion"):
        assert lines[-2] == "data: [DONE]"
    elif api == "messages":
        assert events.pop() == {"type": "message_stop"}
    else:
        assert reply_of(api, [events[-1]["response"]]) == reply_of(api, events)
    return reply_of(api, events)


def reply_of(api: str, events: Sequence[Event]) -> Reply:
    """The answer that events make, or one event that is all of it."""
    reply = Reply()
    for event in events:
        _TAKE[api](reply, event)
    if api == "messages":
        for said in reply.choices:
            said.calls = [
                (name, json.dumps(from_json(a or "{}", allow_partial=True))) for name, a in said.calls
            ]
    return reply


def _take_choices(reply: Reply, event: Event) -> None:
    """Chat and completions: a whole answer and a chunk hold the same under other names."""
    for one in event["choices"]:
        said = reply.choice(one["index"])
        message = one.get("message") or one.get("delta") or {"content": one.get("text")}
        said.reasoning += message.get("reasoning_content") or ""
        said.content += message.get("content") or ""
        for call in message.get("tool_calls") or ():
            if "name" in call["function"]:
                said.calls.append((call["function"]["name"], ""))
            said.more_arguments(call["function"].get("arguments", ""))
        for name, values in (one.get("logprobs") or {}).items():
            said.logprobs.setdefault(name, []).extend(values or ())
        said.sources += "".join(origin["text"] for origin in one.get("token_sources", ()))
        said.finish = one.get("finish_reason") or said.finish
    if usage := event.get("usage"):
        reply.prompt, reply.tokens = usage["prompt_tokens"], usage["completion_tokens"]
        reply.thought = usage["completion_tokens_details"].get("reasoning_tokens", 0)


def _take_response(reply: Reply, event: Event) -> None:
    said = reply.choices[0]
    match event.get("type", "whole"):
        case "whole":
            for item in event["output"]:
                parts = [part["text"] for part in (*item.get("content", ()), *item.get("summary", ()))]
                if item["type"] == "function_call":
                    said.calls.append((item["name"], item["arguments"]))
                elif item["type"] == "message":
                    said.content += "".join(parts)
                else:
                    said.reasoning += "".join(parts)
            _end_response(reply, event)
        case "response.output_item.added" if event["item"]["type"] == "function_call":
            said.calls.append((event["item"]["name"], ""))
        case "response.function_call_arguments.delta":
            said.more_arguments(event["delta"])
        case "response.output_text.delta":
            said.content += event["delta"]
        case "response.reasoning_text.delta" | "response.reasoning_summary_text.delta":
            said.reasoning += event["delta"]
        case "response.completed" | "response.incomplete":
            _end_response(reply, event["response"])


def _end_response(reply: Reply, response: Event) -> None:
    usage = response["usage"]
    reply.choices[0].finish = "length" if response["status"] == "incomplete" else "stop"
    reply.prompt, reply.tokens = usage["input_tokens"], usage["output_tokens"]
    reply.thought = usage["output_tokens_details"]["reasoning_tokens"]


def _take_message(reply: Reply, event: Event) -> None:
    said = reply.choices[0]
    match event["type"]:
        case "message":
            for block in event["content"]:
                _begin_block(said, block)
            _end_message(reply, event, event["usage"])
        case "content_block_start":
            _begin_block(said, event["content_block"])
        case "content_block_delta":
            delta = event["delta"]
            said.reasoning += delta.get("thinking", "")
            said.content += delta.get("text", "")
            if "partial_json" in delta:
                said.more_arguments(delta["partial_json"])
        case "message_delta":
            _end_message(reply, event["delta"], event["usage"])


def _begin_block(said: Said, block: Event) -> None:
    said.reasoning += block.get("thinking", "")
    said.content += block.get("text", "")
    if block["type"] == "tool_use":
        said.calls.append((block["name"], json.dumps(block["input"]) if block["input"] else ""))


def _end_message(reply: Reply, ending: Event, usage: Event) -> None:
    said = reply.choices[0]
    said.finish = ending["stop_reason"]
    if ending["stop_sequence"] is not None:
        said.finish += f" {ending['stop_sequence']}"
    reply.prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    reply.tokens = usage["output_tokens"]


_TAKE = {
    "chat": _take_choices,
    "completion": _take_choices,
    "responses": _take_response,
    "messages": _take_message,
}
