"""An AsyncEngine of scripted tokens: no model, same rules at the seam. Delays and failures on order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from quickdraft.engine.grammar import Grammars
from quickdraft.engine.memory import Context
from quickdraft.engine.metrics import EngineMetrics
from quickdraft.engine.text_sources import check_prediction
from quickdraft.errors import BadParameter, CapacityError, ContextTooLong, EngineError
from quickdraft.speculate.constraint import Constraint
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.stream import TextStream
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import CacheReport, FinishReason, PromptProgress, SamplingParams, Timings, TokenLogprob
from tests.support.byte_tokenizer import byte_tokenizer_data

Reply = Callable[[Sequence[int]], list[int]]


@dataclass(frozen=True, slots=True)
class FakeOutput:
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    seed: int
    timings: Timings | None = None
    error: str | None = None
    cache: CacheReport | None = None
    sources: tuple[str, ...] = ()
    stopped_at: str | None = None
    progress: PromptProgress | None = None
    constraint_failed: bool = False


@dataclass(slots=True)
class FakeEngine:
    """Answers every request with `reply` (text, or a function of the prompt ids), then EOS."""

    reply: str | Reply = "hello wörld 🎉!"
    tokens_per_step: int = 3
    step_seconds: float = 0.0
    fail_at_step: int | None = None  # the engine dies there
    error_at_step: int | None = None  # the request fails there
    max_context_tokens: int = 512
    name: str = "fake"
    sources: tuple[str, ...] = ("lookup",)
    alive: bool = True
    failure: Exception | None = None
    capacity: int | None = None  # open requests, all together
    counts: EngineMetrics | None = None  # None: those of what runs
    tokenizer: Tokenizer | None = field(default_factory=lambda: Tokenizer(byte_tokenizer_data()))
    chat_template: ChatTemplate | None = field(default_factory=lambda: ChatTemplate.of(byte_tokenizer_data()))
    requests: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    marks: list[tuple[int, ...]] = field(default_factory=list)
    predictions: list[tuple[int, ...]] = field(default_factory=list)
    after: list[str | None] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)

    constraints: list[Constraint | None] = field(default_factory=list)
    _compiler: Grammars | None = None

    @property
    def grammars(self) -> Grammars:
        assert self.tokenizer is not None
        if self._compiler is None or self._compiler.tokenizer is not self.tokenizer:
            self._compiler = Grammars(self.tokenizer, self.tokenizer.eos_ids)
        return self._compiler

    def validate(
        self, prompt_ids: Sequence[int], params: SamplingParams, prediction: Sequence[int] = ()
    ) -> None:
        assert self.tokenizer is not None
        check_prediction(
            prediction, params.speculation, self.tokenizer.vocabulary_size, self.max_context_tokens
        )
        if len(prompt_ids) >= self.max_context_tokens:
            raise ContextTooLong(len(prompt_ids), self.max_context_tokens)
        size = self.tokenizer.vocabulary_size
        if not prompt_ids:
            raise BadParameter("prompt", got="no tokens", expected="at least one token")
        if min(prompt_ids) < 0 or max(prompt_ids) >= size:
            raise BadParameter("prompt", got="a token id out of range", expected=f"0..{size - 1}")
        if any(token >= size for token in (*params.logit_bias, *params.stop_token_ids)):
            raise BadParameter("logit_bias", expected=f"ids in 0..{size - 1}")

    @property
    def context(self) -> Context:
        return Context(2048, self.max_context_tokens, "memory")

    def metrics(self) -> EngineMetrics:
        return self.counts or EngineMetrics(len(self.running), 0, 10, 4, 3)

    def shutdown(self) -> None:
        self.alive = False

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
    ) -> AsyncGenerator[FakeOutput, None]:
        if not self.alive:
            raise EngineError("the engine is not running")
        if self.capacity is not None and len(self.running) >= self.capacity:
            raise CapacityError("the queue is full", got=f"{len(self.running)} open requests")
        self.requests.append((list(prompt_ids), params))
        self.marks.append(marks)
        self.predictions.append(tuple(prediction))
        self.constraints.append(constraint)
        self.after.append(after)
        return self._generate(prompt_ids, params, request_id, progress)

    async def _generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str, progress: bool
    ) -> AsyncGenerator[FakeOutput, None]:
        self.running.add(request_id)
        finished = False
        try:
            for read in range(1, len(prompt_ids) + 1) if progress else ():
                told = PromptProgress(len(prompt_ids), 1, read, 0.5 * read)
                yield FakeOutput("", (), (), None, 7, progress=told)
            async for output in self._steps(list(prompt_ids), params):
                finished = output.finish_reason is not None
                yield output
        finally:
            self.running.discard(request_id)
            if not finished:
                self.aborted.append(request_id)

    async def _steps(self, prompt_ids: list[int], params: SamplingParams) -> AsyncGenerator[FakeOutput, None]:
        assert self.tokenizer is not None
        stream = TextStream(self.tokenizer, params.stop)
        script = [*self._reply_ids(prompt_ids), *self.tokenizer.eos_ids]
        seed = params.seed if params.seed is not None else 7
        limit = min(params.max_tokens or self.max_context_tokens, self.max_context_tokens - len(prompt_ids))
        emitted, step, finish = 0, 0, None
        while finish is None:
            await asyncio.sleep(self.step_seconds)
            if step == self.fail_at_step:
                self.alive, self.failure = False, RuntimeError("a scripted failure")
            if not self.alive:
                raise EngineError(
                    "the engine stopped", got=repr(self.failure) if self.failure else "shutdown"
                )
            if step == self.error_at_step:
                yield FakeOutput("", (), (), FinishReason.ERROR, seed, error="NaN in the logits")
                return
            tokens: list[int] = []
            for token in script[emitted : emitted + self.tokens_per_step]:
                tokens.append(token)
                finish = self._finish(token, emitted + len(tokens), limit, params, stream)
                if finish is not None:
                    stream.finish()
                    break
            emitted, step = emitted + len(tokens), step + 1
            timings = self._timings(len(prompt_ids), emitted, step) if finish else None
            cache = CacheReport(1, 0, "differs", 5, 9) if finish else None
            logprobs = self._logprobs(tokens, params)
            sources = ("lookup",) * (len(tokens) - 1) + ("model",)
            yield FakeOutput(
                stream.take(),
                tuple(tokens),
                logprobs,
                finish,
                seed,
                timings,
                None,
                cache,
                sources,
                stream.stopped_at,
            )

    def _finish(
        self, token: int, count: int, limit: int, params: SamplingParams, stream: TextStream
    ) -> FinishReason | None:
        assert self.tokenizer is not None
        allowed = count >= params.min_tokens
        eos = () if params.ignore_eos else self.tokenizer.eos_ids
        if allowed and token in (*eos, *params.stop_token_ids):
            return FinishReason.STOP
        if stream.push(token, allowed):
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= limit else None

    def _reply_ids(self, prompt_ids: list[int]) -> list[int]:
        assert self.tokenizer is not None
        return self.tokenizer.encode(self.reply) if isinstance(self.reply, str) else self.reply(prompt_ids)

    def _logprobs(self, tokens: Sequence[int], params: SamplingParams) -> tuple[TokenLogprob, ...]:
        if params.logprobs is None:
            return ()
        top = tuple((4 + i, -1.0 - i) for i in range(params.logprobs))
        return tuple(TokenLogprob(token, -0.5, top) for token in tokens)

    def _timings(self, prompt: int, completion: int, steps: int) -> Timings:
        accepted = completion - steps
        return Timings(
            prompt_tokens=prompt,
            cached_tokens=1,
            queue_ms=1.0,
            prompt_ms=2.0,
            completion_tokens=completion,
            decode_ms=4.0,
            steps=steps,
            rows=completion + 1,
            drafted={"lookup": accepted + 1},
            accepted={"lookup": accepted},
        )
