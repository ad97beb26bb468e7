"""Built: what a loaded model runs in: memory, the runner over it, and the drafters.

On a card it is built, the heaviest steps are run (engine/heaviest.py), and where they run out of memory it is
built again with fewer KV blocks. Knows no request, no scheduler and no prefix cache.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Final

from quickdraft.engine.dflash_drafter import DFlashDrafter
from quickdraft.engine.engine_config import EngineConfig
from quickdraft.engine.heaviest import Heaviest, run_heaviest
from quickdraft.engine.measured_costs import Scratch
from quickdraft.engine.memory import Context, Memory
from quickdraft.engine.mtp_drafter import SOURCE as MTP
from quickdraft.engine.mtp_drafter import MTPDrafter
from quickdraft.engine.open_drafters import DraftModels
from quickdraft.engine.runner import ModelRunner
from quickdraft.errors import ConfigError
from quickdraft.models.interface import LoadedModel
from quickdraft.ops.interface import BLOCK_TOKENS, Ops
from quickdraft.state.sequence import blocks_for
from quickdraft.types import MAX_ROWS

GIVEN_UP: Final = 8  # one part in so many of the KV memory at a time
LEFT_BYTES: Final = 192 << 20  # behind the heaviest steps: for captured graphs of shapes that come later


@dataclass(frozen=True, slots=True)
class Built:
    """`mtp` is among `drafters`, where there is one."""

    memory: Memory
    context: Context
    runner: ModelRunner
    drafters: tuple[MTPDrafter | DFlashDrafter, ...]
    mtp: MTPDrafter | None
    notes: tuple[str, ...] = ()  # what the user is told

    @property
    def scratch(self) -> Scratch:
        return Scratch(self.runner, self.memory.blocks, self.memory.slots, self.context.tokens)


@dataclass(frozen=True, slots=True)
class Builder:
    """`model_tokens`: the context the model was made for."""

    config: EngineConfig
    model_tokens: int
    loaded: LoadedModel
    models: DraftModels
    ops: Ops

    @property
    def max_wanted(self) -> int:
        return most_wanted(self.config)

    def build(self, kv_bytes: int, most_blocks: int | None = None) -> Built:
        """Within `kv_bytes` for keys and values; ConfigError where it cannot be had."""
        config, ops = self.config, self.ops
        memory = Memory.allocate(config, self.loaded, self.models, kv_bytes, ops, most_blocks)
        context = Context.of(config.max_context, self.model_tokens, memory)
        if config.take_memory:
            memory.take(context.tokens, config.max_sequences)
        table_width = -(-context.tokens // BLOCK_TOKENS)
        runner = ModelRunner(
            ops,
            self.loaded.model,
            memory.kv,
            memory.states,
            max_rows=config.chunk_rows + self.max_wanted,
            max_wanted=self.max_wanted,
            max_sequences=config.max_sequences,
            table_width=table_width,
        )
        mtp = None
        if memory.mtp is not None:
            mtp = memory.mtp.drafter(ops, table_width, in_auto=self.models.in_auto(MTP))
        drafters: list[MTPDrafter | DFlashDrafter] = [mtp] if mtp is not None else []
        drafters += [
            car.drafter(ops, table_width, self.models.in_auto(car.source)) for car in memory.side_cars
        ]
        return Built(
            memory, context, runner, tuple(drafters), mtp, tuple(filter(None, (*memory.notes, context.note)))
        )

    def fitted(self, kv_bytes: int) -> Built:
        """The same; on a card whose memory is taken there is room beside it for the heaviest steps, which
        were run."""
        built = self.build(kv_bytes)
        if not self.config.take_memory or self.ops.free_memory_bytes() is None:
            return built
        first = built.context.tokens, built.memory.storage_bytes
        while True:
            try:
                steps = run_heaviest(built.scratch, built.drafters, self.config.max_sequences)
                self._check_left()
                said = (*built.notes, *_lowered(first, built), self._explain(steps))
                return replace(built, notes=said)
            except MemoryError as error:
                fewer = self._fewer(built.memory, error)
            del built  # before another takes its place
            gc.collect()
            built = self.build(kv_bytes, fewer)

    def _check_left(self) -> None:
        """MemoryError where hardly anything is."""
        left = self.ops.free_memory_bytes() or 0
        if left < LEFT_BYTES:
            raise MemoryError(f"{left >> 20} MiB are left, and later steps need {LEFT_BYTES >> 20}")

    def _fewer(self, memory: Memory, error: MemoryError) -> int:
        """Blocks to try next; ConfigError where no fewer will do."""
        config, there = self.config, memory.blocks
        useful = blocks_for(config.chunk_rows) + config.max_sequences * blocks_for(MAX_ROWS + 1)
        least = min(there, max(useful, blocks_for(config.max_context or 0)))
        blocks = max(there - max(there // GIVEN_UP, 1), least)
        if config.kv_memory_bytes is None and blocks < there:
            return blocks
        raise ConfigError(
            "the heaviest steps do not fit into the card's memory",
            got=f"{memory.blocks * BLOCK_TOKENS} tokens of keys and values "
            f"({memory.storage_bytes / 2**20:.0f} MiB) beside them",
            hint="give --max-sequences, --context or --kv-memory less, or no --drafter",
        ) from error

    def _explain(self, steps: Heaviest) -> str:
        left = self.ops.free_memory_bytes() or 0
        return (
            f"heaviest steps run before serving: {steps.count} in {steps.seconds:.1f} s, up to {steps.rows} "
            f"rows; {left / 2**20:.0f} MiB of the card are left"
        )


def most_wanted(config: EngineConfig) -> int:
    """Rows of a step whose logits can be wanted."""
    return max(MAX_ROWS, config.max_sequences * 16)


def _lowered(first: tuple[int, int], built: Built) -> list[str]:
    """What was given up for the heaviest steps, from (tokens of context, bytes of keys and values)."""
    tokens, size = built.context.tokens, built.memory.storage_bytes
    if size == first[1]:
        return []
    context = f"context lowered from {first[0]} to {tokens} tokens: " if tokens < first[0] else ""
    return [
        f"{context}the heaviest steps need more of the card, so KV memory went from "
        f"{first[1] / 2**20:.0f} to {size / 2**20:.0f} MiB"
    ]
