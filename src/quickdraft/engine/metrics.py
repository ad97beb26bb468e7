"""EngineMetrics: what the engine counts, as one plain value that any thread may ask for.

Totals only ever grow; gauges say how things are now. It knows no exporter and no HTTP; times per
request are in its Timings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """A snapshot. Tokens and bytes are totals since the engine started unless named otherwise."""

    running: int  # requests, now
    waiting: int  # requests, now
    kv_blocks: int  # in the pool
    kv_blocks_used: int  # held by requests, now
    kv_blocks_cached: int  # held by the prefix cache alone, now: free for the taking
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # of these, tokens found (in memory or on disk)
    prefix_restored: int = 0  # of these, tokens that came from disk
    prefix_evicted_blocks: int = 0
    checkpoints: int = 0  # recurrent states the prefix cache keeps, now
    checkpoints_evicted: int = 0
    disk: Mapping[str, int] = field(default_factory=dict)  # counters of the disk tier; empty without one
    draft_steps: Mapping[str, int] = field(default_factory=dict)  # per source: drafts verified
    drafted: Mapping[str, int] = field(default_factory=dict)  # per source: tokens
    accepted: Mapping[str, int] = field(default_factory=dict)  # per source: tokens
    draft_cold_tokens: int = 0  # of prefix hits, tokens that the model that drafts lacks its own rows of
    accepted_per_position: tuple[int, ...] = ()  # drafts whose token at this position was accepted
