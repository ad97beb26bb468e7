"""One log line per request for an answer: who, how much, how long, from where, how it ended."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from quickdraft.server.answer import Answer, Choice
from quickdraft.server.translate import Call
from quickdraft.types import CacheReport, Timings

_log = logging.getLogger("quickdraft.requests")
CLIENT_GONE = 499  # nginx's number for a client that closed its connection


@dataclass(slots=True)
class RequestLog:
    """Collects what is known of a request; `write` emits the line. Times are on time.monotonic."""

    request_id: str
    status: int = 200
    error: str = ""
    call: Call | None = None
    answer: Answer | None = None
    arrived: float = field(default_factory=time.monotonic)

    def write(self) -> None:
        elapsed_ms = 1000 * (time.monotonic() - self.arrived)
        parts = [self.request_id, f"status={self.status}", f"total_ms={elapsed_ms:.1f}"]
        if self.call is not None:
            # JSON keeps labels on one line: they are the client's text.
            parts += [f"{k}={json.dumps(v)[:300]}" for k, v in self.call.labels.items()]
            parts.append(f"stream={int(self.call.stream)} speculation={self.call.params.speculation}")
            if self.answer is not None:
                parts.append(_numbers(self.answer.choices, self.arrived))
            else:
                parts.append(f"prompt_tokens={sum(map(len, self.call.prompts))}")
        if self.status == CLIENT_GONE:
            parts.append("finish=abort client=gone")
        if self.error:
            parts.append(f"error={json.dumps(self.error)[:500]}")
        _log.info(" ".join(parts))


def _numbers(choices: Sequence[Choice], arrived: float) -> str:
    """Sums over the choices; times are those of the slowest."""
    parts = [f"prompt_tokens={sum(choice.prompt_tokens for choice in choices if not choice.sample)}"]
    timings = [choice.timings for choice in choices if choice.timings is not None]
    if timings:
        parts.append(f"cached_tokens={sum(one.cached_tokens for one in timings)}")
    parts.append(f"completion_tokens={sum(choice.tokens for choice in choices)}")
    first = [choice.first_at for choice in choices if choice.first_at is not None]
    if first:
        parts.append(f"ttft_ms={1000 * (min(first) - arrived):.1f}")
    if timings:
        parts.append(_times(timings))
    reports = [choice.cache for choice in choices if choice.cache is not None]
    if reports:
        parts.append("cache=" + ",".join(map(_cache, reports)))
    reasons = [str(choice.finish_reason) for choice in choices if choice.finish_reason is not None]
    if reasons:
        parts.append(f"finish={','.join(reasons)}")
    return " ".join(parts)


def _times(timings: Sequence[Timings]) -> str:
    decode_ms = max(one.decode_ms for one in timings)
    tokens = sum(one.completion_tokens for one in timings)
    rate = 1000 * tokens / decode_ms if decode_ms > 0 else 0.0
    return (
        f"queue_ms={max(one.queue_ms for one in timings):.1f} "
        f"prompt_ms={max(one.prompt_ms for one in timings):.1f} decode_ms={decode_ms:.1f} "
        f"tokens_per_second={rate:.1f} steps={sum(one.steps for one in timings)} "
        f"drafted={_sources([one.drafted for one in timings])} "
        f"accepted={_sources([one.accepted for one in timings])}"
    )


def _sources(counts: Sequence[dict[str, int]]) -> str:
    names = dict.fromkeys(name for one in counts for name in one)
    return ",".join(f"{name}:{sum(one.get(name, 0) for one in counts)}" for name in names) or "0"


def _cache(report: CacheReport) -> str:
    """The reason, and for a difference where it is and which tokens meet there."""
    if report.reason != "differs":
        return report.reason
    return f"differs@{report.cached_tokens}:{report.token}/{report.cached_token}"
