"""From bytes to KV blocks. Pure arithmetic; what is free is asked of config.Hardware by the caller."""

from __future__ import annotations

from quickdraft.errors import ConfigError


def kv_blocks(bytes_per_block: int, budget_bytes: int) -> int:
    """Whole blocks in a byte budget; ConfigError when not even one fits."""
    blocks = budget_bytes // bytes_per_block
    if blocks < 1:
        raise ConfigError(
            "the KV memory holds no block",
            got=f"{budget_bytes} bytes",
            expected=f"at least {bytes_per_block}",
            hint="give --kv-memory more",
        )
    return blocks
