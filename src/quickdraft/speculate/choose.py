"""choose: one token from one row of logits, under one request's sampling parameters.

Processors in their settled order: logit_bias, penalties (presence and frequency over the output,
repetition over prompt and output), masks (the request's constraint, min_tokens), temperature, top_k,
top_p, min_p; then argmax, or the Gumbel choice whose noise depends only on (seed, position, token id).
Where the constraint allows nothing but what min_tokens forbids, the constraint holds.
Which view of the row is read depends on the parameters and the row alone, never on drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import RequestError
from quickdraft.speculate.constraint import Matcher
from quickdraft.types import SamplingParams, TokenLogprob

NEVER = np.float32(-np.inf)
_FIRST_REACH = 256  # ranks read at first when top_k does not say; then times _REACH_GROWTH
_REACH_GROWTH = 8


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
    """The model's logits leave nothing to choose: NaN or infinity, or every token is masked."""


class Chooser:
    """Chooses the tokens of one request; `push` keeps its counts in step with what was emitted."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt: Sequence[int],
        masked_ids: Sequence[int],
        matcher: Matcher | None = None,
    ) -> None:
        """`masked_ids` are forbidden until min_tokens are out; `matcher` stands before the first token."""
        self._params, self._seed, self.matcher = params, seed, matcher
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
        self._cuts = bool(params.top_k or params.top_p < 1.0 or params.min_p > 0.0)

    @property
    def best_only(self) -> bool:
        """Whether `choose` reads nothing but the argmax, from here on."""
        free = self.matcher is None or not self.matcher.active
        return self._params.greedy and not self._processed and not self._masking and free

    @property
    def noise(self) -> tuple[float, int] | None:
        """(temperature, seed) where `choose` asks a row as it stands for its Gumbel choice, for now; None:
        something comes before."""
        if self._params.greedy or self._cuts or self._processed or self._masking:
            return None
        return self._params.temperature, self._seed

    @property
    def _masking(self) -> bool:
        return self._emitted < self._params.min_tokens and len(self._masked) > 0

    def choose(self, row: LogitsRow) -> int:
        """The next token; BrokenLogits when the row holds NaN or leaves nothing to choose."""
        best = row.argmax()
        if best < 0:
            raise BrokenLogits("the model produced logits that are not numbers")
        values = None
        matcher = self.matcher if self.matcher is not None and self.matcher.active else None
        if matcher is not None:
            token = self._allowed_as_it_is(row, best, matcher)
            if token is not None:
                return token
        if self._processed or self._masking or matcher is not None:
            values = self._processed_values(row, matcher, self._masking)
            best = int(values.argmax())
            if values[best] == NEVER and self._masking and matcher is not None:
                # What must be written is at its end: it ends, however few tokens it has.
                values = self._processed_values(row, matcher)
                best = int(values.argmax())
            if values[best] == NEVER:
                raise BrokenLogits("every token is masked")
        if self._params.greedy:
            return best
        if not self._cuts:
            return row.gumbel(self._params.temperature, self._seed, self._position, values=values)
        ids, kept = self._survivors(row, values)
        return row.gumbel(self._params.temperature, self._seed, self._position, values=kept, ids=ids)

    def push(self, token: int) -> None:
        """Count an emitted token; O(1)."""
        self._position += 1
        self._emitted += 1
        if self.matcher is not None:
            self.matcher.push(token)
        if self._processed:
            self._counts[token] = self._counts.get(token, 0) + 1
            self._seen.add(token)

    def trial(self) -> Chooser:
        """A copy to choose a draft with: what is pushed to it changes nothing here."""
        twin = copy(self)
        twin._counts, twin._seen = dict(self._counts), set(self._seen)
        if self.matcher is not None:
            twin.matcher = self.matcher.copy()
        return twin

    def logprob(self, row: LogitsRow, token: int) -> TokenLogprob:
        """Raw log-softmax (float64, before processors) of `token` and of the best alternatives."""
        logits = row.full().astype(np.float64)
        high = float(logits.max())
        if not math.isfinite(high):
            raise BrokenLogits("the model produced infinite logits")
        total = high + math.log(float(np.exp(logits - high).sum()))
        wanted = self._params.logprobs
        ids, values = row.top(wanted) if wanted else ((), ())
        top = tuple((int(i), float(v) - total) for i, v in zip(ids, values, strict=True))
        return TokenLogprob(token, float(logits[token]) - total, top)

    def _allowed_as_it_is(self, row: LogitsRow, best: int, matcher: Matcher) -> int | None:
        """The choice, where nothing but the matcher changes the row and it allows what would be chosen
        without it: a mask cannot make another token the largest then. To ask for one token takes a
        hundredth of a mask's time. None: the mask is needed."""
        if self._processed or self._masking or (self._cuts and not self._params.greedy):
            return None
        if not self._params.greedy:
            best = row.gumbel(self._params.temperature, self._seed, self._position)
        return best if matcher.allows(best) else None

    def _processed_values(
        self, row: LogitsRow, matcher: Matcher | None, masking: bool = False
    ) -> NDArray[np.float32]:
        """A copy of the row after logit_bias, penalties and masks; `masking`: that of min_tokens too."""
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
        if matcher is not None:
            allowed = matcher.allowed()[: len(values)]
            values[: len(allowed)][~allowed] = NEVER
            values[len(allowed) :] = NEVER
        if masking:
            values[self._masked] = NEVER
        return values

    def _survivors(
        self, row: LogitsRow, values: NDArray[np.float32] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(ids, logits) that top_k, top_p and min_p leave.

        The ranking is read from the top only as far as the cuts reach. Whether a rank survives
        depends on the ranks above it and, for top_p, on the sum over what top_k left, so how far was
        read does not show in the result.
        """
        params = self._params
        full, reach = values, params.top_k or _FIRST_REACH
        whole: float | None = None
        while True:
            if values is None and reach <= _FIRST_REACH:
                ids, kept = row.top(reach)
            else:
                full = row.full() if full is None else full
                ids, kept = top_of(full, reach)
            last = len(ids) < reach or reach == params.top_k
            reach = len(ids)
            if not np.isfinite(kept[0]):
                raise BrokenLogits("the model produced infinite logits")
            weights = _weights(kept, kept[0], params.temperature)
            count = reach
            if params.top_p < 1.0:
                if whole is None:
                    left = weights
                    if not params.top_k:
                        full = row.full() if full is None else full
                        left = _weights(full, kept[0], params.temperature)
                    whole = float(left.sum())
                count = int(np.searchsorted(np.cumsum(weights), params.top_p * whole)) + 1
            if params.min_p > 0.0:
                count = min(count, int((weights >= params.min_p).sum()))
            if count < reach or last:
                break
            reach *= _REACH_GROWTH
        count = min(count, int((kept > NEVER).sum()))
        return ids[:count], np.ascontiguousarray(kept[:count])


def top_of(values: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """LogitsRow.top for an array without NaN: the k best (ids, values), best first, ties by lowest id."""
    if k >= len(values):
        ids = np.argsort(-values, kind="stable")
        return ids, values[ids]
    edge = np.partition(values, len(values) - k)[len(values) - k]
    candidates = np.flatnonzero(values >= edge)  # k of them, and those that tie with the last
    ids = candidates[np.argsort(-values[candidates], kind="stable")[:k]]
    return ids, values[ids]


def _weights(values: NDArray[np.float32], best: np.float32, temperature: float) -> NDArray[np.float64]:
    """exp((value - best) / temperature): probabilities up to their sum."""
    weights: NDArray[np.float64] = np.exp((values.astype(np.float64) - float(best)) / temperature)
    return weights
