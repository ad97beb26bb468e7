"""What one request has seen of its draft sources: how likely the next drafted token is accepted.

The context's odds are kept by the length of the match, a model's by the position in its draft; what was
hardly seen leans on a prior, a model's later positions on the one before. Old verdicts fade. Every source
that proposed is judged by the tokens that came out, also where another's draft was verified. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from quickdraft.speculate.draft import Verdict

MIN_GAIN: Final = 1.05  # expected tokens per plain step's time below which one row is verified
_FORGET_JUDGED, _FORGET = 0.85, 0.97  # how fast old verdicts fade, per step
_PRIORS: Final = ((8, 0.85), (5, 0.6), (0, 0.35))  # (match length from, odds before anything is seen)
_MODEL_PRIOR: Final = 0.85
_PRIOR_WEIGHT: Final = 2.0


@dataclass(slots=True)
class Seen:
    """Verdicts on one class of drafted tokens, old ones counting less."""

    accepted: float = 0.0
    refused: float = 0.0

    def odds(self, prior: float) -> float:
        """Estimate that the next one is accepted, from `prior` and what was seen."""
        seen = self.accepted + self.refused
        return (self.accepted + _PRIOR_WEIGHT * prior) / (seen + _PRIOR_WEIGHT)

    def fade(self, rate: float) -> None:
        self.accepted *= rate
        self.refused *= rate


@dataclass(frozen=True, slots=True)
class _Proposal:
    """Tokens of a source, the class of each, and all classes of that source."""

    tokens: Sequence[int]
    kinds: Sequence[Seen]
    source: Sequence[Seen]


class RequestOdds:
    """The odds of one request, and what was proposed for its step under way."""

    def __init__(self) -> None:
        self._matches = [Seen() for _ in _PRIORS]
        self._models: dict[str, list[Seen]] = {}
        self._proposed: list[_Proposal] = []

    def match(self, length: int) -> float:
        """Of a token of the context's continuation behind a match of so many tokens."""
        kind = _kind(length)
        return self._matches[kind].odds(_PRIORS[kind][1])

    def model(self, source: str, count: int) -> list[float]:
        """Of the first `count` tokens of a model's draft, each if those before it were accepted."""
        odds, value = [], _MODEL_PRIOR
        for seen in self._positions(source, count):
            value = seen.odds(value)
            odds.append(value)
        return odds

    def begin(self) -> None:
        """A step begins: nothing is proposed for it yet."""
        self._proposed.clear()

    def context_proposed(self, tokens: Sequence[int], length: int, agreed: int = 0) -> None:
        """The context's continuation, a model agreeing with the first `agreed` of it."""
        kinds = [self._matches[_kind(length + min(index, agreed))] for index in range(len(tokens))]
        self._proposed.append(_Proposal(tokens, kinds, self._matches))

    def model_proposed(self, source: str, tokens: Sequence[int]) -> None:
        kinds = self._positions(source, len(tokens))
        self._proposed.append(_Proposal(tokens, kinds, self._models[source]))

    def observe(self, verdict: Verdict) -> None:
        """Judge what was proposed for a step by what it emitted; verdicts on a source that is not judged fade
        slowly."""
        judged = self._proposed if verdict.drafted else []
        for source in (self._matches, *self._models.values()):
            rate = _FORGET_JUDGED if any(each.source is source for each in judged) else _FORGET
            for seen in source:
                seen.fade(rate)
        for proposal in judged:
            for token, emitted, kind in zip(proposal.tokens, verdict.tokens, proposal.kinds, strict=False):
                if token != emitted:
                    kind.refused += 1.0
                    break
                kind.accepted += 1.0
        self._proposed.clear()

    def _positions(self, source: str, count: int) -> list[Seen]:
        known = self._models.setdefault(source, [])
        known += [Seen() for _ in range(count - len(known))]
        return known[:count]


def best_length(
    odds: Sequence[float], cost: Callable[[int], float], least: float = MIN_GAIN
) -> tuple[int, float]:
    """(drafted tokens to verify, expected tokens per plain step's time) of the best length of a draft with
    these odds; (0, least) where none gains more than `least`. `cost(n)`: plain steps that drafting and
    verifying n tokens take."""
    best, best_gain = 0, least
    expected, chance = 1.0, 1.0
    for count, one in enumerate(odds, 1):
        chance *= one
        expected += chance
        gain = expected / cost(count)
        if gain > best_gain:
            best, best_gain = count, gain
    return best, best_gain


def _kind(length: int) -> int:
    return next(index for index, (least, _) in enumerate(_PRIORS) if length >= least)
