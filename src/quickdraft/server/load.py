"""GET /load: how much there is to do and how much room is left, for whoever spreads requests.

A plain reading of the engine's counts; /metrics has the same and more, for watching over time.
"""

from __future__ import annotations

from quickdraft.engine.metrics import EngineMetrics
from quickdraft.ops.interface import BLOCK_TOKENS


def load(now: EngineMetrics) -> dict[str, object]:
    """{"server_load", "running", "waiting", "kv_cache": {"total_tokens", "used_tokens", "cached_tokens",
    "free_tokens"}}.

    `server_load` is vLLM's name for all that is open here. Tokens are those that KV blocks hold; cached ones
    belong to no running request and make way for any, so a new prompt finds cached + free.
    """
    free = now.kv_blocks - now.kv_blocks_used - now.kv_blocks_cached
    return {
        "server_load": now.running + now.waiting,
        "running": now.running,
        "waiting": now.waiting,
        "kv_cache": {
            "total_tokens": now.kv_blocks * BLOCK_TOKENS,
            "used_tokens": now.kv_blocks_used * BLOCK_TOKENS,
            "cached_tokens": now.kv_blocks_cached * BLOCK_TOKENS,
            "free_tokens": free * BLOCK_TOKENS,
        },
    }
