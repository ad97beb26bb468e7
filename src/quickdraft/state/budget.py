"""From bytes to KV blocks and checkpoints. Pure arithmetic; the caller asks config.Hardware what is free."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Final

from quickdraft.errors import ConfigError

MAX_CHECKPOINTS: Final = 1024  # more are not worth looking through, however small a state is


def kv_blocks(
    bytes_per_block: int, budget_bytes: int, beside: Callable[[int], int] = lambda blocks: 0
) -> int:
    """Whole blocks in a byte budget, of which beside(blocks), which grows, goes to other things; ConfigError
    when not even one fits."""
    counts = range(1, budget_bytes // bytes_per_block + 1)
    blocks = bisect_right(counts, budget_bytes, key=lambda count: count * bytes_per_block + beside(count))
    if blocks < 1:
        raise ConfigError(
            "the KV memory holds no block",
            got=f"{budget_bytes} bytes",
            expected=f"at least {bytes_per_block + beside(1)}",
            hint="give --kv-memory more",
        )
    return blocks


def checkpoint_slots(bytes_per_slot: int, budget_bytes: int) -> int:
    """Whole recurrent states in a byte budget; ConfigError when not even one fits."""
    if bytes_per_slot > budget_bytes:
        raise ConfigError(
            "the checkpoint memory holds no state",
            got=f"{budget_bytes} bytes",
            expected=f"at least {bytes_per_slot}",
            hint="give --checkpoint-memory more, or turn the prefix cache off",
        )
    return min(budget_bytes // bytes_per_slot, MAX_CHECKPOINTS)
