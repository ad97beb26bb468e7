"""From a request of OpenAI's Responses API to the call that the same chat request makes.

The items of a conversation, stored ones first, become chat's messages: neighbouring items of one
answer (reasoning, text, calls) are one message there. The places where each came from are kept, so
that errors name what the client wrote.
"""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pydantic import TypeAdapter

from quickdraft.errors import BadParameter
from quickdraft.server.body import CHAT_OFF, parse_body, without_off_fields
from quickdraft.server.errors import told_as
from quickdraft.server.response_store import ResponseStore
from quickdraft.server.responses_schemas import (
    RESPONSES_OFF,
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    Item,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    is_verbatim,
)
from quickdraft.server.schemas import parse
from quickdraft.server.translate import Call, Translator

_PLACES: Final[Mapping[str, str]] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "enable_thinking": "reasoning.effort",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}
RESPONSES_FIELDS: Final[Mapping[str, str]] = {"prompt": "input", **_PLACES}
_SEALED: Final = "quickdraft.1."  # before reasoning that travels as encrypted_content
_ITEMS: Final[TypeAdapter[list[Any]]] = TypeAdapter(list[Item])
_PREFIXES: Final = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a response repeats of its request, and the conversation it answers: `items` as they are
    stored."""

    request: ResponsesRequest
    tools: tuple[Mapping[str, Any], ...]  # as they were sent
    items: tuple[dict[str, Any], ...]


@dataclass(slots=True)
class _Chat:
    """Chat's messages while they are put together; `places`: where each comes from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=lambda: dict(_PLACES))
    answering: bool = False  # the last message is an answer that grows

    def add(self, place: str, **message: Any) -> None:
        self.places[f"messages[{len(self.messages)}]"] = place
        self.messages.append(message)
        self.answering = False

    def answer(self, place: str) -> dict[str, Any]:
        """The assistant's message that an item belongs to."""
        if not self.answering:
            self.add(place, role="assistant", content="")
            self.answering = True
        return self.messages[-1]


@dataclass(frozen=True, slots=True)
class ResponsesTranslator:
    """Turns Responses requests into calls, through the translator that chat requests take."""

    translator: Translator
    store: ResponseStore

    def responses(self, body: bytes) -> Call:
        """Parse, check and tokenize; raises ApiError and QuickdraftError."""
        values = parse_body(body, RESPONSES_OFF, is_verbatim)
        request = parse(ResponsesRequest, values)
        self.translator.check_model(request.model)
        earlier: tuple[dict[str, Any], ...] = ()
        if request.previous_response_id is not None:
            stored = self.store.get(request.previous_response_id, "previous_response_id")
            earlier = stored.conversation()
        chat = _conversation(request, _ITEMS.validate_python(list(earlier)))
        with told_as(chat.places):
            call = self.translator.chat_call(without_off_fields(_values(request, chat), CHAT_OFF))
        own = [_stored(item) for item in request.input]
        asked = Asked(request, tuple(values.get("tools", ())), (*earlier, *own))
        return replace(call, asked=asked)


def seal(reasoning: str) -> str:
    """Reasoning as the opaque text that clients send back when nothing is stored; not encrypted."""
    return _SEALED + base64.urlsafe_b64encode(reasoning.encode()).decode()


def _unseal(sealed: str, place: str) -> str:
    try:
        if not sealed.startswith(_SEALED):
            raise ValueError("of another server")
        return base64.b64decode(sealed[len(_SEALED) :], altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error) as error:
        raise BadParameter(
            f"{place}.encrypted_content", got=repr(sealed[:40]), expected="what this server sent"
        ) from error


