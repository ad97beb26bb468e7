"""One log line per chat request: who, how much, how long, how it ended."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from quickdraft.server.answer import Answer
from quickdraft.server.translate import ChatCall
from quickdraft.types import Timings

_log = logging.getLogger("quickdraft.requests")
CLIENT_GONE = 499  # nginx's number for a client that closed its connection


@dataclass(slots=True)
class RequestLog:
    """Collects what is known of a request; `write` emits the line."""

    request_id: str
    status: int = 200
    error: str = ""
    call: ChatCall | None = None
    answer: Answer | None = None

    def write(self) -> None:
        parts = [self.request_id, f"status={self.status}"]
        if self.call is not None:
            # JSON keeps labels on one line: they are the client's text.
            parts += [f"{k}={json.dumps(v)[:300]}" for k, v in self.call.labels.items()]
            parts.append(f"stream={int(self.call.stream)} speculation={self.call.params.speculation}")
        if self.answer is not None and self.answer.timings is not None:
            parts.append(_timings(self.answer.timings))
            parts.append(f"finish={self.answer.finish_reason}")
        elif self.call is not None:
            parts.append(f"prompt_tokens={len(self.call.prompt_ids)}")
        if self.status == CLIENT_GONE:
            parts.append("finish=abort")
        if self.error:
            parts.append(f"error={json.dumps(self.error)[:500]}")
        _log.info(" ".join(parts))


def _timings(timings: Timings) -> str:
    drafted, accepted = (
        ",".join(f"{source}:{count}" for source, count in counts.items()) or "0"
        for counts in (timings.drafted, timings.accepted)
    )
    return (
        f"prompt_tokens={timings.prompt_tokens} cached_tokens={timings.cached_tokens} "
        f"prompt_ms={timings.prompt_ms:.1f} completion_tokens={timings.completion_tokens} "
        f"decode_ms={timings.decode_ms:.1f} steps={timings.steps} drafted={drafted} accepted={accepted}"
    )
