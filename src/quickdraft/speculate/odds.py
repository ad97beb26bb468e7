"""What one request has seen of its draft sources: how likely the next drafted token is accepted.

Kinds of drafted tokens start from a prior (speculate/priors.py), moved by how the source fares in this
request as a whole, and learn from their own verdicts; old ones fade. Every source that proposed is judged by
the tokens that came out, also where nothing of it was verified: so a source that reads the context is known
without a row spent on it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from quickdraft.speculate.constraint import FORCED
from quickdraft.speculate.draft import Verdict
from quickdraft.speculate.fusion import agreement
from quickdraft.speculate.priors import (
    POSITIONS,
    Prior,
    Priors,
    SourcePriors,
    context_runs,
    model_kind,
    shipped,
    unknown_source,
)

_FORGET: Final = 0.95  # how fast old verdicts fade, per judged token
_MOST_FORGOTTEN: Final = 6  # tokens of one step that count for that
_SURPRISE: Final = 2  # tokens more that a refusal counts for that: a text that changes is noticed soon
_LEAN: Final = 2.0  # tokens of a source after which the request moves its priors
_LARGEST: Final = 1e12
_MOST, _LEAST = 0.9995, 0.0005


class _Seen:
    """Verdicts on the tokens of one source. Instead of old ones counting less, new ones count more:
    `_unit` is what one counts now."""

    __slots__ = ("_accepted", "_expected", "_kinds", "_priors", "_refused", "_unit", "margins")

    def __init__(self, priors: SourcePriors) -> None:
        self._priors: Sequence[Prior] = priors.kinds
        self.margins = priors.margins
        self._kinds: dict[int, list[float]] = {}  # [accepted, refused]
        self._accepted = self._refused = self._expected = 0.0
        self._unit = 1.0

    def odds(self, kind: int) -> float:
        """That a token of this kind is accepted."""
        prior = self._priors[kind]
        odds, weight, unit = prior.odds, prior.weight, self._unit
        seen = self._accepted + self._refused
        if seen:  # how much likelier than expected were tokens of the source, all kinds together
            lean = _LEAN * unit
            up = (self._accepted + lean) / (self._expected + lean)
            down = (self._refused + lean) / (seen - self._expected + lean)
            odds = odds * up / (odds * up + (1.0 - odds) * down)
        own = self._kinds.get(kind)
        if own is not None:
            weight *= unit
            odds = (own[0] + weight * odds) / (own[0] + own[1] + weight)
        return min(_MOST, max(_LEAST, odds))

    def judge(self, kind: int, accepted: int, refused: int) -> None:
        """So many verdicts on tokens of one kind."""
        own = self._kinds.setdefault(kind, [0.0, 0.0])
        unit = self._unit
        own[0] += accepted * unit
        own[1] += refused * unit
        self._accepted += accepted * unit
        self._refused += refused * unit
        self._expected += (accepted + refused) * unit * self._priors[kind].odds

    def fade(self, judged: int) -> None:
        """A step judged so many tokens."""
        self._unit /= _FORGET ** min(judged, _MOST_FORGOTTEN)
        if self._unit > _LARGEST:
            self._accepted, self._refused = self._accepted / self._unit, self._refused / self._unit
            self._expected /= self._unit
            self._kinds = {kind: [one / self._unit for one in both] for kind, both in self._kinds.items()}
            self._unit = 1.0


@dataclass(frozen=True, slots=True)
class _Proposal:
    """Tokens of a source; `runs(n)`: the kinds of the first n, as (kind, tokens in a row), in order. A
    model's token has one kind without its margin, and perhaps one with it: these are runs of their own."""

    seen: _Seen
    tokens: Sequence[int]
    runs: Callable[[int], list[list[tuple[int, int]]]]


class RequestOdds:
    """The odds of one request, and what was proposed for its step under way."""

    def __init__(self, priors: Priors | None = None) -> None:
        self._priors = shipped() if priors is None else priors
        self._sources: dict[str, _Seen] = {}
        self._proposed: list[_Proposal] = []

    def context(self, source: str, match: int, in_output: bool, count: int) -> list[float]:
        """Of the first `count` tokens of a continuation behind `match` tokens in common, each if those before
        it were accepted: it then has that many more in common."""
        if source == FORCED:
            return [1.0] * count
        seen, odds = self._seen(source, model=False), list[float]()
        for kind, length in context_runs(match, in_output, count):
            odds += [seen.odds(kind)] * length
        return odds

    def model(self, source: str, count: int, margins: Sequence[float] = ()) -> list[float]:
        """Of the first `count` tokens of a model's draft, each if those before it were accepted; before it
        runs, without its margins."""
        seen = self._seen(source, model=True)
        if not margins:
            odds = [seen.odds(model_kind(index, None, ())) for index in range(min(count, POSITIONS))]
            return odds + odds[-1:] * (count - len(odds))
        return [
            seen.odds(model_kind(index, margin, seen.margins)) for index, margin in enumerate(margins[:count])
        ]

    def begin(self) -> None:
        """A step begins: nothing is proposed for it yet."""
        self._proposed.clear()

    def context_proposed(self, source: str, tokens: Sequence[int], match: int, in_output: bool) -> None:
        """A continuation behind `match` tokens in common."""
        if source == FORCED:  # nothing is to be learned
            return
        seen = self._seen(source, model=False)
        self._proposed.append(_Proposal(seen, tokens, lambda count: [context_runs(match, in_output, count)]))

    def model_proposed(self, source: str, tokens: Sequence[int], margins: Sequence[float] = ()) -> None:
        """A model's draft; `margins` are empty or one per token."""
        seen = self._seen(source, model=True)

        def runs(count: int) -> list[list[tuple[int, int]]]:
            plain = [(model_kind(index, None, ()), 1) for index in range(count)]
            if not margins or not seen.margins:
                return [plain]
            return [plain, [(model_kind(index, margins[index], seen.margins), 1) for index in range(count)]]

        self._proposed.append(_Proposal(seen, tokens, runs))

    def observe(self, verdict: Verdict) -> None:
        """Judge what was proposed for a step by what it emitted."""
        for proposal in self._proposed:
            judged = min(len(proposal.tokens), len(verdict.tokens))
            right = agreement(proposal.tokens, verdict.tokens)
            refused = right < judged
            for runs in proposal.runs(right + refused):
                for index, (kind, length) in enumerate(runs, 1):
                    wrong = refused and index == len(runs)
                    proposal.seen.judge(kind, length - wrong, int(wrong))
            proposal.seen.fade(right + (1 + _SURPRISE if refused else 0))
        self._proposed.clear()

    def _seen(self, source: str, *, model: bool) -> _Seen:
        seen = self._sources.get(source)
        if seen is None:
            seen = self._sources[source] = _Seen(self._priors.get(source) or unknown_source(model))
        return seen
