"""Request: one prompt being answered. Implements the walk's protocol (choose, push).

Owns the output ids, why it ended, and its timings. Per pushed token the first of these ends it:
EOS or a stop id, a stop string, max_tokens, the context limit. A stop token counts and is in the
ids, not in the text. Knows nothing of batches, blocks or drafts.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Protocol

from quickdraft.errors import BadParameter, ContextTooLong, RequestError
from quickdraft.speculate.choose import Chooser, LogitsRow
from quickdraft.speculate.constraint import Constraint, ConstraintFailed, Matcher
from quickdraft.state.sequence import SequenceState
from quickdraft.types import CacheReport, FinishReason, SamplingParams, Timings, TokenLogprob


class TextSink(Protocol):
    """Turns emitted tokens into text; looks for stop strings."""

    def push(self, token: int, allow_stop: bool) -> bool:
        """Add one emitted token; True when it completed a stop string."""

    def finish(self) -> None:
        """No more tokens: release what was held back."""

    def take(self) -> str:
        """Text released since the last take."""

    @property
    def stopped_at(self) -> str | None:
        """The stop string that was completed."""


class Request:
    """One prompt, its parameters, and the tokens emitted so far."""

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        eos_ids: Sequence[int] = (),
        text: TextSink | None = None,
        max_context: int,
        marks: Sequence[int] = (),
        prediction: Sequence[int] = (),
        constraint: Constraint | None = None,
        progress: bool = False,
    ) -> None:
        if not prompt_ids:
            raise BadParameter("prompt", got="no tokens", expected="at least one token")
        if len(prompt_ids) >= max_context:
            raise ContextTooLong(len(prompt_ids), max_context)
        self.request_id, self.params, self.text = request_id, params, text
        self.seed = params.seed if params.seed is not None else secrets.randbits(63)
        self.tokens = list(prompt_ids)  # prompt and output; only ever grows
        self.prompt_length = len(prompt_ids)
        self.prediction = tuple(prediction)  # ids that the output is expected to repeat
        # token positions after which a later rendering of this conversation may read differently
        self.marks = tuple(marks)
        assert all(0 <= mark <= len(prompt_ids) for mark in marks), f"marks {marks} outside of the prompt"
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self.constraint_failed = False  # the error is of its constraint
        self.timings = Timings(prompt_tokens=len(prompt_ids))
        self.cache = CacheReport(0)
        self._progress_told = 0 if progress else self.prompt_length  # prompt tokens told as read
        self.state: SequenceState | None = None  # where the engine computes it, once it was added
        self.arrived: float | None = None  # seconds on the engine's clock, once it was added
        room = max_context - len(prompt_ids)
        self.max_output = min(room, params.max_tokens) if params.max_tokens is not None else room
        eos = () if params.ignore_eos else tuple(eos_ids)
        self._stop_ids = frozenset((*eos, *params.stop_token_ids))
        matcher = constraint.start() if constraint is not None else None
        self._chooser = Chooser(params, self.seed, prompt_ids, tuple(self._stop_ids), matcher)
        self._logprobs: list[TokenLogprob] = []
        self._chosen: TokenLogprob | None = None

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def best_only(self) -> bool:
        """Whether the next tokens depend on nothing but the argmax of their rows."""
        return self._chooser.best_only and self.params.logprobs is None

    @property
    def noise(self) -> tuple[float, int] | None:
        """(temperature, seed) that its next rows are drawn with as they stand; None: otherwise."""
        return self._chooser.noise

    @property
    def matcher(self) -> Matcher | None:
        """Where it stands in its constraint; advanced by emitted tokens only."""
        return self._chooser.matcher

    def choose(self, row: LogitsRow) -> int:
        """The next token after everything pushed so far."""
        token = self._chooser.choose(row)
        if self.params.logprobs is not None:
            self._chosen = self._chooser.logprob(row, token)
        return token

    def trial(self) -> Chooser:
        """A chooser for drafts: it chooses as this request would, and leaves the request as it is."""
        return self._chooser.trial()

    def push(self, token: int) -> FinishReason | None:
        """Emit the token; the reason when the request ends with it."""
        self._chooser.push(token)  # which a constraint may refuse: then the token was not emitted
        self.tokens.append(token)
        if self._chosen is not None:
            self._logprobs.append(self._chosen)
        self.finish = self._reason(token)
        if self.finish is not None and self.text is not None:
            self.text.finish()
        return self.finish

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """End the request from outside (abort, failure)."""
        self.finish, self.error = reason, error
        if self.text is not None:
            self.text.finish()

    def fail(self, error: RequestError) -> None:
        """End the request with what went wrong in it."""
        self.constraint_failed = isinstance(error, ConstraintFailed)
        self.end(FinishReason.ERROR, str(error))

    def take_progress(self, read: int) -> int | None:
        """`read`, how many prompt tokens are computed or cached now, where that is news to somebody."""
        if read <= self._progress_told:
            return None
        self._progress_told = read
        return read

    def take_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Logprobs of the tokens emitted since the last take."""
        taken = tuple(self._logprobs)
        self._logprobs.clear()
        return taken

    def _reason(self, token: int) -> FinishReason | None:
        allow_stop = self.output_length >= self.params.min_tokens
        if token in self._stop_ids:
            return FinishReason.STOP
        if self.text is not None and self.text.push(token, allow_stop):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.output_length >= self.max_output else None
