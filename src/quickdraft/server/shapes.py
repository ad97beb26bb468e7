"""How answers look: OpenAI's chat.completion and text_completion objects, whole and in chunks.

`logprobs` hold every emitted token, the stop token included, so their length is
usage.completion_tokens. `timings`, `prefix_cache`, `seed` and `speculation` are quickdraft's own
fields; with several choices they stand in each choice instead of at the top.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from quickdraft.server.answer import Answer, AnswerPart, CallArguments, CallBegun, Choice
from quickdraft.server.engine import Output
from quickdraft.server.errors import ApiError
from quickdraft.server.legacy_logprobs import LegacyLogprobs
from quickdraft.speculate.draft import PREDICTION
from quickdraft.text.answer_parts import Content, Reasoning
from quickdraft.text.origins import Origin
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import TokenLogprob


class Shape(Protocol):
    """The JSON of one answer; made once per call."""

    def whole(self) -> dict[str, Any]:
        """The whole answer, once every choice has finished."""

    def first(self) -> list[dict[str, Any]]:
        """Chunks that come before any token."""

    def deltas(self, choice: Choice, output: Output) -> list[dict[str, Any]]:
        """The chunks for one Output; none when it has nothing to show yet."""

    def last(self, choice: Choice) -> dict[str, Any]:
        """The chunk that ends a choice."""

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk that stream_options.include_usage asks for."""

    def failed(self, failure: ApiError) -> dict[str, Any]:
        """The event that tells of a failure after the first byte; nothing follows it."""


class ChatShape:
    """chat.completion and chat.completion.chunk."""

    def __init__(self, answer: Answer, tokenizer: Tokenizer) -> None:
        self._answer, self._tokenizer = answer, tokenizer

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                "message": _message(choice),
                "logprobs": self._logprobs(choice.logprobs),
                "finish_reason": _finish_reason(choice),
                **_sources(choice, choice.from_sources),
            }
            for choice in self._answer.choices
        ]
        return _whole(self._answer, "chat.completion", choices)

    def first(self) -> list[dict[str, Any]]:
        role = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(choice, role) for choice in self._answer.choices]

    def deltas(self, choice: Choice, output: Output) -> list[dict[str, Any]]:
        shown = _deltas(choice.news)
        if not shown and (output.logprobs or choice.new_sources):
            shown = [{"content": ""}]
        # What an Output says of its tokens goes with its first chunk: they are not cut apart.
        first = {"logprobs": self._logprobs(output.logprobs), **_sources(choice, choice.new_sources)}
        return [
            self._chunk(choice, {"delta": delta, **(first if number == 0 else _sources(choice, []))})
            for number, delta in enumerate(shown)
        ]

    def last(self, choice: Choice) -> dict[str, Any]:
        chunk = self._chunk(choice, {"delta": {}, "finish_reason": _finish_reason(choice)})
        return _with_own_fields(chunk, self._answer, [choice])

    def usage_chunk(self) -> dict[str, Any]:
        return {**_head(self._answer, "chat.completion.chunk", []), "usage": usage(self._answer.choices)}

    def failed(self, failure: ApiError) -> dict[str, Any]:
        return failure.body()

    def _chunk(self, choice: Choice, parts: dict[str, Any]) -> dict[str, Any]:
        own = {"index": choice.index, "delta": {}, "logprobs": None, "finish_reason": None, **parts}
        return _chunk(self._answer, "chat.completion.chunk", own)

    def _logprobs(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any] | None:
        if self._answer.call.params.logprobs is None:
            return None
        content = [
            {
                **self._token(entry.token, entry.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in entry.top],
            }
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        text = self._tokenizer.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(raw) if raw else None}


