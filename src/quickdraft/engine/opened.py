"""Opened: a model, its engine and everything around it; `open_model` puts them together from a file.

It owns construction: what memory, kernels, caches and limits there are. The offline API (llm) and
the server (async_engine) drive the same value. Everything that decides tokens lies below.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quickdraft.config import (
    DEFAULT_CACHE_BYTES,
    DEFAULT_CHECKPOINT_INTERVAL,
    DEFAULT_MAX_SEQUENCES,
    DEFAULT_MODEL,
    MAX_SEQUENCES,
    Hardware,
    cached_model,
    check_cache,
    check_checkpoint_interval,
    check_head_bits,
    check_range,
    parse_kv_dtype,
)
from quickdraft.engine.drafters import DEFAULT_MAX_ROWS, Drafting
from quickdraft.engine.loop import Engine
from quickdraft.engine.measured_costs import Scratch, measured_costs
from quickdraft.engine.mtp_drafter import MTPMemory
from quickdraft.engine.request import Request
from quickdraft.engine.runner import ModelRunner
from quickdraft.engine.scheduler import Scheduler
from quickdraft.errors import BadParameter, ConfigError, ContextTooLong, UnsupportedError
from quickdraft.models.digest import compatibility_key
from quickdraft.models.interface import LoadedModel, Model
from quickdraft.models.registry import load_model
from quickdraft.ops.interface import BLOCK_TOKENS, KVCache, KVDtype, RecurrentCache
from quickdraft.ops.select import select
from quickdraft.speculate.cost_curve import KnownCosts, explain_costs
from quickdraft.speculate.costs import ConstantCosts
from quickdraft.speculate.draft import Drafter
from quickdraft.speculate.lookup import LookupDrafter
from quickdraft.state.blocks import BlockPool
from quickdraft.state.budget import checkpoint_slots, kv_blocks
from quickdraft.state.cache import PrefixCache
from quickdraft.state.draft_rows import hidden_bytes
from quickdraft.state.persist import DiskStore
from quickdraft.state.slots import SlotPool
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.stream import TextStream
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import MAX_ROWS, SamplingParams


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to open a model. None means: decide from the machine."""

    threads: int | None = None
    kv_dtype: KVDtype | None = None
    kv_memory_bytes: int | None = None
    max_sequences: int = DEFAULT_MAX_SEQUENCES
    chunk_rows: int = 256  # prompt rows computed per step
    max_context: int | None = None  # tokens; the model's own limit when that is lower
    prefix_cache: bool = True  # resume from what earlier requests computed
    cache_dir: Path | None = None  # keep the prefix cache on disk too
    cache_bytes: int = DEFAULT_CACHE_BYTES  # of the files in cache_dir, at most
    checkpoint_memory_bytes: int | None = None  # for recurrent states of the prefix cache
    checkpoint_interval: int = DEFAULT_CHECKPOINT_INTERVAL  # tokens between two of them; 0: no fixed distance
    head_bits: int | None = None  # of embedding and head of a folder: see models.loading.folder
    measure_costs: bool = False  # time steps here, or remember it; else a row costs what it usually does

    def __post_init__(self) -> None:
        check_cache(self.prefix_cache, self.cache_dir)
        check_checkpoint_interval(self.checkpoint_interval)
        check_head_bits(self.head_bits)
        check_range("max_sequences", self.max_sequences, 1, MAX_SEQUENCES)
        check_range("chunk_rows", self.chunk_rows, 1, 1 << 16)
        if self.max_context is not None:
            check_range("max_context", self.max_context, 2, 2**31 - 1)


