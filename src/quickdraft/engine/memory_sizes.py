"""Memory sizes: how many rows of history, checkpoints, and keys and values an engine gets that was not told.

On a CPU all is shares of one memory. A card holds what kernels reach: states of sequences, history, keys and
values; checkpoints lie in the host's memory and are counted there. Pure decisions over bytes; allocates
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from quickdraft.config import Hardware
from quickdraft.engine.engine_config import EngineConfig
from quickdraft.models.config import ModelConfig
from quickdraft.ops.interface import Ops
from quickdraft.state.budget import checkpoint_slots
from quickdraft.state.sequence import blocks_for

# Of a card: workspaces, captured graphs and what an allocator cannot hand out (models/card_plan.py).
CARD_SPARE_BYTES: Final = 960 << 20
SEVERAL_SPARE_BYTES: Final = 384 << 20  # more, for captured graphs of steps of several sequences
PENDING_ROWS: Final = 15
# On a card a step of 32 rows costs less than two of 16 (docs/reference/projection.md), so copies go twice as
# far where their history is at most one part in so many of what is free.
CARD_PENDING_ROWS: Final = 31
HISTORY_PART: Final = 8
CACHED_CONTEXTS: Final = 4  # whole contexts that the prefix cache may keep beside those of all sequences


@dataclass(frozen=True, slots=True)
class Machine:
    """What can be had: of memory that buffers lie in, and of the host's; the same where `card` is False."""

    free_bytes: int
    host: Hardware
    card: bool

    @classmethod
    def of(cls, ops: Ops) -> Self:
        host, card = Hardware.detect(), ops.free_memory_bytes()
        return cls(host.free_memory_bytes if card is None else card, host, card is not None)


def most_kv_bytes(config: EngineConfig, ops: Ops) -> int:
    """For keys and values, at most: what was asked for, else the host's share, or on a card all that is free
    before there are weights, as it is settled behind them."""
    if config.kv_memory_bytes is not None:
        return config.kv_memory_bytes
    card = ops.free_memory_bytes()
    return Hardware.detect().default_kv_memory_bytes if card is None else card


def card_spare_bytes(sequences: int) -> int:
    """Of a card, what keys and values are not given."""
    return CARD_SPARE_BYTES + (SEVERAL_SPARE_BYTES if sequences > 1 else 0)


def pending_rows(config: EngineConfig, model: ModelConfig, machine: Machine) -> int:
    """Drafted rows of a step whose inputs are kept."""
    if config.pending_rows is not None:
        return config.pending_rows
    history = CARD_PENDING_ROWS * config.max_sequences * model.history_bytes
    return (
        CARD_PENDING_ROWS if machine.card and history <= machine.free_bytes // HISTORY_PART else PENDING_ROWS
    )


def checkpoints(config: EngineConfig, state_bytes: int, machine: Machine) -> int:
    """States of `state_bytes` that the prefix cache may keep, at least one where it needs any."""
    if not state_bytes or not config.prefix_cache:
        return 0
    if config.checkpoint_memory_bytes is not None:
        return checkpoint_slots(state_bytes, config.checkpoint_memory_bytes)
    host = machine.host
    memory = host.default_spilled_memory_bytes if machine.card else host.default_checkpoint_memory_bytes
    return checkpoint_slots(state_bytes, max(memory, state_bytes))


def useful_blocks(config: EngineConfig, context: int) -> int:
    """Blocks that whole contexts of all sequences and of the prefix cache fill: more would never be used."""
    contexts = config.max_sequences + (CACHED_CONTEXTS if config.prefix_cache else 0)
    return contexts * blocks_for(min(config.max_context or context, context))
