"""LLM: the offline API, one model in this process and synchronous calls.

It owns the loop that drives an engine to the end of its requests, and the values it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quickdraft.config import (
    DEFAULT_CACHE_BYTES,
    DEFAULT_CHECKPOINT_INTERVAL,
    DEFAULT_MAX_SEQUENCES,
    DEFAULT_MODEL,
)
from quickdraft.engine.grammar import Grammars
from quickdraft.engine.loop import StepEvent
from quickdraft.engine.opened import EngineConfig, Opened, open_model
from quickdraft.engine.request import Request
from quickdraft.errors import EngineError, UnsupportedError
from quickdraft.ops.interface import KVDtype
from quickdraft.speculate.constraint import Constraint
from quickdraft.text.answer_parts import AnswerForm
from quickdraft.text.chat_prompt import ChatPrompt, chat_prompt
from quickdraft.text.formats import Formats
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import (
    Backend,
    CacheReport,
    FinishReason,
    PromptProgress,
    SamplingParams,
    Timings,
    TokenLogprob,
)

GREEDY = SamplingParams(temperature=0.0)
Prompt = str | Sequence[int] | ChatPrompt
Prediction = str | Sequence[int]  # what an answer is expected to repeat


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
    sources: tuple[str, ...] = ()  # where each of `tokens` came from: "model" or a draft source
    progress: PromptProgress | None = None
    stopped_at: str | None = None  # the stop string that ended it
    constraint_failed: bool = False  # the error is of what the request asked its answer to obey


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
        constraint_failed=request.constraint_failed,
        cache=request.cache if event.finish is not None else None,
        sources=event.sources,
        stopped_at=request.text.stopped_at if request.text is not None else None,
        progress=_progress(request, event.read) if event.read is not None else None,
    )


def _progress(request: Request, read: int) -> PromptProgress:
    return PromptProgress(
        request.prompt_length, request.timings.cached_tokens, read, request.timings.prompt_ms
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
        checkpoint_memory_bytes: int | None = None,
        checkpoint_interval: int = DEFAULT_CHECKPOINT_INTERVAL,
        head_bits: int | None = None,
        drafters: Sequence[Path] | None = None,
        draft_vocab: Path | None = None,
        measure_costs: bool = False,
        lookup_corpus: Path | None = None,
        frozen_costs: bool = False,
        explain_drafts: Path | None = None,
        backend: Backend = Backend.AUTO,
    ) -> None:
        config = EngineConfig(
            threads, kv_dtype, kv_memory_bytes, max_sequences, chunk_rows, max_context, prefix_cache,
            cache_dir, cache_bytes, checkpoint_memory_bytes, checkpoint_interval, head_bits,
            tuple(drafters) if drafters is not None else None, draft_vocab, measure_costs,
            lookup_corpus,
            frozen_costs, explain_drafts, backend,
        )  # fmt: skip
        self._opened: Opened | None = open_model(model, config)

    @property
    def opened(self) -> Opened:
        """The model and its engine; EngineError after `close`."""
        if self._opened is None:
            raise EngineError("this LLM is closed", hint="open another one")
        return self._opened

    @property
    def notes(self) -> tuple[str, ...]:
        """What loading changed in the model's numbers, in words."""
        return self.opened.notes

    @property
    def name(self) -> str:
        return self.opened.name

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.opened.tokenizer

    @property
    def grammars(self) -> Grammars:
        """Compiles what answers may be held to; UnsupportedError for a model without a tokenizer."""
        return self.opened.grammars

    @property
    def max_context_tokens(self) -> int:
        return self.opened.max_context_tokens

    @property
    def total_blocks(self) -> int:
        return self.opened.engine.scheduler.pool.count

    @property
    def free_blocks(self) -> int:
        return self.opened.engine.free_blocks

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a raw prompt; ids pass through."""
        if isinstance(prompt, ChatPrompt):
            return prompt.ids
        if not isinstance(prompt, str):
            return list(prompt)
        return self._needed_tokenizer().encode(prompt)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = GREEDY,
        prediction: Prediction | None = None,
        constraint: Constraint | None = None,
    ) -> Iterator[Output]:
        """Yield one Output per step that emitted; closing the iterator aborts the request."""
        request = self._request(prompt, params, prediction, constraint)
        for _, output in self._drive([request]):
            yield output

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams = GREEDY,
        prediction: Prediction | None = None,
        constraint: Constraint | None = None,
    ) -> Completion:
        """Decode one prompt to its end. `prediction`: text or ids that the answer will largely repeat; it
        changes how long that takes and nothing else. `constraint`: what the answer must obey, for example
        `llm.grammars.compile(Kind.REGEX, "[0-9]+", "regex")`."""
        return self.generate_many([(prompt, params)], [prediction], [constraint])[0]

    def generate_many(
        self,
        jobs: Sequence[tuple[Prompt, SamplingParams]],
        predictions: Sequence[Prediction | None] | None = None,
        constraints: Sequence[Constraint | None] | None = None,
    ) -> list[Completion]:
        """Decode several prompts in one continuous batch; completions in the order of the jobs, to which
        `predictions` and `constraints` belong one by one."""
        nothing: list[None] = [None] * len(jobs)
        given = zip(jobs, predictions or nothing, constraints or nothing, strict=True)
        requests = [self._request(*job, prediction, constraint) for job, prediction, constraint in given]
        texts: dict[str, list[str]] = {r.request_id: [] for r in requests}
        logprobs: dict[str, list[TokenLogprob]] = {r.request_id: [] for r in requests}
        for request_id, output in self._drive(requests):
            texts[request_id].append(output.text)
            logprobs[request_id] += output.logprobs
        return [self._completion(r, "".join(texts[r.request_id]), logprobs[r.request_id]) for r in requests]

    def chat(self, messages: Sequence[dict[str, str]], params: SamplingParams = GREEDY) -> Completion:
        """Answer a conversation through the model's own chat template."""
        return self.generate(self.chat_prompt(messages), params)

    def chat_prompt(self, messages: Sequence[dict[str, str]], **variables: Any) -> ChatPrompt:
        """A conversation, ready for the assistant's turn; `variables` are the chat template's."""
        tokenizer, template = self._needed_tokenizer(), self.opened.chat_template
        if template is None:
            raise UnsupportedError(
                f"model {self.opened.name} has no chat template", hint="use generate with a raw prompt"
            )
        return chat_prompt(tokenizer, template, messages, **variables)

    def _needed_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UnsupportedError(
                f"model {self.opened.name} has no tokenizer", hint="give the prompt as token ids"
            )
        return self.tokenizer

    def answer_form(self, prompt: ChatPrompt) -> AnswerForm:
        """How to read the answer to a conversation: whether it begins with reasoning."""
        formats = Formats.of(self.tokenizer, self.opened.chat_template)
        return formats.answer_form(thinking=prompt.thinking)

    def close(self) -> None:
        """Drop the model; afterwards everything but `close` raises EngineError."""
        if self._opened is not None:
            self._opened.close()
        self._opened = None

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        prediction: Prediction | None,
        constraint: Constraint | None = None,
    ) -> Request:
        marks = prompt.marks if isinstance(prompt, ChatPrompt) else ()
        if isinstance(prediction, str):
            tokenizer = self._needed_tokenizer()
            prediction = tokenizer.encode(prediction, special=True, add_bos=False)
        ids = self.encode(prompt)
        return self.opened.request(self.opened.next_id(), ids, params, marks, prediction or (), constraint)

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