@dataclass(slots=True)
class Opened:
    """A model file opened and ready: the engine and everything around it."""

    name: str
    path: Path
    engine: Engine
    runner: ModelRunner
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    max_context_tokens: int
    kv_dtype: KVDtype
    weight_bytes: int
    load_seconds: float  # what opening it took
    notes: tuple[str, ...] = ()  # what loading changed in the model's numbers
    eos_ids: tuple[int, ...] = ()  # that end an answer
    costs: KnownCosts = field(default_factory=ConstantCosts)  # what steps take here, in plain steps
    _ids: Iterator[int] = field(default_factory=itertools.count)

    @property
    def sources(self) -> tuple[str, ...]:
        """Draft sources requests may name."""
        return self.engine.drafting.sources

    def explain(self) -> list[str]:
        """What runs, line by line, for the start of a server."""
        kv = self.runner.kv
        return [
            f"model {self.name}: {self.path.name}, {self.weight_bytes / 1e6:.1f} MB of weights, "
            f"loaded in {self.load_seconds:.2f} s",
            *self.notes,
            self.runner.ops.explain(),
            f"KV cache: {kv.blocks * kv.bytes_per_block / 2**20:.0f} MiB ({self.kv_dtype}), "
            f"{self.engine.scheduler.pool.count * BLOCK_TOKENS} tokens; context {self.max_context_tokens}",
            f"draft sources: {', '.join(self.sources)}",
            explain_costs(self.costs),
            *self._explain_states(),
            self._explain_cache(),
        ]

    def _explain_states(self) -> list[str]:
        slots = self.engine.scheduler.slots
        if slots is None:
            return []
        size = slots.storage.bytes_per_slot / 2**20
        checkpoints = f"and {slots.checkpoints} checkpoints" if slots.checkpoints else "without checkpoints"
        return [f"recurrent state: {size:.2f} MiB each, {slots.sequences} for sequences {checkpoints}"]

    def _explain_cache(self) -> str:
        cache = self.engine.scheduler.cache
        if cache is None:
            return "prefix cache: off"
        if cache.disk is None:
            return "prefix cache: in memory, in blocks no request needs"
        on_disk = cache.disk.counters["bytes_on_disk"]
        return f"prefix cache: in memory and on disk ({on_disk / 2**20:.0f} MiB there)"

    def validate(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise RequestError or UnsupportedError for what can never be served."""
        vocabulary = self.runner.model.config.vocabulary_size
        if not prompt_ids:
            raise BadParameter("prompt", got="no tokens", expected="at least one token")
        if len(prompt_ids) >= self.max_context_tokens:
            raise ContextTooLong(len(prompt_ids), self.max_context_tokens)
        if min(prompt_ids) < 0 or max(prompt_ids) >= vocabulary:
            raise BadParameter("prompt", got="a token id out of range", expected=f"0..{vocabulary - 1}")
        for field_name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            if any(token >= vocabulary for token in ids):
                raise BadParameter(field_name, got=f"id {max(ids)}", expected=f"ids in 0..{vocabulary - 1}")
        self.engine.drafting.check(params.speculation)
        if params.stop and self.tokenizer is None:
            raise UnsupportedError(f"model {self.name} has no tokenizer, and stop strings need one")

    def request(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, marks: Sequence[int] = ()
    ) -> Request:
        """A validated Request with its text stream. `marks`: positions in the prompt where a later
        rendering of the same conversation may differ."""
        self.validate(prompt_ids, params)
        return Request(
            request_id,
            list(prompt_ids),
            params,
            eos_ids=self.eos_ids,
            text=TextStream(self.tokenizer, params.stop) if self.tokenizer else None,
            max_context=self.max_context_tokens,
            marks=marks,
        )

    def close(self) -> None:
        """Let go of what other processes may want: the cache folder."""
        cache = self.engine.scheduler.cache
        if cache is not None and cache.disk is not None:
            cache.disk.close()

    def next_id(self) -> str:
        return f"request-{next(self._ids)}"


def open_model(model: str | Path = DEFAULT_MODEL, config: EngineConfig | None = None) -> Opened:
    """Open an alias that was pulled, a GGUF file or a model folder.

    Raises ConfigError, ModelFormatError or UnsupportedError.
    """
    started = time.monotonic()
    config = config or EngineConfig()
    name, path = cached_model(model)
    ops = select(config.threads)
    wanted = max(MAX_ROWS, config.max_sequences * 16)
    max_rows = config.chunk_rows + wanted
    memory = config.kv_memory_bytes
    if memory is None:
        memory = Hardware.detect().default_kv_memory_bytes
    loaded = load_model(
        path,
        ops,
        max_rows=max_rows,
        max_wanted=wanted,
        max_context=config.max_context,
        kv_dtype=parse_kv_dtype(config.kv_dtype) if config.kv_dtype is not None else None,
        kv_memory_bytes=memory,
        head_bits=config.head_bits,
        mtp=True,
    )
    kv_dtype = loaded.kv_dtype
    blocks = kv_blocks(loaded.model.config.kv_bytes_per_block(kv_dtype), memory)
    spare = range(blocks, blocks + (config.max_sequences if loaded.mtp is not None else 0))
    kv = _kv_cache(loaded.model, spare.stop, kv_dtype)
    max_context = min(loaded.model.config.context_length, blocks * BLOCK_TOKENS)
    states = _recurrent_cache(config, loaded)
    drafts = None
    if loaded.mtp is not None and states is not None:
        drafts = MTPMemory(loaded.mtp, kv, states, spare)
    kept = drafts.states if drafts is not None else states
    slots = SlotPool(kept) if kept is not None else None
    table_width = -(-max_context // BLOCK_TOKENS)
    runner = ModelRunner(
        ops,
        loaded.model,
        kv,
        states,
        max_rows=max_rows,
        max_wanted=wanted,
        max_sequences=config.max_sequences,
        table_width=table_width,
    )
    pool = BlockPool(blocks)
    scheduler = Scheduler(
        pool,
        max_rows=max_rows,
        chunk_rows=config.chunk_rows,
        max_sequences=config.max_sequences,
        max_wanted=wanted,
        cache=_prefix_cache(config, loaded, runner, pool, slots, drafts) if config.prefix_cache else None,
        slots=slots,
        checkpoint_interval=config.checkpoint_interval,
    )
    tokenizer = Tokenizer(loaded.tokenizer) if loaded.tokenizer else None
    template = ChatTemplate.of(loaded.tokenizer) if loaded.tokenizer else None
    drafters: list[Drafter] = [LookupDrafter()]
    if drafts is not None:
        drafters.append(drafts.drafter(ops, table_width))
    costs: KnownCosts = ConstantCosts()
    if config.measure_costs:
        costs = measured_costs(loaded, Scratch(runner, blocks, slots, max_context), drafters)
    engine = Engine(scheduler, runner, Drafting(drafters, costs), hidden=runner.hidden if drafts else None)
    return Opened(
        name, path, engine, runner, tokenizer, template, max_context, kv_dtype,
        loaded.model.weight_bytes, time.monotonic() - started, loaded.notes, loaded.eos_ids, costs,
    )  # fmt: skip


def _kv_cache(model: Model, blocks: int, kv_dtype: KVDtype) -> KVCache:
    try:
        return model.kv_cache(blocks, kv_dtype)
    except MemoryError as error:
        raise ConfigError(
            "the KV cache does not fit into memory", got=f"{blocks * BLOCK_TOKENS} tokens",
            hint="give --kv-memory less",
        ) from error  # fmt: skip


def _recurrent_cache(config: EngineConfig, loaded: LoadedModel) -> RecurrentCache | None:
    """A state for every sequence and, with a prefix cache, as many checkpoints as there is memory for."""
    model, state_bytes = loaded.model, loaded.model.config.state_bytes
    if loaded.mtp is not None:
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


def _prefix_cache(
    config: EngineConfig,
    loaded: LoadedModel,
    runner: ModelRunner,
    pool: BlockPool,
    slots: SlotPool | None,
    drafts: MTPMemory | None,
) -> PrefixCache:
    store = None
    blocks = drafts.rows if drafts is not None else runner.kv
    if config.cache_dir is not None:
        key = compatibility_key(loaded, runner.ops, runner.kv)
        states = slots.storage if slots is not None else None
        store = DiskStore(config.cache_dir, key, blocks, config.cache_bytes, states)
    copy_block = drafts.rows.copy_block if drafts is not None else runner.copy_block
    return PrefixCache(pool, copy_block, store, slots)
