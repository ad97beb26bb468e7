"""How answers look in OpenAI's Responses API: a response of output items, whole and as events.

Reasoning, text and calls are items where they stand in the answer. A finished response is put into
the store where its request asked for that. `timings`, `prefix_cache`, `seed` and `speculation` are
this server's own fields of the response.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from quickdraft.server.answer import Answer, Choice
from quickdraft.server.blocks import Block, Blocks, Closed, Grown, Opened
from quickdraft.server.engine import Output
from quickdraft.server.errors import ApiError
from quickdraft.server.response_store import ResponseStore
from quickdraft.server.responses_items import Event, ItemStyle
from quickdraft.server.responses_schemas import ENCRYPTED
from quickdraft.server.responses_translate import Asked
from quickdraft.server.shapes import own_fields
from quickdraft.server.stream import Framing
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import FinishReason

RESPONSES_FRAMING: Final = Framing(named=True, end=b"")


class ResponseShape:
    """response, and the events that build one."""

    def __init__(self, answer: Answer, tokenizer: Tokenizer, store: ResponseStore) -> None:
        assert isinstance(answer.call.asked, Asked), "made by ResponsesTranslator"
        self._answer, self._asked, self._store = answer, answer.call.asked, store
        request = self._asked.request
        self._style = ItemStyle(
            answer.request_id.removeprefix("resp_"),
            summary=request.reasoning.summary is not None,
            sealed=ENCRYPTED in request.include,
        )
        self._blocks, self._sequence = Blocks(), 0

    def whole(self) -> dict[str, Any]:
        choice = self._answer.choices[0]
        return self._finished(choice, Blocks.of(choice.parts))

    def first(self) -> list[Event]:
        response = self._response("in_progress", [])
        names = ("response.created", "response.in_progress")
        return [self._numbered({"type": name, "response": response}) for name in names]

    def deltas(self, choice: Choice, output: Output) -> list[Event]:
        steps = self._blocks.feed(choice.news)
        if choice.finish_reason is not None:
            steps += self._blocks.finish()
        events: list[Event] = []
        for step in steps:
            match step:
                case Opened(block):
                    events += self._style.opened(block)
                case Grown(block, piece):
                    events.append(self._style.grown(block, piece))
                case Closed(block):
                    events += self._style.closed(block, _status(choice, block, self._blocks.all))
        return [self._numbered(event) for event in events]

    def last(self, choice: Choice) -> Event:
        response = self._finished(choice, self._blocks.all)
        return self._numbered({"type": f"response.{response['status']}", "response": response})

    def usage_chunk(self) -> Event:
        raise NotImplementedError("this API has no such event, and no request asks for one")

    def failed(self, failure: ApiError) -> Event:
        output = [self._style.item(block, "incomplete") for block in self._blocks.all]
        error = {"code": "server_error", "message": failure.message}
        response = {**self._response("failed", output), "error": error}
        return self._numbered({"type": "response.failed", "response": response})

    def _numbered(self, event: Event) -> Event:
        self._sequence += 1
        return {**event, "sequence_number": self._sequence - 1}

    def _finished(self, choice: Choice, blocks: Sequence[Block]) -> dict[str, Any]:
        """The complete response, which is stored here when it was asked for."""
        cut = choice.finish_reason is FinishReason.LENGTH
        output = [self._style.item(block, _status(choice, block, blocks)) for block in blocks]
        response = self._response("incomplete" if cut else "completed", output)
        response |= {
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": _usage(choice),
            **own_fields(self._answer, choice),
        }
        if self._asked.request.store:
            self._store.put(response, self._asked.items)
        return response

    def _response(self, status: str, output: Iterable[dict[str, Any]]) -> dict[str, Any]:
        request = self._asked.request
        return {
            "id": self._answer.request_id,
            "object": "response",
            "created_at": self._answer.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "model": request.model,
            "output": list(output),
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": request.reasoning.effort, "summary": request.reasoning.summary},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": request.store,
            "temperature": request.temperature,
            "text": request.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": request.tool_choice,
            "tools": list(self._asked.tools),
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }


def _status(choice: Choice, block: Block, blocks: Sequence[Block]) -> str:
    """A limit cuts off the last block only."""
    cut = choice.finish_reason is FinishReason.LENGTH and block is blocks[-1]
    return "incomplete" if cut else "completed"


def _usage(choice: Choice) -> dict[str, Any]:
    timings = choice.finished_timings()
    thought = choice.reasoning.count if choice.reasoning is not None else 0
    return {
        "input_tokens": timings.prompt_tokens,
        "input_tokens_details": {"cached_tokens": timings.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": timings.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": timings.prompt_tokens + timings.completion_tokens,
    }
