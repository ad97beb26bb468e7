"""Memory: what an engine's sequences lie in, allocated once from a byte budget.

KV blocks of the target, side cars of drafters addressed by the same ids, recurrent states and checkpoints.
A block's bytes are those of all its parts, so a drafter's cache counts in the budget. Also how long a context
that carries, and, for a server, that the memory can really be had before it is promised. Decides sizes, and
nothing about which sequence gets what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Self

from quickdraft.config import Hardware
from quickdraft.engine.dflash_drafter import DFlashMemory
from quickdraft.engine.engine_config import EngineConfig
from quickdraft.engine.mtp_drafter import MTPMemory
from quickdraft.engine.open_drafters import DraftModels
from quickdraft.errors import ConfigError
from quickdraft.models.dflash import DFlashModule
from quickdraft.models.interface import LoadedModel
from quickdraft.ops.interface import BLOCK_TOKENS, KVCache, Ops, RecurrentCache
from quickdraft.state.budget import checkpoint_slots, kv_blocks
from quickdraft.state.draft_rows import BlockMemory, JoinedBlocks, KVBlocks, hidden_bytes
from quickdraft.state.leases import places_for
from quickdraft.state.sequence import blocks_for
from quickdraft.state.slots import SlotPool
from quickdraft.types import MAX_ROWS

# Left free for what grows with use: bodies being read, answers under way, the prefix cache's tree.
SPARE_BYTES: Final = 64 << 20
# Of a card: workspaces, captured graphs and what an allocator cannot hand out (models/card_plan.py).
CARD_SPARE_BYTES: Final = 640 << 20


@dataclass(frozen=True, slots=True)
class Context:
    """How many tokens a request may hold, and what decided that."""

    model_tokens: int  # what the model was made for
    tokens: int  # what is served
    limited_by: str | None = None  # "--context" or "memory"; None: the model
    note: str = ""  # what the user is told

    @classmethod
    def of(cls, asked: int | None, model_tokens: int, memory: Memory) -> Self:
        """ConfigError for an asked context that the blocks do not carry."""
        room, wanted = memory.blocks * BLOCK_TOKENS, asked or model_tokens
        if wanted <= room:
            limited = asked is not None and asked < model_tokens
            return cls(model_tokens, wanted, "--context" if limited else None)
        per_token = memory.storage_bytes / room
        need = f"about {math.ceil(wanted * per_token / 2**20)} MiB of KV memory"
        if asked is not None:
            raise ConfigError(
                "the context that was asked for does not fit into the KV memory",
                got=f"{asked} tokens, which need {need}", expected=f"at most {room} tokens",
                hint="give --kv-memory more, or --context less",
            )  # fmt: skip
        note = f"context lowered from the model's {model_tokens} tokens to {room}: all of it needs {need}"
        return cls(model_tokens, room, "memory", note)


@dataclass(frozen=True, slots=True)
class Memory:
    """`storage` is all that is kept of a block of the pool's, 0 .. blocks - 1."""

    blocks: int
    kv: KVCache
    states: RecurrentCache | None  # as the model's programs use them
    slots: SlotPool | None
    mtp: MTPMemory | None
    side_cars: tuple[DFlashMemory, ...]
    storage: BlockMemory
    note: str = ""  # what the user is told

    @property
    def storage_bytes(self) -> int:
        """Of keys and values, a drafter's included."""
        parts = [self.kv, *(car.kv for car in self.side_cars)]
        return sum(part.blocks * part.bytes_per_block for part in parts)

    def take(self, context: int, sequences: int) -> None:
        """Take from the system, before any request does, what keys and values of one whole context and of a
        draft of every sequence lie in. The rest of the blocks is taken as it is used: all of it at once
        would hold up the start (0.1 s a GiB; ten times that where a hypervisor must find the memory)."""
        first = blocks_for(context) + sequences * blocks_for(MAX_ROWS + 1)
        for kv in (self.kv, *(car.kv for car in self.side_cars)):
            kv.take(first)

    @classmethod
    def allocate(
        cls, config: EngineConfig, loaded: LoadedModel, models: DraftModels, kv_bytes: int, ops: Ops
    ) -> Self:
        """Memory for as many tokens as `kv_bytes` hold, on a card by default for as many as it still holds;
        ConfigError where it cannot be had.

        With config.take_memory what a step of the most rows computes in, and all states, are really taken
        from the system, and keys and values are no more than what is free beside them.
        """
        states, note = _recurrent_cache(config, loaded, models, _machine(ops)), ""
        card = ops.free_memory_bytes()
        if card is not None and config.kv_memory_bytes is None:
            kv_bytes = max(card - CARD_SPARE_BYTES, 0)
        if config.take_memory:
            ops.take_memory()
            asked = config.kv_memory_bytes is not None
            kv_bytes, note = _within_free_memory(kv_bytes, _machine(ops), asked=asked)
        model, dtype = loaded.model, loaded.kv_dtype
        block_bytes = model.config.kv_bytes_per_block(dtype)

        def places(module: DFlashModule, count: int) -> int:
            return places_for(module.config.longest_window, count, config.max_sequences, config.chunk_rows)

        def side_bytes(count: int) -> int:
            return models.side_bytes(dtype, lambda module: places(module, count))

        blocks = kv_blocks(block_bytes, kv_bytes, side_bytes)
        spare = range(blocks, blocks + (config.max_sequences if models.mtp is not None else 0))
        try:
            kv = model.kv_cache(spare.stop, dtype)
            cars = tuple(
                DFlashMemory(module, blocks, places(module, blocks), dtype) for module in models.dflash
            )
        except MemoryError as error:
            raise ConfigError(
                "the KV cache does not fit into memory", got=f"{blocks * BLOCK_TOKENS} tokens",
                hint="give --kv-memory less",
            ) from error  # fmt: skip
        mtp = MTPMemory(models.mtp, kv, states, spare) if models.mtp is not None else None
        kept = mtp.states if mtp is not None else states
        own: BlockMemory = mtp.rows if mtp is not None else KVBlocks(kv)
        storage = JoinedBlocks([own, *(car.rows for car in cars)]) if cars else own
        slots = SlotPool(kept) if kept is not None else None
        return cls(blocks, kv, states, slots, mtp, cars, storage, note)


