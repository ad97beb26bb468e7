"""One call while it is answered: `n` Choices per prompt, fed by the engine's Outputs.

It owns collecting and the clock of each choice, the time limit and the closing of what it started.
How an answer looks in JSON is shapes.py; nothing here knows HTTP.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from quickdraft.errors import EngineError
from quickdraft.server.engine import AsyncEngine, Output, Outputs
from quickdraft.server.errors import ApiError
from quickdraft.server.translate import Call
from quickdraft.text.answer_parts import AnswerParser, Content, Part, Reasoning
from quickdraft.text.detokenizer import TokenBytes
from quickdraft.text.origins import Origin, TokenOrigins
from quickdraft.text.reasoning import ReasoningTokens
from quickdraft.text.tool_calls import CallEnd, CallName, CallText
from quickdraft.types import CacheReport, FinishReason, Timings, TokenLogprob


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call of an answer begins: its place among them, and the id it gets."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of call `index`. Joined, those of a complete call are a JSON object; those
    of a call that was cut off, or whose form the model broke, are the beginning of one."""

    index: int
    text: str


AnswerPart = Reasoning | Content | CallBegun | CallArguments


@dataclass(slots=True)
class Choice:
    """One answer while it grows."""

    index: int
    prompt_tokens: int
    parser: AnswerParser
    reasoning: ReasoningTokens | None = None  # counts them; None: reasoning is not told apart
    echo: str = ""
    sample: int = 0  # which of the answers to its prompt it is
    parts: list[AnswerPart] = field(default_factory=list)  # of all Outputs
    news: list[AnswerPart] = field(default_factory=list)  # of the latest one
    calls: int = 0  # that began
    complete_calls: int = 0
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: int = 0
    finish_reason: FinishReason | None = None
    seed: int | None = None
    timings: Timings | None = None
    cache: CacheReport | None = None
    origins: TokenOrigins | None = None  # None: nobody asked
    from_sources: list[Origin] = field(default_factory=list)  # of all Outputs
    new_sources: list[Origin] = field(default_factory=list)  # of the latest one
    stopped_at: str | None = None  # the stop string that ended it
    first_at: float | None = None  # when its first and its latest token came, on the call's clock
    last_at: float | None = None

    def add(self, output: Output, now: float) -> None:
        """Take one Output in; ApiError when the request failed or was aborted by the engine."""
        self.texts.append(output.text)
        parts = self.parser.feed(output.text)
        if output.finish_reason is not None:
            parts += self.parser.finish()
        self.news = [news for part in parts if (news := self._news(part)) is not None]
        self.parts += self.news
        if self.reasoning is not None:
            for token in output.tokens:
                self.reasoning.push(token)
        self.logprobs += output.logprobs
        if self.origins is not None:
            self.new_sources = self.origins.feed(output.tokens, output.sources, output.text)
            self.from_sources += self.new_sources
        self.tokens += len(output.tokens)
        if output.tokens:
            self.first_at = now if self.first_at is None else self.first_at
            self.last_at = now
        self.seed, self.finish_reason = output.seed, output.finish_reason
        self.timings, self.cache, self.stopped_at = output.timings, output.cache, output.stopped_at
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            if output.constraint_failed:
                raise ApiError(f"the answer's form: {output.error}", code="format_failed")
            reason = output.error or f"the engine ended it with '{output.finish_reason}'"
            raise ApiError(f"the request failed: {reason}", status=500, code="request_failed")

    def _news(self, part: Part) -> AnswerPart | None:
        match part:
            case CallName(name):
                self.calls += 1
                return CallBegun(self.calls - 1, f"call_{uuid.uuid4().hex[:24]}", name)
            case CallText(text):
                return CallArguments(self.calls - 1, text)
            case CallEnd():
                self.complete_calls += 1
                return None
            case _:
                return part

    @property
    def called(self) -> bool:
        """It ended in order, after calls that are complete: it waits for their results."""
        complete = 0 < self.calls == self.complete_calls
        return complete and self.finish_reason is FinishReason.STOP

    @property
    def text(self) -> str:
        return self.echo + "".join(self.texts)

    def finished_timings(self) -> Timings:
        if self.timings is None:
            raise EngineError("the engine ended a request without timings")
        return self.timings


