"""Responses that clients may come back to: in memory, within a number and a number of bytes.

The oldest are dropped first; what was dropped is told from what never was. They are kept as JSON text, a
byte for a byte: as objects they would take several times what was counted. Every response has the whole
conversation before it, so it stands whatever is dropped.
Knows nothing of HTTP; may be used from any thread.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from quickdraft.server.errors import ApiError

_REMEMBERED: Final = 1 << 14  # ids of dropped responses
Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stored:
    """A response as it was answered, and `items`, the conversation that led to it."""

    response: dict[str, Any]
    items: tuple[Item, ...]

    def conversation(self) -> tuple[Item, ...]:
        """The items that a request which goes on from here begins with."""
        return (*self.items, *self.response["output"])


class ResponseStore:
    """The latest responses, by id."""

    def __init__(self, *, max_responses: int = 1024, max_bytes: int = 256 << 20) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._kept: OrderedDict[str, str] = OrderedDict()
        self._dropped: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response: dict[str, Any], items: Sequence[Item]) -> None:
        """Keep a response and drop the oldest ones that it leaves no room for, at worst itself."""
        text = json.dumps([response, items], separators=(",", ":"))
        with self._lock:
            self._kept[response["id"]] = text
            self.bytes += len(text)
            while len(self._kept) > self._max_responses or self.bytes > self._max_bytes:
                oldest, text = self._kept.popitem(last=False)
                self.bytes -= len(text)
                self._dropped[oldest] = None
            while len(self._dropped) > _REMEMBERED:
                self._dropped.popitem(last=False)

    def get(self, response_id: str, param: str = "response_id") -> Stored:
        """ApiError 404 for an id that is not kept, and why."""
        with self._lock:
            text = self._kept.get(response_id)
            dropped = response_id in self._dropped
        if text is not None:
            response, items = json.loads(text)
            return Stored(response, tuple(items))
        shown = repr(response_id[:80])
        if dropped:
            message = (
                f"the response {shown} was dropped: this server keeps the latest {self._max_responses} in "
                f"at most {self._max_bytes} bytes of memory. hint: send the whole conversation as 'input'"
            )
            raise ApiError(message, status=404, param=param, code="response_dropped")
        raise ApiError(
            f"there is no response {shown}. hint: it was not stored (store false), not finished, deleted, "
            "or is older than this process",
            status=404,
            param=param,
            code="response_not_found",
        )

    def delete(self, response_id: str) -> None:
        """Forget it; ApiError 404 as `get` has it."""
        self.get(response_id)
        with self._lock:
            self.bytes -= len(self._kept.pop(response_id, ""))