def _machine(ops: Ops) -> Hardware:
    """What this process may use, by the memory that buffers of `ops` lie in."""
    host, card = Hardware.detect(), ops.free_memory_bytes()
    return host if card is None else replace(host, free_memory_bytes=card)


def _within_free_memory(kv_bytes: int, machine: Hardware, *, asked: bool) -> tuple[int, str]:
    """Bytes for keys and values that can be had now, and what to say of it; ConfigError for more that were
    asked for."""
    room = max(machine.free_memory_bytes - SPARE_BYTES, 0)
    if kv_bytes <= room:
        return kv_bytes, ""
    if asked:
        raise ConfigError(
            "the KV cache does not fit into memory", got=f"{kv_bytes / 2**20:.0f} MiB",
            expected=f"at most {room / 2**20:.0f} MiB, what is free beside the model",
            hint="give --kv-memory less",
        )  # fmt: skip
    wanted, there = kv_bytes / 2**20, room / 2**20
    return room, f"KV memory lowered from {wanted:.0f} MiB to the {there:.0f} MiB that are free"


def _recurrent_cache(
    config: EngineConfig, loaded: LoadedModel, models: DraftModels, machine: Hardware
) -> RecurrentCache | None:
    """A state for every sequence and, with a prefix cache, as many checkpoints as there is memory for."""
    model, state_bytes = loaded.model, loaded.model.config.state_bytes
    if models.mtp is not None and state_bytes:
        state_bytes += hidden_bytes(model.config.width)
    checkpoints = 0
    if state_bytes and config.prefix_cache:
        if config.checkpoint_memory_bytes is not None:
            checkpoints = checkpoint_slots(state_bytes, config.checkpoint_memory_bytes)
        else:
            memory = machine.default_checkpoint_memory_bytes
            checkpoints = checkpoint_slots(state_bytes, max(memory, state_bytes))
    sequences = config.max_sequences
    if config.take_memory and (sequences + checkpoints) * state_bytes > machine.free_memory_bytes:
        raise _no_room_for_states(sequences, checkpoints, state_bytes)
    try:
        return model.recurrent_cache(sequences + checkpoints, sequences, config.pending_rows)
    except MemoryError as error:
        raise _no_room_for_states(sequences, checkpoints, state_bytes) from error


def _no_room_for_states(sequences: int, checkpoints: int, state_bytes: int) -> ConfigError:
    return ConfigError(
        "the recurrent states do not fit into memory",
        got=f"{sequences} for sequences and {checkpoints} checkpoints of {state_bytes} bytes",
        hint="give --checkpoint-memory or --max-sequences less",
    )
