"""Memory: what an engine's sequences lie in, allocated once from a byte budget.

KV blocks of the target, side cars of drafters addressed by the same ids, recurrent states and checkpoints.
A block's bytes are those of all its parts, so a drafter's cache counts in the budget. Decides sizes, and
nothing about which sequence gets what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from quickdraft.config import Hardware
from quickdraft.engine.dflash_drafter import DFlashMemory
from quickdraft.engine.drafters import DEFAULT_MAX_ROWS
from quickdraft.engine.engine_config import EngineConfig
from quickdraft.engine.mtp_drafter import MTPMemory
from quickdraft.engine.open_drafters import DraftModels
from quickdraft.errors import ConfigError
from quickdraft.models.dflash import DFlashModule
from quickdraft.models.interface import LoadedModel
from quickdraft.ops.interface import BLOCK_TOKENS, KVCache, RecurrentCache
from quickdraft.state.budget import checkpoint_slots, kv_blocks
from quickdraft.state.draft_rows import BlockMemory, JoinedBlocks, KVBlocks, hidden_bytes
from quickdraft.state.leases import places_for
from quickdraft.state.slots import SlotPool


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

    @classmethod
    def allocate(cls, config: EngineConfig, loaded: LoadedModel, models: DraftModels, kv_bytes: int) -> Self:
        """Memory for as many tokens as `kv_bytes` hold; ConfigError where it cannot be had."""
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
        states = _recurrent_cache(config, loaded, models)
        mtp = MTPMemory(models.mtp, kv, states, spare) if models.mtp is not None else None
        kept = mtp.states if mtp is not None else states
        own: BlockMemory = mtp.rows if mtp is not None else KVBlocks(kv)
        storage = JoinedBlocks([own, *(car.rows for car in cars)]) if cars else own
        return cls(blocks, kv, states, SlotPool(kept) if kept is not None else None, mtp, cars, storage)


def _recurrent_cache(config: EngineConfig, loaded: LoadedModel, models: DraftModels) -> RecurrentCache | None:
    """A state for every sequence and, with a prefix cache, as many checkpoints as there is memory for."""
    model, state_bytes = loaded.model, loaded.model.config.state_bytes
    if models.mtp is not None and state_bytes:
        state_bytes += hidden_bytes(model.config.width)
    checkpoints = 0
    if state_bytes and config.prefix_cache:
        if config.checkpoint_memory_bytes is not None:
            checkpoints = checkpoint_slots(state_bytes, config.checkpoint_memory_bytes)
        else:
            memory = Hardware.detect().default_checkpoint_memory_bytes
            checkpoints = checkpoint_slots(state_bytes, max(memory, state_bytes))
    sequences = config.max_sequences
    try:
        return model.recurrent_cache(sequences + checkpoints, sequences, DEFAULT_MAX_ROWS - 1)
    except MemoryError as error:
        raise ConfigError(
            "the recurrent states do not fit into memory",
            got=f"{sequences} for sequences and {checkpoints} checkpoints of {state_bytes} bytes",
            hint="give --checkpoint-memory or --max-sequences less",
        ) from error