class CompletionShape:
    """text_completion, the same object whole and in chunks."""

    def __init__(self, answer: Answer, tokenizer: Tokenizer) -> None:
        self._answer = answer
        self._logprobs = (
            [LegacyLogprobs(tokenizer, len(choice.echo)) for choice in answer.choices]
            if answer.call.params.logprobs is not None
            else None
        )

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                **self._choice(choice, choice.text, choice.logprobs, choice.finish_reason),
                **_sources(choice, choice.from_sources),
            }
            for choice in self._answer.choices
        ]
        return _whole(self._answer, "text_completion", choices)

    def first(self) -> list[dict[str, Any]]:
        return [
            _chunk(self._answer, "text_completion", self._choice(choice, choice.echo))
            for choice in self._answer.choices
            if choice.echo
        ]

    def deltas(self, choice: Choice, output: Output) -> list[dict[str, Any]]:
        if not output.text and not output.logprobs:
            return []
        shown = self._choice(choice, output.text, output.logprobs)
        shown |= _sources(choice, choice.new_sources)
        return [_chunk(self._answer, "text_completion", shown)]

    def last(self, choice: Choice) -> dict[str, Any]:
        shown = self._choice(choice, "", finish_reason=choice.finish_reason)
        chunk = _chunk(self._answer, "text_completion", shown)
        return _with_own_fields(chunk, self._answer, [choice])

    def usage_chunk(self) -> dict[str, Any]:
        return {**_head(self._answer, "text_completion", []), "usage": usage(self._answer.choices)}

    def failed(self, failure: ApiError) -> dict[str, Any]:
        return failure.body()

    def _choice(
        self,
        choice: Choice,
        text: str,
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        shown = self._logprobs[choice.index].show(logprobs) if self._logprobs and logprobs else None
        return {"index": choice.index, "text": text, "logprobs": shown, "finish_reason": finish_reason}


def _sources(choice: Choice, origins: Sequence[Origin]) -> dict[str, Any]:
    """The extension field `token_sources`, where it was asked for."""
    if choice.origins is None:
        return {}
    return {"token_sources": [{"text": one.text, "source": one.source} for one in origins]}


def _message(choice: Choice) -> dict[str, Any]:
    """The assistant's message; reasoning and calls are there when there are any."""
    content = choice.echo + "".join(part.text for part in choice.parts if isinstance(part, Content))
    reasoning = "".join(part.text for part in choice.parts if isinstance(part, Reasoning))
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if choice.calls:
        message["content"] = content or None
        message["tool_calls"] = tool_calls(choice)
    return message


def tool_calls(choice: Choice) -> list[dict[str, Any]]:
    """The calls of an answer, whole."""
    calls: list[dict[str, Any]] = []
    for part in choice.parts:
        if isinstance(part, CallBegun):
            calls.append({"id": part.id, "type": "function", "function": _function(part.name)})
        elif isinstance(part, CallArguments):
            calls[part.index]["function"]["arguments"] += part.text
    return calls


def _deltas(parts: Sequence[AnswerPart]) -> list[dict[str, Any]]:
    """The deltas for these parts, neighbours of one kind joined."""
    shown: list[dict[str, Any]] = []
    for part in parts:
        last = shown[-1] if shown else {}
        match part:
            case CallBegun(index, own_id, name):
                call = {"index": index, "id": own_id, "type": "function", "function": _function(name)}
                shown.append({"tool_calls": [call]})
            case CallArguments(index, text):
                # Arguments never share a delta with a name: some clients read only one of them.
                if "tool_calls" not in last or "id" in last["tool_calls"][0]:
                    shown.append({"tool_calls": [{"index": index, "function": {"arguments": ""}}]})
                shown[-1]["tool_calls"][0]["function"]["arguments"] += text
            case Reasoning(text) | Content(text):
                key = "reasoning_content" if isinstance(part, Reasoning) else "content"
                if not last or "tool_calls" in last:
                    shown.append({})
                shown[-1][key] = shown[-1].get(key, "") + text
    return shown


def _function(name: str) -> dict[str, str]:
    return {"name": name, "arguments": ""}


def _finish_reason(choice: Choice) -> str | None:
    """An answer that ends in order after its calls waits for the tools."""
    return "tool_calls" if choice.called else choice.finish_reason


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """OpenAI's usage object out of the timings of all choices; a prompt counts once, whatever n."""
    timings = [choice.finished_timings() for choice in choices]
    read = [choice.finished_timings() for choice in choices if not choice.sample]
    prompt, completion = sum(t.prompt_tokens for t in read), sum(t.completion_tokens for t in timings)
    accepted = sum(t.accepted.get(PREDICTION, 0) for t in timings)
    drafted = sum(t.drafted.get(PREDICTION, 0) for t in timings)
    thought = [choice.reasoning.count for choice in choices if choice.reasoning is not None]
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(t.cached_tokens for t in read)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
            **({"reasoning_tokens": sum(thought)} if thought else {}),
        },
    }


def _head(answer: Answer, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": answer.request_id,
        "object": kind,
        "created": answer.created,
        "model": answer.call.model,
        "choices": choices,
    }


def _chunk(answer: Answer, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    chunk = _head(answer, kind, [choice])
    return {**chunk, "usage": None} if answer.call.include_usage else chunk


def _whole(answer: Answer, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    body = {**_head(answer, kind, choices), "usage": usage(answer.choices)}
    return _with_own_fields(body, answer, answer.choices)


def own_fields(answer: Answer, choice: Choice) -> dict[str, Any]:
    """quickdraft's own fields of a finished choice."""
    return {
        "timings": choice.finished_timings().to_dict(),
        "prefix_cache": choice.cache.to_dict() if choice.cache is not None else None,
        "seed": choice.seed,
        "speculation": str(answer.call.params.speculation),
    }


def _with_own_fields(body: dict[str, Any], answer: Answer, choices: Sequence[Choice]) -> dict[str, Any]:
    """`body` with quickdraft's own fields of `choices`, which body["choices"] shows in this order."""
    own = [own_fields(answer, choice) for choice in choices]
    if len(answer.choices) == 1:
        return {**body, **own[0]}
    return {**body, "choices": [{**one, **more} for one, more in zip(body["choices"], own, strict=True)]}
