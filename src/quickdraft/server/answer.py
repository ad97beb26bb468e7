"""The shapes of answers: chat.completion and chat.completion.chunk objects, usage, logprobs.

`logprobs.content` holds every emitted token, the stop token included, so its length is
usage.completion_tokens. `timings`, `seed` and `speculation` are quickdraft's own fields.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from quickdraft.errors import EngineError
from quickdraft.server.engine import Output
from quickdraft.server.errors import ApiError
from quickdraft.server.translate import ChatCall
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import FinishReason, Timings, TokenLogprob


@dataclass(slots=True)
class Answer:
    """One answer while it grows; made for one ChatCall."""

    request_id: str
    call: ChatCall
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    seed: int | None = None
    timings: Timings | None = None

    def add(self, output: Output) -> None:
        """Take one Output in; ApiError 500 when the request failed or was aborted by the engine."""
        self.texts.append(output.text)
        self.logprobs += output.logprobs
        self.seed = output.seed
        self.timings = output.timings
        self.finish_reason = output.finish_reason
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            reason = output.error or f"the engine ended it with '{output.finish_reason}'"
            raise ApiError(f"the request failed: {reason}", status=500, code="request_failed")

    def completion(self) -> dict[str, Any]:
        """The whole answer, once it has finished."""
        message = {"role": "assistant", "content": "".join(self.texts), "refusal": None}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(self.logprobs),
            "finish_reason": self.finish_reason,
        }
        return {**self._head("chat.completion", [choice]), "usage": self.usage(), **self._own_fields()}

    def delta(self, output: Output) -> dict[str, Any] | None:
        """The chunk for one Output; None when it has nothing to show yet."""
        if not output.text and not output.logprobs:
            return None
        return self._chunk({"content": output.text}, logprobs=self._logprobs(output.logprobs))

    def first_chunk(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""})

    def last_chunk(self) -> dict[str, Any]:
        return {**self._chunk({}, finish_reason=self.finish_reason), **self._own_fields()}

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._head("chat.completion.chunk", []), "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object out of the request's timings."""
        timings = self.finished_timings()
        accepted = sum(timings.accepted.values())
        return {
            "prompt_tokens": timings.prompt_tokens,
            "completion_tokens": timings.completion_tokens,
            "total_tokens": timings.prompt_tokens + timings.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": timings.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(timings.drafted.values()) - accepted,
            },
        }

    def finished_timings(self) -> Timings:
        if self.timings is None:
            raise EngineError("the engine ended a request without timings")
        return self.timings

    def _own_fields(self) -> dict[str, Any]:
        return {
            "timings": self.finished_timings().to_dict(),
            "seed": self.seed,
            "speculation": str(self.call.params.speculation),
        }

    def _chunk(
        self, delta: dict[str, Any], *, logprobs: Any = None, finish_reason: FinishReason | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = self._head("chat.completion.chunk", [choice])
        return {**chunk, "usage": None} if self.call.include_usage else chunk

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.call.model,
            "choices": choices,
        }

    def _logprobs(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any] | None:
        if self.call.params.logprobs is None:
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
        raw = self.tokenizer.token_bytes(token)
        text = self.tokenizer.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(raw) if raw else None}
