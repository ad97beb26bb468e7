"""From a request of Anthropic's Messages API to the call that the same chat request makes.

A message becomes one or several of chat's: results of tools are messages of their own there. The
places where each came from are kept, so that errors name what the client wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from quickdraft.errors import BadParameter
from quickdraft.server.anthropic_schemas import (
    COUNT_OFF,
    MESSAGES_OFF,
    AnthropicMessage,
    AnthropicTool,
    Conversation,
    CountRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    is_verbatim,
)
from quickdraft.server.body import CHAT_OFF, parse_body, without_off_fields
from quickdraft.server.errors import ApiError, told_as
from quickdraft.server.schemas import ChatRequest, parse
from quickdraft.server.translate import Call, Translator

# A line that a client puts before its system prompt and changes with every request: no part of the
# prompt, and with it no two prompts would share their beginning.
_VOLATILE: Final = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
_PLACES: Final[Mapping[str, str]] = {
    "stop": "stop_sequences",
    "enable_thinking": "thinking",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "thinking_budget": "thinking.budget_tokens",
}
FIRST_VERSION: Final = "2023-06-01"  # of the header anthropic-version; streams looked different before
ANTHROPIC_FIELDS: Final[Mapping[str, str]] = {"prompt": "messages", **_PLACES}


@dataclass(slots=True)
class _Chat:
    """A chat request while it is put together; `places`: its messages -> where they come from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=lambda: dict(_PLACES))

    def add(self, place: str, **message: Any) -> None:
        self.places[f"messages[{len(self.messages)}]"] = place
        self.messages.append(message)


@dataclass(frozen=True, slots=True)
class AnthropicTranslator:
    """Turns Messages requests into calls, through the translator that chat requests take."""

    translator: Translator

    def messages(self, body: bytes) -> Call:
        """Parse, check and tokenize; raises ApiError and QuickdraftError."""
        request = parse(MessagesRequest, parse_body(body, MESSAGES_OFF, is_verbatim))
        values, places = self._chat(request)
        values |= {
            "max_tokens": request.max_tokens,
            "stream": request.stream,
            "stop": request.stop_sequences,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            **_present(seed=request.seed, speculation=request.speculation, user=request.metadata.user_id),
        }
        with told_as(places):
            return self.translator.chat_call(values)

    def count(self, body: bytes) -> dict[str, Any]:
        """{"input_tokens"}: the length of the prompt that the same request to /v1/messages has."""
        request = parse(CountRequest, parse_body(body, COUNT_OFF, is_verbatim))
        values, places = self._chat(request)
        with told_as(places):
            chat = parse(ChatRequest, values)
            self.translator.check_model(chat.model)
            prompt, _ = self.translator.chat_prompt(chat.messages, chat, values)
        return {"input_tokens": len(prompt.ids)}

    def _chat(self, request: Conversation) -> tuple[dict[str, Any], dict[str, str]]:
        """The chat request for the prompt of `request`, and the places of its parts."""
        self.translator.check_model(request.model)
        chat = _Chat()
        system = "\n".join(_steady(request.system))
        if system:
            chat.add("system", role="system", content=system)
        for index, message in enumerate(request.messages):
            _add_message(chat, message, f"messages[{index}]")
        if request.messages[-1].role == "assistant":
            raise ApiError(
                "the last message is the assistant's: continuing a given beginning of an answer is not "
                "supported",
                param=f"messages[{len(request.messages) - 1}]",
                code="unsupported_parameter",
            )
        values: dict[str, Any] = {"model": request.model, "messages": chat.messages}
        values |= self._thinking(request) | _tools(request.tools, request.tool_choice, chat.places)
        if request.chat_template_kwargs:
            values["chat_template_kwargs"] = request.chat_template_kwargs
        if request.output_config.effort != "high":  # the API's default, the same as saying nothing
            values["reasoning_effort"] = request.output_config.effort
        if request.output_config.format is not None:
            schema = {"name": "output", "schema": request.output_config.format.json_schema, "strict": True}
            values["response_format"] = {"type": "json_schema", "json_schema": schema}
        with told_as(chat.places):
            return without_off_fields(values, CHAT_OFF), chat.places

    def _thinking(self, request: Conversation) -> dict[str, Any]:
        """Chat's fields for `thinking`. Absent means none, as this API has it, where the model can do
        without; adaptive leaves it to the model."""
        template = self.translator.engine.chat_template
        asked = request.thinking
        can_choose = template is not None and "enable_thinking" in template.variables
        if asked is None or asked.type == "adaptive":
            chosen = "enable_thinking" in request.chat_template_kwargs
            values = {"enable_thinking": asked is not None} if can_choose and not chosen else {}
        else:
            values = {"enable_thinking": asked.type == "enabled"}
        if asked is None:
            return values
        if (asked.budget_tokens is not None) != (asked.type == "enabled"):
            raise BadParameter(
                "thinking.budget_tokens", got=asked.budget_tokens, expected="a budget with type enabled only"
            )
        return values if asked.budget_tokens is None else {**values, "thinking_budget": asked.budget_tokens}


