"""Requests of OpenAI's Responses API as pydantic reads them: strict types, no unknown fields.

Only the shape is checked here; ranges are checked where chat requests are. Items are those that this
server's own answers consist of, and what a client adds to them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError

from quickdraft.server.body import NEVER, OffFields, Path
from quickdraft.server.messages import TOOL_NAME, Strict

# Known fields without an implementation here -> is this value the one that means "off"?
RESPONSES_OFF: Final[OffFields] = {
    "background": lambda value: value is False,
    "truncation": lambda value: value == "disabled",
    "service_tier": lambda value: value in ("auto", "default"),
    "top_logprobs": lambda value: value == 0 and not isinstance(value, bool),
    "context_management": lambda value: value == [],
    "conversation": NEVER,
    "prompt": NEVER,
    "max_tool_calls": NEVER,
    "prompt_cache_retention": NEVER,
    "prompt_cache_options": NEVER,
    "moderation": NEVER,
    "image": NEVER,
    "background_options": NEVER,
    "access_programs": NEVER,
}
ENCRYPTED: Final = "reasoning.encrypted_content"
Status = Literal["in_progress", "completed", "incomplete"]


def is_verbatim(path: Path) -> bool:
    """Inside a schema, where null is a value."""
    return (len(path) > 2 and path[0] == "tools" and path[2] == "parameters") or path[:3] == (
        "text",
        "format",
        "schema",
    )


class InputText(Strict):
    type: Literal["input_text"]
    text: str


class OutputText(Strict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(default_factory=list, max_length=0)
    logprobs: list[Any] = Field(default_factory=list, max_length=0)


class SummaryText(Strict):
    type: Literal["summary_text"]
    text: str


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: str


TextPart = Annotated[InputText | OutputText, Field(discriminator="type")]


def _as_parts(content: Any, kind: str, known: tuple[str, ...]) -> Any:
    """A string as one part; refuses every type of part that is not `known`."""
    if isinstance(content, str):
        return [{"type": kind, "text": content}]
    for index, part in enumerate(content if isinstance(content, list) else ()):
        got = part.get("type") if isinstance(part, dict) else None
        if got not in known:
            raise PydanticCustomError(
                "unsupported_parameter",
                "part {index} has type {got}; this server reads {known} here and no images or files",
                {"index": index, "got": repr(got)[:80], "known": ", ".join(known)},
            )
    return content


class MessageItem(Strict):
    """`id` and `status` come back with an earlier answer and change nothing."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: list[TextPart]
    id: str | None = None
    status: Status | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _parts(cls, content: Any, info: Any) -> Any:
        kind = "output_text" if info.data.get("role") == "assistant" else "input_text"
        known = ("output_text", "input_text") if kind == "output_text" else (kind,)
        return _as_parts(content, kind, known)


class FunctionCall(Strict):
    type: Literal["function_call"]
    call_id: str
    name: str = Field(pattern=TOOL_NAME)
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutput(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: list[InputText]
    id: str | None = None
    status: Status | None = None

    @field_validator("output", mode="before")
    @classmethod
    def _parts(cls, output: Any) -> Any:
        return _as_parts(output, "input_text", ("input_text",))


class ReasoningItem(Strict):
    type: Literal["reasoning"]
    id: str | None = None
    summary: list[SummaryText] = Field(default_factory=list)
    content: list[ReasoningText] = Field(default_factory=list)
    encrypted_content: str | None = None
    status: Status | None = None


def _kind(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]
_ITEMS: Final = ("message", "function_call", "function_call_output", "reasoning")


class FunctionTool(Strict):
    """A function of the client's. Its schema goes to the chat template as it was sent."""

    type: Literal["function"]
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False


class ReasoningOptions(Strict):
    effort: str | None = None
    summary: Literal["auto", "detailed"] | None = None


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool = False

    @model_validator(mode="after")
    def _schema_has_its_type(self) -> TextFormat:
        given = self.model_fields_set - {"type"}
        if self.type == "json_schema" and (self.name is None or self.json_schema is None):
            raise PydanticCustomError("invalid_value", "json_schema needs 'name' and 'schema'")
        if self.type != "json_schema" and given:
            raise PydanticCustomError("invalid_value", "'name', 'schema', 'strict' belong to json_schema")
        return self


class TextOptions(Strict):
    format: TextFormat = Field(default_factory=TextFormat)
    verbosity: Literal["medium"] = "medium"


class ResponseStreamOptions(Strict):
    include_obfuscation: Literal[False] = False


class ResponsesRequest(Strict):
    """POST /v1/responses. `seed`, `speculation` and `chat_template_kwargs` are this server's own."""

    model: str
    input: list[Item] = Field(min_length=1)
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    include: list[Literal["reasoning.encrypted_content"]] = Field(default_factory=list)
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    text: TextOptions = Field(default_factory=TextOptions)
    metadata: dict[str, str] = Field(default_factory=dict)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    seed: int | None = None
    speculation: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @field_validator("input", mode="before")
    @classmethod
    def _items(cls, given: Any) -> Any:
        if isinstance(given, str):
            return [{"type": "message", "role": "user", "content": given}]
        for index, item in enumerate(given if isinstance(given, list) else ()):
            if (kind := _kind(item)) not in _ITEMS:
                raise PydanticCustomError(
                    "unsupported_parameter",
                    "item {index} has type {kind}; this server reads {known}",
                    {"index": index, "kind": repr(kind)[:80], "known": ", ".join(_ITEMS)},
                )
        return given

    @field_validator("tools", mode="before")
    @classmethod
    def _only_functions(cls, tools: Any) -> Any:
        for index, tool in enumerate(tools if isinstance(tools, list) else ()):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if kind != "function":
                raise PydanticCustomError(
                    "unsupported_parameter",
                    "tool {index} has type {kind}; this server has no tools of its own: only functions",
                    {"index": index, "kind": repr(kind)[:80]},
                )
        return tools
