"""Constraints of every kind as requests ask for them, and whether an answer obeys its one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema

from quickdraft.engine.opened import Opened
from quickdraft.server.chat_options import chat_options
from quickdraft.server.schemas import ChatRequest
from quickdraft.server.structured import Wish, answer_format, chat_constraint
from quickdraft.speculate.constraint import Constraint
from quickdraft.text.answer_parts import Content, Reasoning
from quickdraft.text.chat_prompt import chat_prompt
from quickdraft.text.formats import Formats
from quickdraft.text.tool_calls import CallName, CallText
from quickdraft.types import ToolCallParser

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "first_long_key": {"type": "integer", "minimum": 0, "maximum": 99},
        "second_long_key": {"enum": ["north", "south"]},
        "text": {"type": "string", "maxLength": 6},
    },
    "required": ["first_long_key", "second_long_key", "text"],
    "additionalProperties": False,
}
LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["near", "far"]},
        "text": {"type": "string", "minLength": 2, "maxLength": 8, "pattern": "[a-z]"},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["count", "text"],
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "strict": True, "parameters": LOOK}},
    {"type": "function", "function": {"name": "wait"}},
]
NAMED = {"type": "function", "function": {"name": "look"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
REGEX = "[ab]{3,8}(north|nought)[0-9]{2}"
CHOICES = ["yes", "no", "perhaps é"]
GRAMMAR = 'start: "(" (start | /[a-c]{1,3}/) ")"'
# Every model here thinks, and would think for ever: a budget lets the rest begin.
KINDS: dict[str, dict[str, Any]] = {
    "schema": {"thinking_budget": 2, "response_format": FORMAT},
    "object": {"thinking_budget": 0, "response_format": {"type": "json_object"}},
    "regex": {"thinking_budget": 1, "structured_outputs": {"regex": REGEX}},
    "choice": {"thinking_budget": 0, "structured_outputs": {"choice": CHOICES}},
    "grammar": {"thinking_budget": 0, "structured_outputs": {"grammar": GRAMMAR}},
    "thinking": {"thinking_budget": 7},
    "required": {"thinking_budget": 3, "tools": TOOLS, "tool_choice": "required"},
    "named": {"thinking_budget": 3, "tools": TOOLS, "tool_choice": NAMED},
    "strict": {"thinking_budget": 3, "tools": TOOLS},
    "schema or call": {"thinking_budget": 0, "tools": TOOLS, "response_format": FORMAT},
}


class Asked:
    """A conversation with an opened model: its prompt, its constraint, and the parts of an answer."""

    def __init__(self, opened: Opened, options: Mapping[str, Any], form: str = "qwen3_coder") -> None:
        assert opened.tokenizer is not None and opened.chat_template is not None
        messages = [{"role": "user", "content": "hi"}]
        request = ChatRequest.model_validate({"model": "x", "messages": messages, **options})
        formats = Formats(True, True, ToolCallParser(form))
        own = chat_options(request, options.get("tools", ()), opened.chat_template, formats)
        prompt = chat_prompt(opened.tokenizer, opened.chat_template, messages, **own.variables)
        wish = Wish(
            answer_format(request), own.tools or (), own.must_call, False, request.thinking_budget,
            prompt.thinking, prompt.ids,
        )  # fmt: skip
        self.ids = prompt.ids
        self.constraint: Constraint | None = chat_constraint(
            request, wish, formats, opened.tokenizer, lambda: opened.grammars
        )
        self._form = formats.answer_form(thinking=prompt.thinking, tools=own.tools)

    def parts(self, text: str) -> tuple[str, str, list[tuple[str, str]]]:
        """(reasoning, content, [(tool, arguments)]) of an answer."""
        parser = self._form.parser()
        reasoning = content = ""
        calls: list[tuple[str, str]] = []
        for part in [*parser.feed(text), *parser.finish()]:
            match part:
                case Reasoning():
                    reasoning += part.text
                case Content():
                    content += part.text
                case CallName():
                    calls.append((part.name, ""))
                case CallText():
                    calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
        return reasoning, content, calls


def check_obeys(kind: str, content: str, calls: Sequence[tuple[str, str]]) -> None:
    """An answer that was not cut off is what its kind asks for."""
    if kind in ("required", "named"):
        assert calls and not content, (content, calls)
    for name, arguments in calls:
        assert kind != "named" or name == "look"
        if name == "look":
            jsonschema.validate(json.loads(arguments), LOOK)
        else:
            assert name == "wait" and isinstance(json.loads(arguments), dict)
    if kind == "schema" or (kind == "schema or call" and not calls):
        jsonschema.validate(json.loads(content), SCHEMA)
    elif kind == "object":
        assert isinstance(json.loads(content), dict)
    elif kind == "regex":
        assert re.fullmatch(REGEX, content), content
    elif kind == "choice":
        assert content in CHOICES
    elif kind == "grammar":
        depth = content.count("(")
        assert re.fullmatch(r"\(+[a-c]{1,3}\)+", content) and content.count(")") == depth
