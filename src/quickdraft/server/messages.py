"""Messages and tools as pydantic reads them, and as chat templates want them.

A template gets the arguments of an earlier call as a mapping, where OpenAI's API has JSON in a string.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from quickdraft.text.tool_values import is_flat

TOOL_NAME: Final = r"^[A-Za-z0-9_.:-]{1,64}$"
_OWNERS: Final = {"tool_call_id": "tool", "tool_calls": "assistant", "reasoning_content": "assistant"}


class Strict(BaseModel):
    """Exact types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class CalledFunction(Strict):
    name: str
    arguments: dict[str, Any]

    @field_validator("arguments", mode="before")
    @classmethod
    def _parse(cls, arguments: Any) -> Any:
        try:
            value = json.loads(arguments or "{}", parse_constant=_reject) if _is_text(arguments) else None
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or not is_flat(value):
            raise PydanticCustomError("invalid_value", "must be a string that holds a JSON object")
        return value


class EarlierCall(Strict):
    """A tool call in the history."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """One message. A list of text parts is joined with newlines, as other servers do; `name` and
    `tool_call_id` are handed to the chat template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[EarlierCall] = Field(default_factory=list)
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _calls_need_no_content(cls, message: Any) -> Any:
        return (
            {"content": "", **message} if isinstance(message, dict) and message.get("tool_calls") else message
        )

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return "\n".join(part_text(part, index) for index, part in enumerate(content))

    @model_validator(mode="after")
    def _fields_belong_to_roles(self) -> Message:
        for name, role in _OWNERS.items():
            if getattr(self, name) and self.role != role:
                raise PydanticCustomError(
                    "invalid_value",
                    "{name} belongs to messages with role '{role}' only",
                    {"name": name, "role": role},
                )
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it; a developer is a system."""
        role = "system" if self.role == "developer" else self.role
        extra = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
            "tool_calls": [call.model_dump() for call in self.tool_calls] or None,
        }
        shown = {key: value for key, value in extra.items() if value is not None}
        return {"role": role, "content": self.content, **shown}


class Function(Strict):
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False  # arguments follow the schema to the letter


class Tool(Strict):
    """A tool as OpenAI's API describes it. Templates get it as it was sent."""

    type: Literal["function"]
    function: Function


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _reject(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def part_text(part: Any, index: int) -> str:
    """The text of a content part; refuses all other parts, as a validator does."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise PydanticCustomError(
            "unsupported_parameter",
            "part {index} has type {kind}; only text parts are supported",
            {"index": index, "kind": repr(kind)[:80]},
        )
    if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
        raise PydanticCustomError(
            "invalid_value", 'part {index} must be {{"type": "text", "text": "..."}}', {"index": index}
        )
    return str(part["text"])
