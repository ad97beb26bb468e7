"""How answers look to Anthropic's clients: a message of content blocks, whole and as events.

Thinking, text and calls are blocks where they stand in the answer. Cached tokens of the prompt are
known when the answer ends, so the first event counts the whole prompt as input and the last one
splits it. `timings`, `prefix_cache`, `seed` and `speculation` are this server's own fields.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

from pydantic_core import from_json

from quickdraft.server.answer import Answer, Choice
from quickdraft.server.blocks import Block, Blocks, Closed, Grown, Opened
from quickdraft.server.engine import Output
from quickdraft.server.errors import ApiError, ErrorStyle
from quickdraft.server.shapes import own_fields
from quickdraft.server.stream import Framing
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import FinishReason

ANTHROPIC_FRAMING: Final = Framing(
    named=True,
    end=b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ping=b'event: ping\ndata: {"type":"ping"}\n\n',
)


class MessageShape:
    """message, and the events that build one."""

    def __init__(self, answer: Answer, tokenizer: Tokenizer) -> None:
        self._answer, self._blocks = answer, Blocks()

    def whole(self) -> dict[str, Any]:
        choice = self._answer.choices[0]
        content = [_whole_block(block) for block in Blocks.of(choice.parts)]
        message = self._message(content, self._ending(choice), _usage(choice))
        return {**message, **own_fields(self._answer, choice)}

    def first(self) -> list[dict[str, Any]]:
        usage = _counts(self._answer.choices[0].prompt_tokens, 0, 0)
        nothing = {"stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": self._message([], nothing, usage)}]

    def deltas(self, choice: Choice, output: Output) -> list[dict[str, Any]]:
        steps = self._blocks.feed(choice.news)
        if choice.finish_reason is not None:
            steps += self._blocks.finish()
        events: list[dict[str, Any]] = []
        for step in steps:
            index = step.block.index
            match step:
                case Opened(block):
                    shown = {"type": "content_block_start", "content_block": _empty_block(block)}
                    events.append({**shown, "index": index})
                case Grown(block, piece):
                    events.append(_delta(index, _piece(block, piece)))
                case Closed(block):
                    if block.kind == "reasoning":
                        signature = {"type": "signature_delta", "signature": _signature(block.text)}
                        events.append(_delta(index, signature))
                    events.append({"type": "content_block_stop", "index": index})
        return events

    def last(self, choice: Choice) -> dict[str, Any]:
        event = {"type": "message_delta", "delta": self._ending(choice), "usage": _usage(choice)}
        return {**event, **own_fields(self._answer, choice)}

    def usage_chunk(self) -> dict[str, Any]:
        raise NotImplementedError("this API has no such event, and no request asks for one")

    def failed(self, failure: ApiError) -> dict[str, Any]:
        return failure.body(ErrorStyle.ANTHROPIC)

    def _message(
        self, content: list[dict[str, Any]], ending: dict[str, Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._answer.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._answer.call.model,
            "content": content,
            **ending,
            "usage": usage,
        }

    def _ending(self, choice: Choice) -> dict[str, Any]:
        """Why it ended: a limit, a stop sequence, calls that wait for results, or in order."""
        limit = self._answer.call.params.max_tokens
        if choice.finish_reason is FinishReason.LENGTH:
            full = limit is not None and choice.tokens < limit
            reason = "model_context_window_exceeded" if full else "max_tokens"
        elif choice.stopped_at is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if choice.called else "end_turn"
        return {"stop_reason": reason, "stop_sequence": choice.stopped_at}


def _whole_block(block: Block) -> dict[str, Any]:
    shown = _empty_block(block)
    match block.kind:
        case "reasoning":
            return {**shown, "thinking": block.text, "signature": _signature(block.text)}
        case "text":
            return {**shown, "text": block.text}
        case "call":
            # A call that was cut off shows what there is, as clients of a stream do.
            return {**shown, "input": from_json(block.text or "{}", allow_partial=True)}


def _empty_block(block: Block) -> dict[str, Any]:
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "text":
            return {"type": "text", "text": "", "citations": None}
        case "call":
            id_ = block.id.replace("call_", "toolu_", 1)
            return {"type": "tool_use", "id": id_, "name": block.name, "input": {}}


def _piece(block: Block, piece: str) -> dict[str, Any]:
    match block.kind:
        case "reasoning":
            return {"type": "thinking_delta", "thinking": piece}
        case "text":
            return {"type": "text_delta", "text": piece}
        case "call":
            return {"type": "input_json_delta", "partial_json": piece}


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _signature(thought: str) -> str:
    """Clients drop thoughts without one. It signs nothing: requests may bring any."""
    return hashlib.sha256(thought.encode()).hexdigest()[:32]


def _usage(choice: Choice) -> dict[str, Any]:
    timings = choice.finished_timings()
    return _counts(timings.prompt_tokens, timings.cached_tokens, timings.completion_tokens)


def _counts(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    """The prompt in two parts: read now, and found in the prefix cache."""
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": completion,
    }
