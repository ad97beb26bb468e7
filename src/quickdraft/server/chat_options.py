"""What a chat request asks of template and answer: its variables, its tools, its thinking.

Nothing is handed to a template that would ignore it: a variable it does not read, tools or earlier
calls it does not know, are errors that name the field. What only says "off" is accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from quickdraft.errors import BadParameter
from quickdraft.server.errors import ApiError
from quickdraft.server.messages import Message
from quickdraft.server.schemas import TemplateFields
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.formats import Formats

# Names that are not for `chat_template_kwargs`: they have fields of their own, or are the renderer's.
_TAKEN: Final = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "self", "tokenizer", "template"}
    | {"max_context"}
)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """`variables` for the template; `tools` the answer may call, None for none; `must_call`: the names of
    which it must call one."""

    variables: dict[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] | None = None
    must_call: tuple[str, ...] = ()


def chat_options(
    request: TemplateFields, tools: Sequence[Mapping[str, Any]], template: ChatTemplate, formats: Formats
) -> ChatOptions:
    """The options of a request whose tools, as they were sent, are `tools`; raises ApiError and
    BadParameter for what template or format cannot do."""
    variables = _variables(request, template, formats)
    must_call = _must_call(request.tool_choice, [tool["function"]["name"] for tool in tools])
    if not tools or request.tool_choice == "none":
        return ChatOptions(variables)
    _check_tools(tools, formats)
    return ChatOptions({**variables, "tools": list(tools)}, tuple(tools), must_call)


def check_messages(messages: Sequence[Message], template: ChatTemplate, formats: Formats) -> None:
    """ApiError for parts of the history that the template would leave out without a word."""
    for index, message in enumerate(messages):
        if message.tool_calls and not template.mentions("tool_calls"):
            raise _unsupported(
                f"messages[{index}].tool_calls", "this model's chat template knows no tool calls"
            )
        known = formats.reasoning or template.mentions("reasoning_content")
        if message.reasoning_content and not known:
            raise _unsupported(
                f"messages[{index}].reasoning_content", "this model's chat template knows no reasoning"
            )


def _must_call(choice: Any, names: Sequence[str]) -> tuple[str, ...]:
    """Of which tools one must be called; none for auto and none."""
    if choice in ("auto", "none"):
        return ()
    shown = json.dumps(choice)[:80]
    if choice == "required":
        if not names:
            raise BadParameter("tool_choice", got=shown, expected="tools beside it")
        return tuple(names)
    try:
        kind, name = choice["type"], choice["function"]["name"]
        fits = kind == "function" and choice.keys() == {"type", "function"} and len(choice["function"]) == 1
    except (TypeError, KeyError, AttributeError):
        fits = False
    if not fits:
        raise BadParameter(
            "tool_choice", got=shown,
            expected='auto, none, required or {"type": "function", "function": {"name": ...}}',
        )  # fmt: skip
    if name not in names:
        raise BadParameter(
            "tool_choice", got=shown, expected=f"one of the tools: {', '.join(names) or 'none'}"
        )
    return (name,)


def _check_tools(tools: Sequence[Mapping[str, Any]], formats: Formats) -> None:
    names = [tool["function"]["name"] for tool in tools]
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise BadParameter(f"tools[{index}]", got=repr(name), expected="each name once")
        seen.add(name)
    if not formats.takes_tools:
        raise _unsupported("tools", "this model's chat template knows no tools")
    if formats.tool_calls is None:
        raise _unsupported(
            "tools",
            "the form of this model's tool calls is not known. hint: start the server with "
            "--tool-call-parser qwen3_coder, hermes or json, or none to get them as text",
        )


def _variables(request: TemplateFields, template: ChatTemplate, formats: Formats) -> dict[str, Any]:
    variables = dict(request.chat_template_kwargs)
    for name in variables.keys() & _TAKEN:
        raise BadParameter(f"chat_template_kwargs.{name[:80]}", expected="a variable of thinking")
    where = {name: f"chat_template_kwargs.{name[:80]}" for name in variables}
    for name in ("enable_thinking", "reasoning_effort"):
        value = getattr(request, name)
        if value is None:
            continue
        if name in variables and variables[name] != value:
            raise BadParameter(name, got=repr(value)[:80], expected="the same as in chat_template_kwargs")
        variables[name], where[name] = value, name
    _no_effort_is_no_thinking(variables, where, template)
    for name in list(variables):
        if name in template.variables:
            continue
        off = {"enable_thinking": False, "reasoning_effort": "none"}
        if name in off and variables[name] == off[name] and not formats.reasoning:
            del variables[name]  # a model that does not think anyway
            continue
        read = sorted(template.variables - _TAKEN)
        raise _unsupported(
            where[name],
            f"this model's chat template does not read it; got {json.dumps(variables[name])[:80]}. "
            f"It reads: {', '.join(read) or 'no variables'}",
        )
    return variables


def _no_effort_is_no_thinking(
    variables: dict[str, Any], where: dict[str, str], template: ChatTemplate
) -> None:
    """reasoning_effort "none" turns thinking off where the template has a variable for that."""
    if variables.get("reasoning_effort") != "none" or "enable_thinking" not in template.variables:
        return
    if variables.get("enable_thinking") is True:
        raise BadParameter(
            where["reasoning_effort"], got="'none'", expected="an effort, or no enable_thinking"
        )
    del variables["reasoning_effort"]
    variables["enable_thinking"] = False
    where["enable_thinking"] = where["reasoning_effort"]


def _unsupported(param: str, why: str) -> ApiError:
    return ApiError(f"'{param}' is not supported: {why}", param=param, code="unsupported_parameter")
