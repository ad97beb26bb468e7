"""Every feature of the four APIs that bears on an answer, as a request and a sign that it worked.

The model is that of thinking_opened: it would write anything, so only the feature itself shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

from tests.support.answers import Reply
from tests.support.constraints import CHOICES, FORMAT, GRAMMAR, KINDS, LOOK, REGEX, SCHEMA, TOOLS, check_obeys
from tests.support.thinking_model import thinking_tokenizer_data

Fields = dict[str, Any]
TOKENS = thinking_tokenizer_data().tokens
END, CALL, THOUGHT = (TOKENS.index(name) for name in ("<|im_end|>", "<tool_call>", "</think>"))
LIMIT, LONG = 48, 150  # tokens of an answer without and with a form


@dataclass(frozen=True)
class Told:
    """The answer to a feature's `fields` alone, for `more` to build on, with the ids of its first choice."""

    reply: Reply
    ids: tuple[int, ...]

    @property
    def piece(self) -> str:
        """Characters that stand in it, not at its beginning."""
        said = self.reply.choices[0]
        return re.findall("[^\ufffd]{1,2}", said.reasoning + said.content)[-1]


@dataclass(frozen=True)
class Feature:
    """`fields` of a request, and `more`, made of the answer to them. `shows`: does an answer show it?"""

    api: str
    fields: Fields
    shows: Callable[[Reply, Told], bool]
    more: Callable[[Told], Fields] = lambda told: {}
    form: str = "qwen3_coder"

    @property
    def limit(self) -> str:
        """The name of its limit of tokens."""
        return "max_output_tokens" if self.api == "responses" else "max_tokens"


def _content(reply: Reply) -> str:
    return reply.choices[0].content


def _ended(reply: Reply) -> bool:
    return all(said.finish.startswith(("stop", "end_turn", "tool")) for said in reply.choices)


def _says(reply: Reply, told: Told) -> bool:
    return any(said.content or said.calls or said.reasoning for said in reply.choices)


def _choices(count: int) -> Callable[[Reply, Told], bool]:
    return lambda reply, told: len(reply.choices) == count and _says(reply, told)


def _form(kind: str) -> Callable[[Reply, Told], bool]:
    """An answer of that kind, cut off or not."""

    def shows(reply: Reply, told: Told) -> bool:
        for said in reply.choices:
            if said.finish not in ("length", "max_tokens"):
                check_obeys(kind, said.content, said.calls)
        return True

    return shows


def _fits(reply: Reply, told: Told) -> bool:
    jsonschema.validate(json.loads(_content(reply)), SCHEMA)
    return True


def _stopped(reply: Reply, told: Told) -> bool:
    return _ended(reply) and reply.tokens < told.reply.tokens and told.piece not in _content(reply)


def _differs(reply: Reply, told: Told) -> bool:
    return reply != told.reply


PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 2, "repetition_penalty": 1.8}
# What chat and completions share.
SHARED: dict[str, tuple[Fields, Callable[[Told], Fields], Callable[[Reply, Told], bool]]] = {
    "plain": ({}, lambda told: {}, _says),
    "stop string": ({}, lambda told: {"stop": ["unlikely to come", told.piece]}, _stopped),
    "stop string across tokens, late": (
        {}, lambda told: {"stop": told.piece, "min_tokens": LIMIT - 8},
        lambda reply, told: reply.tokens >= LIMIT - 8,
    ),
    "stop id": (
        {}, lambda told: {"stop_token_ids": [told.ids[len(told.ids) // 2]]},
        lambda reply, told: _ended(reply) and reply.tokens < told.reply.tokens,
    ),
    "min_tokens": (
        {"logit_bias": {str(END): 100}}, lambda told: {"min_tokens": 20},
        lambda reply, told: (told.reply.tokens, reply.tokens) == (1, 21) and _ended(reply),
    ),
    "ignore_eos": (
        {"logit_bias": {str(END): 3}}, lambda told: {"ignore_eos": True},
        lambda reply, told: reply.tokens == LIMIT,
    ),
    "logit_bias": ({}, lambda told: {"logit_bias": {"40": 4, str(told.ids[0]): -100}}, _differs),
    "penalties": ({}, lambda told: PENALTIES, _differs),
    "cut": ({"top_k": 20, "top_p": 0.9, "min_p": 0.02}, lambda told: {}, _says),
    "n": ({}, lambda told: {"n": 3}, _choices(3)),
    "n, stop, penalties": (
        {}, lambda told: {"n": 2, "stop": told.piece, **PENALTIES, "stop_token_ids": [told.ids[-2]]},
        _choices(2),
    ),
    "token sources": (
        {}, lambda told: {"return_token_sources": True},
        lambda reply, told: reply.choices[0].sources == _content(reply) == _content(told.reply) != "",
    ),
    "prediction": (
        {"structured_outputs": {"regex": "[a-f ]{60}"}},
        lambda told: {"prediction": {"type": "content", "content": _content(told.reply)}},
        lambda reply, told: reply == told.reply,
    ),
    "schema": ({"response_format": FORMAT}, lambda told: {}, _fits),
    "object": ({"response_format": {"type": "json_object"}}, lambda told: {}, _form("object")),
    "regex": ({"structured_outputs": {"regex": REGEX}}, lambda told: {}, _form("regex")),
    "grammar": ({"structured_outputs": {"grammar": GRAMMAR}}, lambda told: {}, _form("grammar")),
    "choice": ({"structured_outputs": {"choice": CHOICES}}, lambda told: {}, _form("choice")),
    "json": ({"structured_outputs": {"json": SCHEMA}}, lambda told: {}, _fits),
    "schema, n, penalties, bias, stop": (
        {"response_format": FORMAT},
        lambda told: {"n": 2, **PENALTIES, "logit_bias": {"40": 2.0}, "stop": "0"},
        _choices(2),
    ),
}  # fmt: skip


def _named(api: str) -> Any:
    match api:
        case "chat":
            return {"type": "function", "function": {"name": "look"}}
        case "responses":
            return {"type": "function", "name": "look"}
    return {"type": "tool", "name": "look", "disable_parallel_tool_use": True}


def _tools(api: str) -> list[Fields]:
    """TOOLS as the API writes them."""
    functions: list[Fields] = [one["function"] for one in TOOLS]  # type: ignore[misc]
    if api == "responses":
        return [{"type": "function", **one} for one in functions]
    empty = {"type": "object", "properties": {}}
    return [
        {
            "name": one["name"],
            "strict": one.get("strict", False),
            "input_schema": one.get("parameters", empty),
        }
        for one in functions
    ]


def _called(reply: Reply, told: Told) -> bool:
    """Its calls are complete but for the last, and there is one."""
    said = reply.choices[0]
    for name, arguments in said.calls[: None if _ended(reply) else -1]:
        if name == "look":
            jsonschema.validate(json.loads(arguments), LOOK)
    return bool(said.calls)


def _thought(most: int) -> Callable[[Reply, Told], bool]:
    """It thought for so many tokens at most, and said something then."""
    return lambda reply, told: reply.choices[0].content != "" and (reply.thought <= most + 2)


def _features() -> dict[str, Feature]:
    found: dict[str, Feature] = {}
    for name, (fields, more, shows) in SHARED.items():
        for api, own in (("chat", {"enable_thinking": False}), ("completion", {})):
            limit = {
                "max_tokens": LONG if "structured_outputs" in fields or "response_format" in fields else LIMIT
            }
            found[f"{api}: {name}"] = Feature(api, {**limit, **own, **fields}, shows, more)
    for name, count in (("top 0", 0), ("top 3", 3)):
        chat = {"logprobs": True, "top_logprobs": count}
        for api, own, fields in (("chat", "content", chat), ("completion", "tokens", {"logprobs": count})):
            found[f"{api}: logprobs, {name}"] = Feature(
                api, {"max_tokens": LIMIT, **fields},
                lambda reply, told, own=own: len(reply.choices[0].logprobs[own]) == reply.tokens > 0,
            )  # fmt: skip
    echo = {"max_tokens": LIMIT, "echo": True, "prompt": ["one two", "two one"], "n": 2}
    found["completion: echo, prompts"] = Feature(
        "completion", echo,
        lambda reply, told: [said.content[:7] for said in reply.choices] == ["one two"] * 2 + ["two one"] * 2,
    )  # fmt: skip
    for form in ("hermes", "json"):
        for api, choice in (("responses", "required"), ("messages", {"type": "any"})):
            called = Feature(api, {"tools": _tools(api), "tool_choice": choice}, _called, form=form)
            called.fields[called.limit] = LONG
            found[f"{api}: required, {form}"] = called
    return found | _chats() | _responses() | _messages()


def _chats() -> dict[str, Feature]:
    found = {}
    for kind, fields in KINDS.items():
        for form in ("qwen3_coder", "hermes", "json") if "tools" in fields else ("qwen3_coder",):
            given = {"max_tokens": LONG, **fields}
            found[f"chat: thought, {kind}, {form}"] = Feature("chat", given, _form(kind), form=form)
    called = {"max_tokens": LONG, "tools": TOOLS, "enable_thinking": False}
    biased = {**called, "logit_bias": {str(CALL): 100}}
    logprobs = {"logprobs": True, "top_logprobs": 2}
    for form in ("qwen3_coder", "hermes", "json"):
        more = {"tool_choice": "required", **logprobs, **PENALTIES}
        found[f"chat: required, penalties, {form}"] = Feature("chat", {**called, **more}, _called, form=form)
        if form != "json":
            found[f"chat: auto, {form}"] = Feature("chat", biased, _called, form=form)
    one = {**called, "tool_choice": _named("chat"), "parallel_tool_calls": False}
    loose = [{"type": "function", "function": {"name": "wait"}}]
    return found | {
        "chat: one call": Feature("chat", one, lambda reply, told: len(reply.choices[0].calls) == 1),
        "chat: no tools": Feature(
            "chat", {**called, "tool_choice": "none"}, lambda reply, told: not reply.choices[0].calls
        ),
        "chat: a stop string in a call": Feature(
            "chat", one, lambda reply, told: reply.choices[0].calls[0][1].startswith('{"count": '),
            lambda told: {"stop": "<parameter=text"},
        ),
        "chat: a call that may break": Feature(
            "chat", {**biased, "tools": loose, "logit_bias": {str(CALL): 6}}, lambda reply, told: True
        ),
        "chat: thinking for ever": Feature(
            "chat", {"max_tokens": LIMIT, "thinking_budget": LIMIT},
            lambda reply, told: _content(reply) == "" and reply.thought == LIMIT,
        ),
        "chat: thinking that ends": Feature(
            "chat", {"max_tokens": LIMIT, "thinking_budget": LIMIT, "logit_bias": {str(THOUGHT): 9}},
            lambda reply, told: reply.thought < LIMIT,
        ),
        "chat: thinking and logprobs": Feature(
            "chat", {"max_tokens": LIMIT, "thinking_budget": 9, **logprobs, "reasoning_effort": "low"},
            _thought(9),
        ),
        "chat: a stop string in a thought": Feature(
            "chat", {"max_tokens": LIMIT, "thinking_budget": LIMIT}, lambda reply, told: _ended(reply),
            lambda told: {"stop": told.piece},
        ),
        "chat: thinking, sources": Feature(
            "chat", {"max_tokens": LIMIT, "thinking_budget": 5, "return_token_sources": True},
            lambda reply, told: "</think>" in reply.choices[0].sources,
        ),
        "chat: thinking, n": Feature(
            "chat", {"max_tokens": LIMIT, "thinking_budget": 3, "n": 2}, _choices(2)
        ),
    }  # fmt: skip


def _responses() -> dict[str, Feature]:
    limit, plain = {"max_output_tokens": LONG}, {"chat_template_kwargs": {"enable_thinking": False}}
    tools = {"tools": _tools("responses"), **limit}
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    return {
        f"responses: {name}": Feature("responses", fields, shows)
        for name, fields, shows in (
            ("plain", {"max_output_tokens": LIMIT, **plain}, _says),
            ("top_p", {"max_output_tokens": LIMIT, "top_p": 0.5, **plain}, _says),
            ("thought", {"max_output_tokens": LIMIT, "reasoning": {"effort": "low"}}, _thought(6)),
            ("summary", {"max_output_tokens": LIMIT, "reasoning": {"summary": "auto"}}, _thought(6)),
            ("required", {**tools, "tool_choice": "required"}, _called),
            ("named", {**tools, "tool_choice": _named("responses"), "parallel_tool_calls": False}, _called),
            ("auto", tools, _says),
            ("schema", {**limit, "text": text}, _fits),
            ("object", {**limit, **plain, "text": {"format": {"type": "json_object"}}}, _form("object")),
            ("schema or call", {**tools, "text": text}, _form("schema or call")),
        )
    }  # fmt: skip


def _messages() -> dict[str, Feature]:
    limit = {"max_tokens": LONG}
    tools = {"tools": _tools("messages"), **limit}
    output = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 5}}
    found = {
        f"messages: {name}": Feature("messages", fields, shows)
        for name, fields, shows in (
            ("plain", {"max_tokens": LIMIT}, _says),
            ("cut", {"max_tokens": LIMIT, "top_k": 9, "top_p": 0.9}, _says),
            ("thought", {"max_tokens": LIMIT, **thinking}, _says),
            ("any", {**tools, "tool_choice": {"type": "any"}}, _called),
            ("named", {**tools, "tool_choice": _named("messages")}, _called),
            ("auto", {**tools, **thinking}, _says),
            ("schema", {**limit, **output}, _fits),
            ("schema, thought", {**limit, **output, **thinking}, _fits),
        )
    }  # fmt: skip
    return found | {
        "messages: stop sequence": Feature(
            "messages", {"max_tokens": LIMIT},
            lambda reply, told: reply.choices[0].finish == f"stop_sequence {told.piece}",
            lambda told: {"stop_sequences": [told.piece]},
        )
    }  # fmt: skip


FEATURES = _features()
