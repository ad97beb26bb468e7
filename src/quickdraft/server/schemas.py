"""Requests as pydantic reads them: strict types, no unknown fields.

Ranges are checked once, in types.SamplingParams; here only the shape is checked. `parse` turns
pydantic's findings into an ApiError that names the field.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from quickdraft.server.errors import ApiError, field_path
from quickdraft.server.messages import Message, Strict, Tool, part_text

S = TypeVar("S", bound=BaseModel)


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Prediction(Strict):
    """Text that the answer is expected to repeat; its parts are joined as they are."""

    type: Literal["content"]
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return "".join(part_text(part, index) for index, part in enumerate(content))


class JsonSchema(Strict):
    """A named schema; `strict` or not, it is followed to the letter."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    content: dict[str, Any] = Field(alias="schema")
    strict: bool = True


class ResponseFormat(Strict):
    """OpenAI's form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_belongs_to_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "invalid_value", "json_schema belongs to type 'json_schema', which needs it"
            )
        return self


class StructuredOutputs(Strict):
    """vLLM's: one of these."""

    json_: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    @property
    def only(self) -> tuple[str, Any]:
        """Its name and value."""
        return self._given[0]

    @property
    def _given(self) -> list[tuple[str, Any]]:
        values = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        return [(name, value) for name, value in values.items() if value is not None]

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if len(self._given) != 1:
            raise PydanticCustomError("invalid_value", "must hold one of json, regex, choice and grammar")
        return self


class Generation(Strict):
    """What every request for an answer may say; defaults are OpenAI's."""

    model: str
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    seed: int | None = None
    stop: list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    min_tokens: int = 0
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    speculation: str | None = None
    prediction: Prediction | None = None
    return_token_sources: bool = False
    # Labels: they go to the request's log line and change nothing else.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    def labels(self) -> dict[str, object]:
        names = ("user", "safety_identifier", "prompt_cache_key", "metadata")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


class TemplateFields(Strict):
    """What a conversation asks of the chat template. `tool_choice` is checked where it is read."""

    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Any = "auto"
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


class ChatRequest(Generation, TemplateFields):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    parallel_tool_calls: bool = True
    thinking_budget: int | None = None


class CompletionRequest(Generation):
    """POST /v1/completions. `prompt` is checked where it is read: it has four shapes and may be huge."""

    prompt: Any
    max_tokens: int = 16
    logprobs: int | None = None
    echo: bool = False


class TokenizeRequest(TemplateFields):
    """POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """POST /detokenize. `tokens` is checked where it is read."""

    model: str | None = None
    tokens: Any


def parse(kind: type[S], body: Mapping[str, Any]) -> S:
    """A request of that kind, or an ApiError for the first thing that is wrong."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _api_error(kind, error.errors(include_url=False, include_input=False)[0]) from error


def _api_error(kind: type[BaseModel], found: ErrorDetails) -> ApiError:
    param = field_path(found["loc"])
    match found["type"]:
        case "extra_forbidden":
            close = difflib.get_close_matches(str(found["loc"][-1]), kind.model_fields, 1)
            hint = f". hint: did you mean '{close[0]}'?" if close and len(found["loc"]) == 1 else ""
            return ApiError(f"unknown field '{param}'{hint}", param=param, code="unknown_parameter")
        case "missing":
            return ApiError(f"'{param}' is required", param=param, code="missing_required_parameter")
        case "unsupported_parameter":
            return ApiError(f"'{param}': {found['msg']}", param=param, code="unsupported_parameter")
    return ApiError(f"bad value for '{param}': {found['msg']}", param=param, code="invalid_value")