def _conversation(request: ResponsesRequest, earlier: Sequence[Any]) -> _Chat:
    chat = _Chat()
    system = [request.instructions] if request.instructions is not None else []
    placed = [(item, "previous_response_id") for item in earlier]
    placed += [(item, f"input[{index}]") for index, item in enumerate(request.input)]
    # A template knows one system message at most, at the beginning.
    while placed and isinstance(placed[0][0], MessageItem) and placed[0][0].role in ("system", "developer"):
        system.append(_text(placed.pop(0)[0].content))
    if system:
        chat.add("instructions", role="system", content="\n\n".join(system))
    for item, place in placed:
        _add_item(chat, item, place)
    return chat


def _add_item(chat: _Chat, item: Any, place: str) -> None:
    match item:
        case MessageItem(role="assistant"):
            answer = chat.answer(place)
            answer["content"] += _text(item.content)
        case MessageItem():
            chat.add(place, role=item.role, content=_text(item.content, "\n"))
        case FunctionCall():
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            calls = chat.answer(place).setdefault("tool_calls", [])
            index = len(chat.messages) - 1
            chat.places.setdefault(f"messages[{index}].tool_calls", place)
            chat.places[f"messages[{index}].tool_calls[{len(calls)}].function"] = place
            calls.append(call)
        case FunctionCallOutput():
            chat.add(place, role="tool", tool_call_id=item.call_id, content=_text(item.output, "\n"))
        case ReasoningItem():
            if text := _reasoning(item, place):
                # A thought begins an answer: what stands before it was another one.
                if chat.answering and _said(chat.messages[-1]):
                    chat.answering = False
                answer = chat.answer(place)
                answer["reasoning_content"] = answer.get("reasoning_content", "") + text


def _said(answer: Mapping[str, Any]) -> bool:
    return bool(answer["content"] or answer.get("tool_calls"))


def _reasoning(item: ReasoningItem, place: str) -> str:
    """What was thought: as text, as this server's own seal of it, or as its summary."""
    if item.content:
        return _text(item.content)
    if item.encrypted_content is not None:
        return _unseal(item.encrypted_content, place)
    return _text(item.summary)


def _text(parts: Iterable[Any], between: str = "") -> str:
    return between.join(part.text for part in parts)


def _values(request: ResponsesRequest, chat: _Chat) -> dict[str, Any]:
    """The chat request."""
    values: dict[str, Any] = {
        "model": request.model,
        "messages": chat.messages,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "parallel_tool_calls": request.parallel_tool_calls,
        "metadata": request.metadata,
        "chat_template_kwargs": request.chat_template_kwargs,
        "tool_choice": _tool_choice(request.tool_choice),
    }
    same = ("user", "safety_identifier", "prompt_cache_key", "seed", "speculation")
    values |= {name: value for name in same if (value := getattr(request, name)) is not None}
    if request.max_output_tokens is not None:
        values["max_tokens"] = request.max_output_tokens
    if request.reasoning.effort is not None:
        values["reasoning_effort"] = request.reasoning.effort
    if request.tools:
        values["tools"] = [_tool(tool) for tool in request.tools]
        for index in range(len(request.tools)):
            chat.places[f"tools[{index}].function"] = f"tools[{index}]"
    format_ = request.text.format
    if format_.type == "json_schema":
        schema = {"name": format_.name, "schema": format_.json_schema}
        values["response_format"] = {"type": "json_schema", "json_schema": schema}
    else:
        values["response_format"] = {"type": format_.type}
    return values


def _tool(tool: FunctionTool) -> dict[str, Any]:
    description = {"description": tool.description} if tool.description is not None else {}
    strict = {"strict": True} if tool.strict else {}
    function = {"name": tool.name, **description, "parameters": tool.parameters, **strict}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    """A named function stands one level deeper in chat; everything else is told apart there."""
    if isinstance(choice, dict) and choice.keys() == {"type", "name"} and choice["type"] == "function":
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _stored(item: Any) -> dict[str, Any]:
    """An item as it is kept and listed: with an id."""
    value: dict[str, Any] = item.model_dump(exclude_none=True)
    value.setdefault("id", f"{_PREFIXES[item.type]}_{uuid.uuid4().hex}")
    return value
