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

from quickdraft.speculate.draft import Verdict
from quickdraft.speculate.priors import (
    LONGEST_MATCH,
    MATCHES,
    POSITIONS,
    Prior,
    Priors,
    SourcePriors,
    context_kind,
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

    def judge(self, kind: int, accepted: bool) -> None:
        """One verdict."""
        own = self._kinds.setdefault(kind, [0.0, 0.0])
        own[not accepted] += self._unit
        self._expected += self._unit * self._priors[kind].odds
        if accepted:
            self._accepted += self._unit
        else:
            self._refused += self._unit

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
    """Tokens of a source, and the kinds of the one at an index: a model's has one without its margin, and
    perhaps one with it."""

    seen: _Seen
    tokens: Sequence[int]
    kinds: Callable[[int], tuple[int, ...]]


class RequestOdds:
    """The odds of one request, and what was proposed for its step under way."""

    def __init__(self, priors: Priors | None = None) -> None:
        self._priors = shipped() if priors is None else priors
        self._sources: dict[str, _Seen] = {}
        self._proposed: list[_Proposal] = []

    def context(self, source: str, match: int, in_output: bool, count: int) -> list[float]:
        """Of the first `count` tokens of a continuation behind `match` tokens in common, each if those before
        it were accepted: it then has that many more in common."""
        seen, odds = self._seen(source, model=False), list[float]()
        while len(odds) < count:
            now = match + len(odds)
            if now >= LONGEST_MATCH:
                left = count - len(odds)
            else:
                left = next(bound for bound in MATCHES if bound > now) - now
            odds += [seen.odds(context_kind(now, in_output))] * min(left, count - len(odds))
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
        seen = self._seen(source, model=False)
        self._proposed.append(
            _Proposal(seen, tokens, lambda index: (context_kind(match + index, in_output),))
        )

    def model_proposed(self, source: str, tokens: Sequence[int], margins: Sequence[float] = ()) -> None:
        """A model's draft; `margins` are empty or one per token."""
        seen = self._seen(source, model=True)

        def kinds(index: int) -> tuple[int, ...]:
            plain = model_kind(index, None, ())
            clear = model_kind(index, margins[index], seen.margins) if margins else plain
            return (plain,) if clear == plain else (plain, clear)

        self._proposed.append(_Proposal(seen, tokens, kinds))

    def observe(self, verdict: Verdict) -> None:
        """Judge what was proposed for a step by what it emitted."""
        for proposal in self._proposed:
            judged = 0
            for token, emitted in zip(proposal.tokens, verdict.tokens, strict=False):
                for kind in proposal.kinds(judged):
                    proposal.seen.judge(kind, token == emitted)
                judged += 1
                if token != emitted:
                    judged += _SURPRISE
                    break
            proposal.seen.fade(judged)
        self._proposed.clear()

    def _seen(self, source: str, *, model: bool) -> _Seen:
        seen = self._sources.get(source)
        if seen is None:
            seen = self._sources[source] = _Seen(self._priors.get(source) or unknown_source(model))
        return seen
