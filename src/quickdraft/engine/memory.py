"""Memory: what an engine's sequences lie in, allocated once from a byte budget.

KV blocks of the target, side cars of drafters addressed by the same ids, recurrent states and checkpoints.
A block's bytes are those of all its parts, so a drafter's cache counts in the budget. Also how long a context
that carries, and, for a server, that the memory can really be had before it is promised. Decides sizes, and
nothing about which sequence gets what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Self

from quickdraft.engine.dflash_drafter import DFlashMemory
from quickdraft.engine.engine_config import EngineConfig
from quickdraft.engine.memory_sizes import (
    Machine,
    card_spare_bytes,
    checkpoints,
    pending_rows,
    useful_blocks,
)
from quickdraft.engine.mtp_drafter import MTPMemory
from quickdraft.engine.open_drafters import DraftModels
from quickdraft.errors import ConfigError
from quickdraft.models.dflash import DFlashModule
from quickdraft.models.interface import LoadedModel
from quickdraft.ops.interface import BLOCK_TOKENS, KVCache, Ops, RecurrentCache
from quickdraft.state.budget import kv_blocks
from quickdraft.state.draft_rows import BlockMemory, JoinedBlocks, KVBlocks, hidden_bytes
from quickdraft.state.leases import places_for
from quickdraft.state.sequence import blocks_for
from quickdraft.state.slots import SlotPool
from quickdraft.types import MAX_ROWS

# Left free for what grows with use: bodies being read, answers under way, the prefix cache's tree.
SPARE_BYTES: Final = 64 << 20


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
    notes: tuple[str, ...] = ()  # what the user is told

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
        cls, config: EngineConfig, loaded: LoadedModel, models: DraftModels, kv_bytes: int, ops: Ops,
        most_blocks: int | None = None,
    ) -> Self:  # fmt: skip
        """Memory for as many tokens as `kv_bytes` hold, on a card for no more than it still holds and can be
        used, and for at most `most_blocks` blocks; ConfigError where it cannot be had.

        With config.take_memory what a step of the most rows computes in, and all states, are really taken
        from the system, and keys and values are no more than what is free beside them.
        """
        states, notes = _recurrent_cache(config, loaded, models, Machine.of(ops)), list[str]()
        model, dtype, sizes = loaded.model, loaded.kv_dtype, _BlockBytes(config, loaded, models)
        machine = Machine.of(ops)
        if machine.card and config.kv_memory_bytes is None:
            share, said = _card_share(config, sizes, machine.free_bytes)
            kv_bytes = min(kv_bytes, share)
            notes += said
        if config.take_memory:
            ops.take_memory()
            asked = config.kv_memory_bytes is not None
            kv_bytes, lowered = _within_free_memory(kv_bytes, Machine.of(ops).free_bytes, asked=asked)
            notes += lowered
        blocks = kv_blocks(sizes.own, kv_bytes, sizes.beside)
        blocks = min(blocks, most_blocks or blocks)
        spare = range(blocks, blocks + (config.max_sequences if models.mtp is not None else 0))
        try:
            kv = model.kv_cache(spare.stop, dtype)
            cars = tuple(
                DFlashMemory(module, blocks, sizes.places(module, blocks), dtype) for module in models.dflash
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
        return cls(blocks, kv, states, slots, mtp, cars, storage, tuple(notes))


@dataclass(frozen=True, slots=True)
class _BlockBytes:
    """Bytes of blocks and of what drafters keep beside them."""

    config: EngineConfig
    loaded: LoadedModel
    models: DraftModels

    @property
    def own(self) -> int:
        return self.loaded.model.config.kv_bytes_per_block(self.loaded.kv_dtype)

    def places(self, module: DFlashModule, blocks: int) -> int:
        config = self.config
        return places_for(module.config.longest_window, blocks, config.max_sequences, config.chunk_rows)

    def beside(self, blocks: int) -> int:
        return self.models.side_bytes(self.loaded.kv_dtype, lambda module: self.places(module, blocks))

    def of(self, blocks: int) -> int:
        """All bytes of so many."""
        return blocks * self.own + self.beside(blocks)


def _card_share(config: EngineConfig, sizes: _BlockBytes, free_bytes: int) -> tuple[int, list[str]]:
    """Bytes for keys and values on a card: what it has left, or what can be used, and then what to say."""
    left = max(free_bytes - card_spare_bytes(config.max_sequences), 0)
    useful = sizes.of(useful_blocks(config, sizes.loaded.model.config.context_length))
    if left <= useful:
        return left, []
    return useful, [
        f"KV memory: {useful / 2**20:.0f} MiB of the {left / 2**20:.0f} MiB that the card has left, as "
        f"{config.max_sequences} sequences and the prefix cache can use no more"
    ]


def _within_free_memory(kv_bytes: int, free_bytes: int, *, asked: bool) -> tuple[int, list[str]]:
    """Bytes for keys and values that can be had now, and what to say of it; ConfigError for more that were
    asked for."""
    room = max(free_bytes - SPARE_BYTES, 0)
    if kv_bytes <= room:
        return kv_bytes, []
    if asked:
        raise ConfigError(
            "the KV cache does not fit into memory", got=f"{kv_bytes / 2**20:.0f} MiB",
            expected=f"at most {room / 2**20:.0f} MiB, what is free beside the model",
            hint="give --kv-memory less",
        )  # fmt: skip
    wanted, there = kv_bytes / 2**20, room / 2**20
    return room, [f"KV memory lowered from {wanted:.0f} MiB to the {there:.0f} MiB that are free"]


def _recurrent_cache(
    config: EngineConfig, loaded: LoadedModel, models: DraftModels, machine: Machine
) -> RecurrentCache | None:
    """A state for every sequence and, with a prefix cache, as many checkpoints as there is memory for."""
    model, state_bytes = loaded.model, loaded.model.config.state_bytes
    if models.mtp is not None and state_bytes:
        state_bytes += hidden_bytes(model.config.width)
    sequences, kept = config.max_sequences, checkpoints(config, state_bytes, machine)
    no_room = _no_room_for_states(sequences, kept, state_bytes)
    if config.take_memory:
        states, spilled = sequences * state_bytes, kept * state_bytes
        room, host = machine.free_bytes, machine.host.free_memory_bytes
        if max(states - room, spilled - host) > 0 if machine.card else states + spilled > room:
            raise no_room
    try:
        rows = pending_rows(config, model.config, machine)
        return model.recurrent_cache(sequences + kept, sequences, rows)
    except MemoryError as error:
        raise no_room from error


def _no_room_for_states(sequences: int, kept: int, state_bytes: int) -> ConfigError:
    return ConfigError(
        "the recurrent states do not fit into memory",
        got=f"{sequences} for sequences and {kept} checkpoints of {state_bytes} bytes",
        hint="give --checkpoint-memory or --max-sequences less",
    )
