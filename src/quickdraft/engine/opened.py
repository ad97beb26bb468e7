"""Opened: a model, its engine and everything around it; `open_model` puts them together from a file.

It owns construction: what memory, kernels, caches and limits there are. The offline API (llm) and
the server (async_engine) drive the same value. Everything that decides tokens lies below.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quickdraft.config import DEFAULT_MODEL, cached_model, parse_kv_dtype
from quickdraft.engine.built import Builder, most_wanted
from quickdraft.engine.draft_sizes import drafter_sizes
from quickdraft.engine.drafters import Drafting
from quickdraft.engine.engine_config import EngineConfig as EngineConfig
from quickdraft.engine.explain import ExplainFile
from quickdraft.engine.grammar import Grammars
from quickdraft.engine.loop import Engine
from quickdraft.engine.measured_costs import curve_file, measured_costs, settle_curve
from quickdraft.engine.memory import Context, Memory
from quickdraft.engine.memory_sizes import most_kv_bytes
from quickdraft.engine.mtp_drafter import SOURCE as MTP
from quickdraft.engine.mtp_opening import explain_vocab
from quickdraft.engine.open_drafters import (
    DraftFolder,
    DraftModels,
    explain_folder,
    find_drafters,
    held_out,
    load_drafters,
    settle_auto,
    taps_for,
)
from quickdraft.engine.request import Request
from quickdraft.engine.runner import ModelRunner
from quickdraft.engine.scheduler import Scheduler
from quickdraft.engine.text_sources import check_prediction, text_sources
from quickdraft.errors import BadParameter, ConfigError, ContextTooLong, UnsupportedError
from quickdraft.models.digest import compatibility_key
from quickdraft.models.interface import LoadedModel
from quickdraft.models.registry import TargetFile, load_model, open_target
from quickdraft.ops.interface import BLOCK_TOKENS, KVDtype, Ops
from quickdraft.ops.select import resolve, select
from quickdraft.speculate.constraint import Constraint
from quickdraft.speculate.cost_curve import KnownCosts, MeasuredCosts, explain_costs
from quickdraft.speculate.costs import ConstantCosts
from quickdraft.speculate.draft import Drafter
from quickdraft.speculate.online_costs import OnlineCosts
from quickdraft.state.blocks import BlockPool
from quickdraft.state.cache import PrefixCache
from quickdraft.state.persist import DiskStore
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.stream import TextStream
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import SamplingParams


@dataclass(slots=True)
class Opened:
    """A model file opened and ready: the engine and everything around it."""

    name: str
    path: Path
    engine: Engine
    runner: ModelRunner
    memory: Memory
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    context: Context
    kv_dtype: KVDtype
    weight_bytes: int
    load_seconds: float  # what opening it took
    notes: tuple[str, ...] = ()  # what loading changed in the model's numbers
    eos_ids: tuple[int, ...] = ()  # that end an answer
    costs: KnownCosts = field(default_factory=ConstantCosts)  # what steps take here, in plain steps
    costs_file: Path | None = None  # where they are remembered
    explain_file: ExplainFile | None = None
    held_out: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # notes of the drafters' folders
    shipped: tuple[str, ...] = ()  # models that came with the package
    compiler: Grammars | None = None  # None: there is no tokenizer
    drafter_bytes: int = 0  # of drafters' weights, draft vocabularies included
    _ids: Iterator[int] = field(default_factory=itertools.count)

    @property
    def max_context_tokens(self) -> int:
        return self.context.tokens

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
            f"draft sources: {', '.join(self.sources)}; auto uses "
            f"{', '.join(self.engine.drafting.auto_sources)}",
            *(
                f"keys and values of {car.source}: {car.kv.blocks * car.kv.bytes_per_block / 2**20:.0f} MiB"
                for car in self.memory.side_cars
            ),
            explain_costs(self.costs),
            *self._explain_states(),
            self._explain_cache(),
        ]

    def _explain_states(self) -> list[str]:
        slots = self.engine.scheduler.slots
        if slots is None:
            return []
        size = slots.storage.bytes_per_slot / 2**20
        kept = f"{slots.checkpoints} checkpoints in {slots.storage.checkpoints_in}"
        checkpoints = f"and {kept}" if slots.checkpoints else "without checkpoints"
        return [
            f"recurrent state: {size:.2f} MiB each, {slots.sequences} for sequences {checkpoints}; "
            f"steps of up to {slots.max_pending + 1} rows"
        ]

    def _explain_cache(self) -> str:
        cache = self.engine.scheduler.cache
        if cache is None:
            return "prefix cache: off"
        if cache.disk is None:
            return "prefix cache: in memory, in blocks no request needs"
        on_disk = cache.disk.counters["bytes_on_disk"]
        return f"prefix cache: in memory and on disk ({on_disk / 2**20:.0f} MiB there)"

    def validate(
        self, prompt_ids: Sequence[int], params: SamplingParams, prediction: Sequence[int] = ()
    ) -> None:
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
        check_prediction(prediction, params.speculation, vocabulary, self.max_context_tokens)
        self.engine.drafting.check(params.speculation)
        if params.stop and self.tokenizer is None:
            raise UnsupportedError(f"model {self.name} has no tokenizer, and stop strings need one")

    def request(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        marks: Sequence[int] = (),
        prediction: Sequence[int] = (),
        constraint: Constraint | None = None,
        progress: bool = False,
    ) -> Request:
        """A validated Request with its text stream. `marks`: positions in the prompt where a later
        rendering of the same conversation may differ; `prediction`: what the answer will repeat;
        `constraint`: what it must obey; `progress`: Outputs also say how far the prompt is read."""
        self.validate(prompt_ids, params, prediction)
        return Request(
            request_id,
            list(prompt_ids),
            params,
            eos_ids=self.eos_ids,
            text=TextStream(self.tokenizer, params.stop) if self.tokenizer else None,
            max_context=self.max_context_tokens,
            marks=marks,
            prediction=prediction,
            progress=progress,
            constraint=constraint,
        )

    @property
    def grammars(self) -> Grammars:
        """Compiles grammars for this model's tokens; UnsupportedError for a model without a tokenizer."""
        if self.compiler is None:
            raise UnsupportedError(f"model {self.name} has no tokenizer, and grammars need one")
        return self.compiler

    def close(self) -> None:
        """Let go of what other processes may want, the cache folder; remember costs that turned out wrong."""
        if self.explain_file is not None:
            self.explain_file.close()
        if isinstance(self.costs, OnlineCosts) and self.costs_file is not None:
            settle_curve(self.costs, self.costs_file)
        cache = self.engine.scheduler.cache
        if cache is not None and cache.disk is not None:
            cache.disk.close()

    def next_id(self) -> str:
        return f"request-{next(self._ids)}"


