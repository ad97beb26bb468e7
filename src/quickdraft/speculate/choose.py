"""choose: one token from one row of logits, under one request's sampling parameters.

Processors in their settled order: logit_bias, penalties (presence and frequency over the output,
repetition over prompt and output), masks (min_tokens), temperature, top_k, top_p, min_p; then
argmax, or the Gumbel choice whose noise depends only on (seed, position, token id). Which view of
the row is read depends on the parameters alone, never on drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import RequestError
from quickdraft.types import SamplingParams, TokenLogprob

NEVER = np.float32(-np.inf)


class LogitsRow(Protocol):
    """One row of logits [V], read lazily: a greedy request never touches the whole row."""

    def argmax(self) -> int:
        """Lowest id of the largest logit; -1 when the row holds NaN."""

    def top(self, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The k best (ids, logits), best first, ties by lowest id."""

    def full(self) -> NDArray[np.float32]:
        """The whole row, read-only; valid until the next step."""

    def gumbel(
        self,
        temperature: float,
        seed: int,
        position: int,
        values: NDArray[np.float32] | None = None,
        ids: NDArray[np.int64] | None = None,
    ) -> int:
        """Ops.gumbel_choice over `values` (processed logits, or survivors named by `ids`), or over
        this row as it stands."""


class BrokenLogits(RequestError):
    """The model produced NaN, or nothing that may be chosen."""


class Chooser:
    """Chooses the tokens of one request; `push` keeps its counts in step with what was emitted."""

    def __init__(
        self, params: SamplingParams, seed: int, prompt: Sequence[int], masked_ids: Sequence[int]
    ) -> None:
        self._params, self._seed = params, seed
        self._position = len(prompt)
        self._emitted = 0
        self._masked = np.array(sorted(set(masked_ids)), np.int64)  # until min_tokens are out
        self._counts: dict[int, int] = {}
        self._seen = set(prompt) if params.repetition_penalty != 1.0 else set()
        self._processed = bool(
            params.logit_bias
            or params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1.0
        )

    def choose(self, row: LogitsRow) -> int:
        """The next token; BrokenLogits when the row holds NaN."""
        if row.argmax() < 0:
            raise BrokenLogits("the model produced logits that are not numbers")
        masking = self._emitted < self._params.min_tokens and len(self._masked) > 0
        values = self._apply(row, masking) if self._processed or masking else None
        if self._params.greedy:
            return row.argmax() if values is None else int(values.argmax())
        return self._sample(row, values)

    def push(self, token: int) -> None:
        """Count an emitted token."""
        self._position += 1
        self._emitted += 1
        if self._processed:
            self._counts[token] = self._counts.get(token, 0) + 1
            self._seen.add(token)

    def logprob(self, row: LogitsRow, token: int) -> TokenLogprob:
        """Raw log-softmax of `token` and of the best alternatives the request wants."""
        logits = row.full().astype(np.float64)
        high = logits.max()
        total = high + np.log(np.exp(logits - high).sum())
        ids, values = row.top(self._params.logprobs or 1)
        top = tuple((int(i), float(v) - float(total)) for i, v in zip(ids, values, strict=True))
        return TokenLogprob(token, float(logits[token] - total), top if self._params.logprobs else ())

    def _apply(self, row: LogitsRow, masking: bool) -> NDArray[np.float32]:
        params, values = self._params, row.full().copy()
        for token, bias in params.logit_bias.items():
            values[token] += np.float32(bias)
        if self._counts and (params.presence_penalty or params.frequency_penalty):
            ids = np.fromiter(self._counts, np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float64, len(self._counts))
            penalty = params.presence_penalty + params.frequency_penalty * counts
            values[ids] = (values[ids] - penalty).astype(np.float32)
        if params.repetition_penalty != 1.0 and self._seen:
            ids = np.fromiter(self._seen, np.int64, len(self._seen))
            old = values[ids].astype(np.float64)
            rate = params.repetition_penalty
            values[ids] = np.where(old > 0, old / rate, old * rate).astype(np.float32)
        if masking:
            values[self._masked] = NEVER
        return values

    def _sample(self, row: LogitsRow, values: NDArray[np.float32] | None) -> int:
        params = self._params
        if not params.top_k and params.top_p == 1.0 and params.min_p == 0.0:
            return row.gumbel(params.temperature, self._seed, self._position, values=values)
        ids, kept = self._survivors(row, values)
        return row.gumbel(params.temperature, self._seed, self._position, values=kept, ids=ids)

    def _survivors(
        self, row: LogitsRow, values: NDArray[np.float32] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(ids, logits) that top_k, top_p and min_p leave, best first."""
        params = self._params
        if values is None and params.top_k:
            ids, kept = row.top(params.top_k)
        else:
            full = row.full() if values is None else values
            order = np.argsort(-full, kind="stable")[: params.top_k or None].astype(np.int64)
            ids, kept = order, full[order]
        scaled = kept.astype(np.float64) / params.temperature
        weights = np.exp(scaled - scaled[0])
        count = len(ids)
        if params.top_p < 1.0:
            cumulative = np.cumsum(weights)
            count = int(np.searchsorted(cumulative, params.top_p * cumulative[-1], side="left")) + 1
        if params.min_p > 0.0:
            count = min(count, int((weights >= params.min_p).sum()))
        count = max(1, min(count, int((kept > NEVER).sum())))
        return ids[:count], np.ascontiguousarray(kept[:count])