def check_version(headers: Mapping[str, str]) -> None:
    """ApiError for a version of this API that is not spoken; clients of other APIs send none."""
    version = headers.get("anthropic-version", FIRST_VERSION)
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", version) or version < FIRST_VERSION:
        raise ApiError(
            f"anthropic-version is not supported; got {version[:80]!r}, expected {FIRST_VERSION} or later",
            code="invalid_value",
        )


def _add_message(chat: _Chat, message: AnthropicMessage, place: str) -> None:
    if message.role == "assistant":
        _add_answer(chat, message, place)
        return
    texts: list[str] = []
    for index, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            if texts:
                chat.add(place, role=message.role, content="\n".join(texts))
                texts = []
            shown = "\n".join(one.text for one in block.content)
            content = f"Error: {shown}" if block.is_error else shown
            chat.add(
                f"{place}.content[{index}]", role="tool", tool_call_id=block.tool_use_id, content=content
            )
    if texts or not message.content:
        chat.add(place, role=message.role, content="\n".join(texts))


def _add_answer(chat: _Chat, message: AnthropicMessage, place: str) -> None:
    """An earlier answer as one message: what was thought, said and called."""
    blocks = message.content
    calls = [
        {"id": one.id, "function": {"name": one.name, "arguments": json.dumps(one.input, ensure_ascii=False)}}
        for one in blocks
        if isinstance(one, ToolUseBlock)
    ]
    thought = "".join(one.thinking for one in blocks if isinstance(one, ThinkingBlock))
    said = "".join(one.text for one in blocks if isinstance(one, TextBlock))
    more = _present(reasoning_content=thought or None, tool_calls=calls or None)
    first = next((at for at, one in enumerate(blocks) if isinstance(one, ToolUseBlock)), None)
    if first is not None:
        chat.places[f"messages[{len(chat.messages)}].tool_calls"] = f"{place}.content[{first}]"
    chat.add(place, role="assistant", content=said, **more)


def _tools(
    tools: Sequence[AnthropicTool], choice: ToolChoice | None, places: dict[str, str]
) -> dict[str, Any]:
    """Chat's tools and its choice among them."""
    values: dict[str, Any] = {}
    if tools:
        values["tools"] = [_tool(tool) for tool in tools]
        for index in range(len(tools)):
            places[f"tools[{index}].function"] = f"tools[{index}]"
            places[f"tools[{index}].function.parameters"] = f"tools[{index}].input_schema"
    if choice is None:
        return values
    if (choice.name is not None) != (choice.type == "tool"):
        raise BadParameter("tool_choice.name", got=choice.name, expected="a name with type tool only")
    named = {"type": "function", "function": {"name": choice.name}}
    kinds: dict[str, Any] = {"auto": "auto", "none": "none", "any": "required", "tool": named}
    return values | {
        "tool_choice": kinds[choice.type],
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    strict = {"strict": True} if tool.strict else {}
    description = _present(description=tool.description)
    function = {"name": tool.name, **description, "parameters": tool.input_schema, **strict}
    return {"type": "function", "function": function}


def _steady(system: Iterable[TextBlock]) -> list[str]:
    """The texts of a system prompt without the volatile line that clients put first."""
    texts = [block.text for block in system]
    if texts and (found := _VOLATILE.match(texts[0])):
        texts[0] = texts[0][found.end() :]
        return texts if texts[0] else texts[1:]
    return texts


def _present(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