def open_model(
    model: str | Path = DEFAULT_MODEL, config: EngineConfig | None = None, ops: Ops | None = None
) -> Opened:
    """Open an alias that was pulled, a GGUF file or a model folder, and the drafters for it. `ops`: what
    computes, in place of what the config names.

    Raises ConfigError, ModelFormatError or UnsupportedError.
    """
    started = time.monotonic()
    config = config or EngineConfig()
    name, path = cached_model(model)
    explain = ExplainFile(config.explain_drafts) if config.explain_drafts is not None else None
    backend, backend_note = resolve(config.backend) if ops is None else ("", "")
    ops = ops or select(config.threads, backend)
    target = open_target(path, config.head_bits)
    texts = text_sources(config.lookup_corpus, target.tokenizer)
    folders = find_drafters(config.drafters, target)
    kv_bytes = most_kv_bytes(config, ops)
    loaded, models = _load(config, target, folders, kv_bytes, ops)
    built = Builder(config, target.config.context_length, loaded, models, ops).fitted(kv_bytes)
    memory, runner = built.memory, built.runner
    pool = BlockPool(memory.blocks)
    scheduler = Scheduler(
        pool,
        max_rows=runner.max_rows,
        chunk_rows=config.chunk_rows,
        max_sequences=config.max_sequences,
        max_wanted=runner.max_wanted,
        cache=_prefix_cache(config, loaded, ops, pool, memory, folders) if config.prefix_cache else None,
        slots=memory.slots,
        checkpoint_interval=config.checkpoint_interval,
    )
    if built.mtp is not None:
        scheduler.resume_at = built.mtp.resume_at
    drafters: list[Drafter] = [*texts, *built.drafters]
    costs: KnownCosts = ConstantCosts()
    costs_file = None
    if config.measure_costs:
        files = [path for folder in folders for path in sorted(folder.path.iterdir()) if path.is_file()]
        vocab = [config.draft_vocab] if config.draft_vocab is not None else []
        costs_file = curve_file(loaded, runner, drafters, [*files, *vocab])
        costs = measured_costs(built.scratch, drafters, costs_file)
        if isinstance(costs, MeasuredCosts):
            costs = OnlineCosts(costs, frozen=config.frozen_costs)
            settle_auto(built.drafters, folders, costs)
    shipped = tuple(folder.source for folder in folders if folder.shipped)
    drafting = Drafting(drafters, costs, explain, shipped=shipped)
    engine = Engine(scheduler, runner, drafting, tapped=runner if built.drafters else None)
    tokenizer = Tokenizer(loaded.tokenizer) if loaded.tokenizer else None
    template = ChatTemplate.of(loaded.tokenizer) if loaded.tokenizer else None
    return Opened(
        name, path, engine, runner, memory, tokenizer, template, built.context, loaded.kv_dtype,
        loaded.model.weight_bytes, time.monotonic() - started,
        (*loaded.notes, *map(explain_folder, folders), *explain_vocab(models.mtp),
         *filter(None, (backend_note,)), *built.notes),
        loaded.eos_ids, costs, costs_file, explain, held_out(folders), shipped,
        Grammars(tokenizer, loaded.eos_ids) if tokenizer is not None else None,
        sum(one.resident_bytes for one in drafter_sizes(folders, target)),
    )  # fmt: skip


