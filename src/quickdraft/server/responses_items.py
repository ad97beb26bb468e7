"""Blocks of an answer as output items of the Responses API, and the events that build an item.

Events lack their sequence_number, which the shape gives. Knows nothing of requests or of the store.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Final

from quickdraft.server.blocks import Block
from quickdraft.server.responses_translate import seal

Event = dict[str, Any]
_PREFIXES: Final = {"reasoning": "rs", "text": "msg", "call": "fc"}


@dataclass(frozen=True, slots=True)
class ItemStyle:
    """What the request asked of items. `token` makes ids; `summary`: reasoning is shown as its summary;
    `sealed`: it comes as encrypted_content too."""

    token: str
    summary: bool = False
    sealed: bool = False

    def item(self, block: Block, status: str) -> dict[str, Any]:
        """The item of a block as it stands; "incomplete" for the one that a limit cut off."""
        done = status == "completed"
        head = {"id": f"{_PREFIXES[block.kind]}_{self.token}{block.index:03x}"}
        match block.kind:
            case "reasoning":
                parts = [self._part(block)] if block.pieces else []
                shown: dict[str, Any] = {"summary": [], "content": []}
                shown["summary" if self.summary else "content"] = parts
                if self.sealed:
                    shown["encrypted_content"] = seal(block.text)
                return {**head, "type": "reasoning", **shown, "status": status}
            case "text":
                content = [self._part(block)] if block.pieces else []
                return {**head, "type": "message", "role": "assistant", "content": content, "status": status}
            case "call":
                call = {"call_id": block.id, "name": block.name, "arguments": block.text}
                if done and not _is_json(block.text):  # the model broke its form
                    status = "incomplete"
                return {**head, "type": "function_call", **call, "status": status}

    def opened(self, block: Block) -> list[Event]:
        """The events of the beginning of a block, whatever it holds by now."""
        block = replace(block, pieces=[])
        item = self.item(block, "in_progress")
        events = [_event("output_item.added", block, item=item)]
        if block.kind != "call":
            events.append(self._on_part("added", block, item["id"]))
        return events

    def grown(self, block: Block, piece: str) -> Event:
        """The event of a piece."""
        item_id = self.item(block, "in_progress")["id"]
        match block.kind:
            case "call":
                return _event("function_call_arguments.delta", block, item_id=item_id, delta=piece)
            case "text":
                where = {"item_id": item_id, "content_index": 0}
                return _event("output_text.delta", block, **where, delta=piece, logprobs=[])
            case "reasoning":
                return _event(f"{self._reasoning}.delta", block, **self._where(block, item_id), delta=piece)

    def closed(self, block: Block, status: str) -> list[Event]:
        """The events of a block that is complete."""
        item = self.item(block, status)
        own = item["id"]
        match block.kind:
            case "call":
                done = _event(
                    "function_call_arguments.done", block, item_id=own, name=block.name, arguments=block.text
                )
                return [done, _event("output_item.done", block, item=item)]
            case "text":
                where = {"item_id": own, "content_index": 0}
                done = _event("output_text.done", block, **where, text=block.text, logprobs=[])
            case "reasoning":
                done = _event(f"{self._reasoning}.done", block, **self._where(block, own), text=block.text)
        return [done, self._on_part("done", block, own), _event("output_item.done", block, item=item)]

    @property
    def _reasoning(self) -> str:
        return "reasoning_summary_text" if self.summary else "reasoning_text"

    def _where(self, block: Block, item_id: str) -> dict[str, Any]:
        index = "summary_index" if self.summary and block.kind == "reasoning" else "content_index"
        return {"item_id": item_id, index: 0}

    def _on_part(self, what: str, block: Block, item_id: str) -> Event:
        summary = self.summary and block.kind == "reasoning"
        name = "reasoning_summary_part" if summary else "content_part"
        return _event(f"{name}.{what}", block, **self._where(block, item_id), part=self._part(block))

    def _part(self, block: Block) -> dict[str, Any]:
        """The one part of a block that is no call."""
        if block.kind == "text":
            return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
        return {"type": "summary_text" if self.summary else "reasoning_text", "text": block.text}


def _event(event: str, block: Block, **fields: Any) -> Event:
    return {"type": f"response.{event}", "output_index": block.index, **fields}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