# Told of every Output: its choice, and the seconds since the choice's previous one (None: the first).
OnTokens = Callable[[Choice, int, float | None], None]


class Answer:
    """Everything one call starts in the engine: `start`, then `run`. Must be closed; closing aborts
    what still runs.

    `seconds` is the time the call may take in all, counted from `arrived` (both on time.monotonic).
    """

    def __init__(
        self,
        request_id: str,
        call: Call,
        tokenizer: TokenBytes,
        *,
        arrived: float,
        seconds: float | None = None,
        on_tokens: OnTokens = lambda choice, tokens, gap: None,
    ) -> None:
        self.request_id, self.call, self.created = request_id, call, int(time.time())
        self._arrived, self._seconds, self._on_tokens = arrived, seconds, on_tokens
        echo = call.echo or ("",) * len(call.prompts)
        self.choices = [
            self._choice(at * call.n + sample, sample, ids, text, tokenizer)
            for at, (ids, text) in enumerate(zip(call.prompts, echo, strict=True))
            for sample in range(call.n)
        ]
        self._outputs: list[Outputs] = []

    def _choice(
        self, index: int, sample: int, prompt_ids: Sequence[int], echo: str, tokenizer: TokenBytes
    ) -> Choice:
        form = self.call.form
        choice = Choice(index, len(prompt_ids), form.parser(), form.counter(tokenizer), echo, sample)
        choice.origins = TokenOrigins(tokenizer) if self.call.token_sources else None
        return choice

    async def start(self, engine: AsyncEngine) -> None:
        """Queue every choice or none; raises what `engine.generate` raises."""
        try:
            for choice in self.choices:
                first = choice.index - choice.sample
                self._outputs.append(
                    engine.generate(
                        self.call.prompts[choice.index // self.call.n],
                        self.call.params_of(choice.sample),
                        request_id=self._id_of(choice.index),
                        after=self._id_of(first) if choice.sample else None,
                        marks=self.call.marks,
                        prediction=self.call.prediction,
                        progress=self.call.progress,
                        constraint=self.call.constraint,
                    )
                )
        except BaseException:
            await self.aclose()
            raise

    def _id_of(self, index: int) -> str:
        return f"{self.request_id}-{index}" if len(self.choices) > 1 else self.request_id

    async def run(self) -> AsyncGenerator[tuple[Choice, Output], None]:
        """Every Output with its choice, as they come; ApiError, RequestError or EngineError ends it."""
        source = self._one() if len(self._outputs) == 1 else _merged(self._outputs)
        deadline = None
        if self._seconds is not None:
            left = self._arrived + self._seconds - time.monotonic()
            deadline = asyncio.get_running_loop().time() + left
        try:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        index, output = await anext(source)
                except StopAsyncIteration:
                    return
                except TimeoutError as error:
                    raise self._timed_out() from error
                choice, now = self.choices[index], time.monotonic()
                gap = now - choice.last_at if choice.last_at is not None else None
                choice.add(output, now)
                if output.tokens:
                    self._on_tokens(choice, len(output.tokens), gap)
                yield choice, output
        finally:
            await source.aclose()

    async def aclose(self) -> None:
        """Abort what has not ended; closing twice is fine."""
        for outputs in self._outputs:
            await outputs.aclose()

    async def _one(self) -> AsyncGenerator[tuple[int, Output], None]:
        async for output in self._outputs[0]:
            yield 0, output

    def _timed_out(self) -> ApiError:
        tokens = sum(choice.tokens for choice in self.choices)
        return ApiError(
            f"the request took longer than {self._seconds:g} s, the limit of this server; "
            f"{tokens} tokens of the answer were computed",
            status=504,
            code="request_timeout",
        )


async def _merged(sources: Sequence[Outputs]) -> AsyncGenerator[tuple[int, Output], None]:
    """The Outputs of several requests with their index, as they come; the first error ends all."""
    items: asyncio.Queue[tuple[int, Output] | Exception | None] = asyncio.Queue()

    async def pump(index: int, source: Outputs) -> None:
        try:
            async for output in source:
                items.put_nowait((index, output))
            items.put_nowait(None)
        except Exception as error:
            items.put_nowait(error)

    tasks = [asyncio.create_task(pump(*numbered)) for numbered in enumerate(sources)]
    try:
        running = len(tasks)
        while running:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