def _load(
    config: EngineConfig, target: TargetFile, folders: Sequence[DraftFolder], kv_bytes: int, ops: Ops
) -> tuple[LoadedModel, DraftModels]:
    """Weights and buffers of model and drafters; ConfigError where memory does not hold them."""
    wanted = most_wanted(config)
    try:
        loaded = load_model(
            target, ops, max_rows=config.chunk_rows + wanted, max_wanted=wanted,
            max_context=config.max_context, kv_memory_bytes=kv_bytes, taps=taps_for(folders, target),
            kv_dtype=parse_kv_dtype(config.kv_dtype) if config.kv_dtype is not None else None,
            mtp=config.own_mtp, mtp_folder=any(folder.source == MTP for folder in folders),
        )  # fmt: skip
        return loaded, load_drafters(folders, loaded, config.draft_vocab, ops)
    except MemoryError as error:
        raise ConfigError(
            "the weights do not fit into memory", got=f"{target.file.tensor_bytes / 2**20:.0f} MiB",
            hint="take a model with fewer bits, or --drafter none; `inspect` counts what one needs",
        ) from error  # fmt: skip


def _prefix_cache(
    config: EngineConfig, loaded: LoadedModel, ops: Ops, pool: BlockPool, memory: Memory,
    folders: Sequence[DraftFolder],
) -> PrefixCache:  # fmt: skip
    store, slots = None, memory.slots
    if config.cache_dir is not None:
        key = compatibility_key(loaded, ops, memory.kv, [folder.files for folder in folders])
        states = slots.storage if slots is not None else None
        store = DiskStore(config.cache_dir, key, memory.storage, config.cache_bytes, states)
    return PrefixCache(pool, memory.storage.copy_block, store, slots)
