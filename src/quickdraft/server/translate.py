"""From a checked ChatRequest to what the engine takes: prompt ids and SamplingParams.

Runs in a thread for large bodies, so nothing here touches the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quickdraft.errors import BadParameter, UnsupportedError
from quickdraft.server.body import parse_body
from quickdraft.server.engine import AsyncEngine
from quickdraft.server.errors import ApiError
from quickdraft.server.schemas import ChatRequest, Message, parse_chat
from quickdraft.text.chat_template import chat_prompt_ids
from quickdraft.types import SamplingParams, Speculation


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One chat completion, ready to run."""

    model: str
    prompt_ids: list[int]
    params: SamplingParams
    stream: bool
    include_usage: bool
    labels: dict[str, object]


@dataclass(frozen=True, slots=True)
class Translator:
    """Turns request bodies into calls for one engine, served under `names`."""

    engine: AsyncEngine
    names: tuple[str, ...]
    speculation: Speculation

    def chat(self, body: bytes) -> ChatCall:
        """Parse, check and tokenize; raises ApiError and QuickdraftError."""
        request = parse_chat(parse_body(body))
        if request.model not in self.names:
            raise unknown_model(request.model, self.names)
        if request.stream_options is not None and not request.stream:
            raise ApiError(
                "'stream_options' is only allowed with stream true",
                param="stream_options",
                code="invalid_value",
            )
        params = self._params(request)
        prompt_ids = self._prompt_ids(request.messages)
        self.engine.validate(prompt_ids, params)
        include_usage = request.stream_options is not None and request.stream_options.include_usage
        return ChatCall(request.model, prompt_ids, params, request.stream, include_usage, request.labels())

    def _params(self, request: ChatRequest) -> SamplingParams:
        return SamplingParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            repetition_penalty=request.repetition_penalty,
            logit_bias=_logit_bias(request.logit_bias),
            seed=request.seed,
            max_tokens=_max_tokens(request),
            min_tokens=request.min_tokens,
            stop=tuple(request.stop),
            stop_token_ids=tuple(request.stop_token_ids),
            ignore_eos=request.ignore_eos,
            logprobs=_logprobs(request),
            speculation=self._speculation(request.speculation),
        )

    def _speculation(self, text: str | None) -> Speculation:
        speculation = self.speculation if text is None else Speculation.parse(text)
        missing = [source for source in speculation.sources if source not in self.engine.sources]
        if missing:
            served = ", ".join(self.engine.sources) or "none"
            raise BadParameter(
                "speculation", got=f"'{speculation}'", expected=f"sources this server has: {served}"
            )
        return speculation

    def _prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        tokenizer, template = self.engine.tokenizer, self.engine.chat_template
        if tokenizer is None or template is None:
            missing = "tokenizer" if tokenizer is None else "chat template"
            raise UnsupportedError(f"the model file has no {missing}, so it cannot chat")
        shown = [_template_message(message) for message in messages]
        return chat_prompt_ids(tokenizer, template, shown, max_context=self.engine.max_context_tokens)


def unknown_model(name: str, served: Sequence[str]) -> ApiError:
    """404 in OpenAI's words, listing what is served."""
    return ApiError(
        f"the model {name[:200]!r} does not exist; served here: {', '.join(served)}",
        status=404,
        param="model",
        code="model_not_found",
    )


def _template_message(message: Message) -> dict[str, str]:
    role = "system" if message.role == "developer" else message.role
    extra = {"name": message.name, "tool_call_id": message.tool_call_id}
    return {
        "role": role,
        "content": message.content,
        **{key: value for key, value in extra.items() if value is not None},
    }


def _max_tokens(request: ChatRequest) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise BadParameter(
            "max_completion_tokens", got=new, expected=f"the same as max_tokens ({old}), or only one of them"
        )
    return old if new is None else new


def _logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs is not None:
        raise BadParameter("top_logprobs", got=request.top_logprobs, expected="logprobs to be true with it")
    return None


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise BadParameter("logit_bias", got=ascii(key[:40]), expected="token ids in decimal as keys")
    return {int(key): value for key, value in bias.items()}
