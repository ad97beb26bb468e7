"""LLM: the offline API, and `open_model`, which puts an engine together from a file.

It owns construction and the synchronous loop; the same Opened value drives the server through
async_engine. Everything that decides tokens lies below.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quickdraft.config import (
    DEFAULT_CACHE_BYTES,
    DEFAULT_MAX_SEQUENCES,
    DEFAULT_MODEL,
    MAX_SEQUENCES,
    Hardware,
    cached_model,
    check_cache,
    check_range,
    parse_kv_dtype,
)
from quickdraft.engine.drafters import Drafting
from quickdraft.engine.loop import Engine, StepEvent
from quickdraft.engine.request import Request
from quickdraft.engine.runner import ModelRunner
from quickdraft.engine.scheduler import Scheduler
from quickdraft.errors import BadParameter, ConfigError, ContextTooLong, EngineError, UnsupportedError
from quickdraft.models.digest import compatibility_key
from quickdraft.models.interface import LoadedModel, Model
from quickdraft.models.registry import load_model
from quickdraft.ops.interface import BLOCK_TOKENS, KVCache, KVDtype, Ops
from quickdraft.ops.select import select
from quickdraft.speculate.lookup import LookupDrafter
from quickdraft.state.blocks import BlockPool
from quickdraft.state.budget import kv_blocks
from quickdraft.state.cache import PrefixCache
from quickdraft.state.persist import DiskStore
from quickdraft.text.chat_template import ChatTemplate, chat_prompt_ids
from quickdraft.text.stream import TextStream
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import MAX_ROWS, CacheReport, FinishReason, SamplingParams, Timings, TokenLogprob

GREEDY = SamplingParams(temperature=0.0)


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

    def __post_init__(self) -> None:
        check_cache(self.prefix_cache, self.cache_dir)
        check_range("max_sequences", self.max_sequences, 1, MAX_SEQUENCES)
        check_range("chunk_rows", self.chunk_rows, 1, 1 << 16)
        if self.max_context is not None:
            check_range("max_context", self.max_context, 2, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class Output:
    """What one step gave a request; the last one carries finish_reason, timings and cache report."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    seed: int
    timings: Timings | None
    error: str | None = None
    cache: CacheReport | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer. `text` is None for a model file without a tokenizer."""

    ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    seed: int
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None
    cache: CacheReport | None = None

    def to_dict(self) -> dict[str, object]:
        """The JSON shape of `generate --output json`."""
        return {
            "ids": list(self.ids),
            "text": self.text,
            "finish_reason": str(self.finish_reason),
            "seed": self.seed,
            "timings": self.timings.to_dict(),
        }


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
    files: tuple[Path, ...]  # whose bytes determine the numbers
    load_seconds: float  # what opening it took
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
            self.runner.ops.explain(),
            f"KV cache: {kv.blocks * kv.bytes_per_block / 2**20:.0f} MiB ({self.kv_dtype}), "
            f"{kv.blocks * BLOCK_TOKENS} tokens; context {self.max_context_tokens}",
            f"draft sources: {', '.join(self.sources)}",
            self._explain_cache(),
        ]

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
            raise UnsupportedError("stop strings need a tokenizer, and this model file has none")

    def request(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> Request:
        """A validated Request with its text stream."""
        self.validate(prompt_ids, params)
        return Request(
            request_id,
            list(prompt_ids),
            params,
            eos_ids=self.tokenizer.eos_ids if self.tokenizer else (),
            text=TextStream(self.tokenizer, params.stop) if self.tokenizer else None,
            max_context=self.max_context_tokens,
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
    )
    kv_dtype = loaded.kv_dtype
    one = loaded.model.kv_cache(1, kv_dtype).bytes_per_block
    blocks = kv_blocks(one, memory)
    kv = _kv_cache(loaded.model, blocks, kv_dtype)
    max_context = min(loaded.model.config.context_length, blocks * BLOCK_TOKENS)
    runner = ModelRunner(
        ops,
        loaded.model,
        kv,
        max_rows=max_rows,
        max_wanted=wanted,
        max_sequences=config.max_sequences,
        table_width=-(-max_context // BLOCK_TOKENS),
    )
    pool = BlockPool(blocks)
    scheduler = Scheduler(
        pool,
        max_rows=max_rows,
        chunk_rows=config.chunk_rows,
        max_sequences=config.max_sequences,
        max_wanted=wanted,
        cache=_prefix_cache(config, loaded, ops, pool, runner) if config.prefix_cache else None,
    )
    tokenizer = Tokenizer(loaded.tokenizer) if loaded.tokenizer else None
    template = ChatTemplate.of(loaded.tokenizer) if loaded.tokenizer else None
    engine = Engine(scheduler, runner, Drafting([LookupDrafter()]))
    return Opened(
        name, path, engine, runner, tokenizer, template, max_context, kv_dtype,
        loaded.model.weight_bytes, loaded.files, time.monotonic() - started,
    )  # fmt: skip


def _kv_cache(model: Model, blocks: int, kv_dtype: KVDtype) -> KVCache:
    try:
        return model.kv_cache(blocks, kv_dtype)
    except MemoryError as error:
        raise ConfigError(
            "the KV cache does not fit into memory", got=f"{blocks * BLOCK_TOKENS} tokens",
            hint="give --kv-memory less",
        ) from error  # fmt: skip


def _prefix_cache(
    config: EngineConfig, loaded: LoadedModel, ops: Ops, pool: BlockPool, runner: ModelRunner
) -> PrefixCache:
    store = None
    if config.cache_dir is not None:
        key = compatibility_key(loaded, ops, runner.kv)
        store = DiskStore(config.cache_dir, key, runner.kv, config.cache_bytes)
    return PrefixCache(pool, runner.copy_block, store)


def output_of(event: StepEvent) -> Output:
    """The Output of one step of one request; takes the text that became releasable."""
    request = event.request
    text = request.text.take() if request.text is not None else ""
    return Output(
        text=text,
        tokens=event.tokens,
        logprobs=event.logprobs,
        finish_reason=event.finish,
        seed=request.seed,
        timings=request.timings if event.finish is not None else None,
        error=request.error,
        cache=request.cache if event.finish is not None else None,
    )


class LLM:
    """The offline API: one model in this process, synchronous calls.

    >>> llm = LLM("smollm2-135m")
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8)).text
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        threads: int | None = None,
        kv_dtype: KVDtype | None = None,
        kv_memory_bytes: int | None = None,
        max_sequences: int = DEFAULT_MAX_SEQUENCES,
        chunk_rows: int = 256,
        max_context: int | None = None,
        prefix_cache: bool = True,
        cache_dir: Path | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        config = EngineConfig(
            threads, kv_dtype, kv_memory_bytes, max_sequences, chunk_rows, max_context, prefix_cache,
            cache_dir, cache_bytes,
        )  # fmt: skip
        self._opened: Opened | None = open_model(model, config)

    @property
    def opened(self) -> Opened:
        """The model and its engine; EngineError after `close`."""
        if self._opened is None:
            raise EngineError("this LLM is closed", hint="open another one")
        return self._opened

    @property
    def name(self) -> str:
        return self.opened.name

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.opened.tokenizer

    @property
    def max_context_tokens(self) -> int:
        return self.opened.max_context_tokens

    @property
    def total_blocks(self) -> int:
        return self.opened.runner.kv.blocks

    @property
    def free_blocks(self) -> int:
        return self.opened.engine.free_blocks

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a raw prompt; ids pass through."""
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise UnsupportedError("this model file has no tokenizer", hint="give the prompt as token ids")
        return self.tokenizer.encode(prompt)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams = GREEDY) -> Iterator[Output]:
        """Yield one Output per step that emitted; closing the iterator aborts the request."""
        request = self.opened.request(self.opened.next_id(), self.encode(prompt), params)
        for _, output in self._drive([request]):
            yield output

    def generate(self, prompt: str | Sequence[int], params: SamplingParams = GREEDY) -> Completion:
        """Decode one prompt to its end."""
        return self.generate_many([(prompt, params)])[0]

    def generate_many(self, jobs: Sequence[tuple[str | Sequence[int], SamplingParams]]) -> list[Completion]:
        """Decode several prompts in one continuous batch; completions in the order of the jobs."""
        requests = [self.opened.request(self.opened.next_id(), self.encode(p), s) for p, s in jobs]
        texts: dict[str, list[str]] = {r.request_id: [] for r in requests}
        logprobs: dict[str, list[TokenLogprob]] = {r.request_id: [] for r in requests}
        for request_id, output in self._drive(requests):
            texts[request_id].append(output.text)
            logprobs[request_id] += output.logprobs
        return [self._completion(r, "".join(texts[r.request_id]), logprobs[r.request_id]) for r in requests]

    def chat(self, messages: Sequence[dict[str, str]], params: SamplingParams = GREEDY) -> Completion:
        """Answer a conversation through the model's own chat template."""
        return self.generate(self.chat_prompt(messages), params)

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn."""
        if self.tokenizer is None or self.opened.chat_template is None:
            raise UnsupportedError(
                "this model file has no chat template", hint="use generate with a raw prompt"
            )
        return chat_prompt_ids(self.tokenizer, self.opened.chat_template, messages)

    def close(self) -> None:
        """Drop the model; afterwards everything but `close` raises EngineError."""
        if self._opened is not None:
            self._opened.close()
        self._opened = None

    def _drive(self, requests: Sequence[Request]) -> Iterator[tuple[str, Output]]:
        """Run until these requests are done; whatever is left when the caller stops is aborted."""
        engine = self.opened.engine
        running = {request.request_id for request in requests}
        try:
            for request in requests:
                engine.add(request)
            while running:
                for event in engine.step():
                    output = output_of(event)
                    if output.finish_reason is not None:
                        running.discard(event.request.request_id)
                    yield event.request.request_id, output
        finally:
            for request_id in running:
                engine.abort(request_id)
            while not engine.has_work and engine.idle():
                pass

    @staticmethod
    def _completion(request: Request, text: str, logprobs: list[TokenLogprob]) -> Completion:
        assert request.finish is not None, "a completion is made of a finished request"
        return Completion(
            ids=tuple(request.output_ids),
            text=text if request.text is not None else None,
            finish_reason=request.finish,
            seed=request.seed,
            timings=request.timings,
            logprobs=tuple(logprobs),
            error=request.error,
            cache=request.cache,
        )
