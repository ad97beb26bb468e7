"""Requests of Anthropic's Messages API as pydantic reads them: strict types, no unknown fields.

Only the shape is checked here; ranges are checked where chat requests are. `cache_control` is accepted
wherever the API has it: everything is cached here without being asked.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from quickdraft.server.body import NEVER, OffFields, Path
from quickdraft.server.messages import TOOL_NAME, Strict


def _keeps_all_thinking(value: Any) -> bool:
    """Context management that changes nothing: no edit, or thinking is cleared but for all of it."""
    edits = value.get("edits", []) if isinstance(value, dict) and value.keys() <= {"edits"} else None
    keep = {"type": "clear_thinking_20251015", "keep": "all"}
    return isinstance(edits, list) and all(edit == keep for edit in edits)


# Known fields without an implementation here -> is this value the one that means "off"?
COUNT_OFF: Final[OffFields] = {
    "speed": lambda value: value == "standard",
    "context_management": _keeps_all_thinking,
    "mcp_servers": lambda value: value == [],
    "output_format": NEVER,
    "user_profile_id": NEVER,
    "workspace_id": NEVER,
}
MESSAGES_OFF: Final[OffFields] = {
    **COUNT_OFF,
    "service_tier": lambda value: value in ("auto", "standard_only"),
    "container": NEVER,
    "inference_geo": NEVER,
    "diagnostics": NEVER,
    "fallbacks": NEVER,
    "compaction": NEVER,
    "thread": NEVER,
}


def is_verbatim(path: Path) -> bool:
    """Inside a schema or the arguments of a call, where null is a value."""
    return (
        (len(path) > 2 and path[0] == "tools" and path[2] == "input_schema")
        or (len(path) > 4 and path[0] == "messages" and path[4] == "input")
        or path[:3] == ("output_config", "format", "schema")
    )


class CacheControl(Strict):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class TextBlock(Strict):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] = Field(default_factory=list, max_length=0)


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: str
    name: str = Field(pattern=TOOL_NAME)
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ThinkingBlock(Strict):
    """Its signature is not checked: a history may be edited."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


def _as_blocks(content: Any, known: tuple[str, ...]) -> Any:
    """A string as a text block; refuses every type of block that is not `known`."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    for index, block in enumerate(content if isinstance(content, list) else ()):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in known:
            raise PydanticCustomError(
                "unsupported_parameter",
                "block {index} has type {kind}; this server reads {known} here and no images or files",
                {"index": index, "kind": repr(kind)[:80], "known": ", ".join(known)},
            )
    return content


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: str
    content: list[TextBlock] = Field(default_factory=list)
    is_error: bool = False
    cache_control: CacheControl | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _blocks(cls, content: Any) -> Any:
        return _as_blocks(content, ("text",))


Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock,
    Field(discriminator="type"),
]
_BLOCKS: Final = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}


class AnthropicMessage(Strict):
    role: Literal["user", "assistant", "system"]
    content: list[Block]

    @field_validator("content", mode="before")
    @classmethod
    def _blocks(cls, content: Any, info: Any) -> Any:
        return _as_blocks(content, _BLOCKS.get(info.data.get("role"), ()))


class AnthropicTool(Strict):
    """A tool of the client's. Its schema goes to the chat template as it was sent."""

    type: Literal["custom"] = "custom"
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False
    cache_control: CacheControl | None = None
    eager_input_streaming: bool = True  # arguments come as they are written either way
    defer_loading: Literal[False] = False
    allowed_callers: list[Literal["direct"]] = Field(default_factory=list)


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized"] = "summarized"  # all of it is shown


class OutputFormat(Strict):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] = "high"
    format: OutputFormat | None = None


class Metadata(Strict):
    user_id: str | None = None


class Conversation(Strict):
    """What is counted: the fields that make the prompt."""

    model: str
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: list[TextBlock] = Field(default_factory=list)
    tools: list[AnthropicTool] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @field_validator("system", mode="before")
    @classmethod
    def _blocks(cls, content: Any) -> Any:
        return _as_blocks(content, ("text",))


class CountRequest(Conversation):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(Conversation):
    """POST /v1/messages. `seed`, `speculation` and `chat_template_kwargs` are this server's own."""

    max_tokens: int
    stream: bool = False
    stop_sequences: list[str] = Field(default_factory=list)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    metadata: Metadata = Field(default_factory=Metadata)
    seed: int | None = None
    speculation: str | None = None
