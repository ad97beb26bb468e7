"""What the server needs of an engine. quickdraft.engine.async_engine.AsyncEngine is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quickdraft.engine.grammar import Grammars
from quickdraft.engine.memory import Context
from quickdraft.engine.metrics import EngineMetrics
from quickdraft.speculate.constraint import Constraint
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import CacheReport, FinishReason, PromptProgress, SamplingParams, Timings, TokenLogprob


class Output(Protocol):
    """What one step gave a request; `text` is releasable as it stands; `sources` says of each token where
    it came from ("model" or a draft source); the last Output carries finish_reason, timings and cache
    report, `error` when finish_reason is ERROR (`constraint_failed`: it is of what the request asked its
    answer to obey), and `stopped_at` when a stop string ended it."""

    @property
    def text(self) -> str: ...
    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]: ...
    @property
    def finish_reason(self) -> FinishReason | None: ...
    @property
    def seed(self) -> int: ...
    @property
    def timings(self) -> Timings | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def constraint_failed(self) -> bool: ...
    @property
    def cache(self) -> CacheReport | None: ...
    @property
    def sources(self) -> tuple[str, ...]: ...
    @property
    def stopped_at(self) -> str | None: ...
    @property
    def progress(self) -> PromptProgress | None: ...


class Outputs(Protocol):
    """The Outputs of one request until one has a finish_reason; closing it earlier aborts the request."""

    def __aiter__(self) -> Outputs: ...
    async def __anext__(self) -> Output: ...
    async def aclose(self) -> None: ...


class AsyncEngine(Protocol):
    """One model, many requests."""

    @property
    def name(self) -> str: ...
    @property
    def max_context_tokens(self) -> int: ...
    @property
    def context(self) -> Context: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def chat_template(self) -> ChatTemplate | None: ...
    @property
    def grammars(self) -> Grammars:
        """Compiles what answers may be held to; UnsupportedError without a tokenizer."""

    @property
    def sources(self) -> tuple[str, ...]: ...
    @property
    def alive(self) -> bool: ...
    @property
    def failure(self) -> Exception | None: ...
    def metrics(self) -> EngineMetrics: ...
    def validate(
        self, prompt_ids: Sequence[int], params: SamplingParams, prediction: Sequence[int] = ()
    ) -> None:
        """Raise what `generate` would raise for this request, before anything is queued."""

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        marks: tuple[int, ...] = (),
        prediction: Sequence[int] = (),
        constraint: Constraint | None = None,
        after: str | None = None,
        progress: bool = False,
    ) -> Outputs:
        """Queue a request; RequestError, CapacityError when the queue is full, EngineError.

        `marks` are positions in the prompt from which a later one may differ; `prediction` is what the
        answer is expected to repeat; `constraint` is what it must obey; `after` is the id of an earlier
        request with the same prompt, which need not be read twice; with `progress` Outputs say how far the
        prompt is read.
        """

    def shutdown(self) -> None:
        """Stop after the current step; open requests get an EngineError."""
