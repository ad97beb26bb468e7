"""The table of priors: how likely drafted tokens were accepted, by kind, over requests of many classes.

A kind of a context source (lookup, prediction, corpus) is the number of tokens that its proposal has in
common with the text, and whether the proposal stands in the prompt or in the output. A kind of a model is
the position in its draft and how clearly it preferred the token. `fit_priors` makes the table from judged
tokens; where they come from is not its business. Beside the odds it keeps a weight: after so many tokens a
request counts more than all others, few where requests differ much.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from quickdraft.errors import ModelFormatError
from quickdraft.speculate.cost_curve import rising

SCHEMA: Final = "quickdraft-priors-1"
FILE: Final = Path(__file__).with_name("priors.json")  # the shipped table
MATCHES: Final = (1, 3, 4, 5, 7, 9, 13, 25, 49)  # tokens in common, from which on a kind begins
LONGEST_MATCH: Final = MATCHES[-1]
POSITIONS: Final = 16  # of a model's draft; later tokens count as the last of these
MARGIN_LEVELS: Final = 4
_LEAST_WEIGHT, _MOST_WEIGHT = 2.0, 6.0
_MOST_OF_ONE: Final = 64.0  # tokens of a kind
_LEAN: Final = 8.0  # tokens for which the neighbouring kind counts
_KIND_OF_MATCH: Final = tuple(max(0, bisect_right(MATCHES, n) - 1) for n in range(LONGEST_MATCH + 1))


@dataclass(frozen=True, slots=True)
class Judged:
    """One drafted token, all before it in its draft having been accepted. `match` counts those before it;
    it is 0 for a model. `margin`: see Draft.scores; None where the drafter gives none."""

    request: str
    source: str
    position: int
    accepted: bool
    match: int = 0
    in_output: bool = False
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Prior:
    """Odds before a request was seen, and the tokens after which the request itself counts more."""

    odds: float
    weight: float


@dataclass(frozen=True, slots=True)
class SourcePriors:
    """One prior per kind; `margins` are the bounds between the levels of a model's margins."""

    kinds: tuple[Prior, ...]
    margins: tuple[float, ...] = ()


Priors = Mapping[str, SourcePriors]  # by source


def context_kind(match: int, in_output: bool) -> int:
    """The kind of a token behind `match` >= 0 tokens in common."""
    return _KIND_OF_MATCH[min(match, LONGEST_MATCH)] + in_output * len(MATCHES)


def context_runs(match: int, in_output: bool, count: int) -> list[tuple[int, int]]:
    """The kinds of `count` tokens behind `match` tokens in common, as (kind, tokens in a row)."""
    runs: list[tuple[int, int]] = []
    origin = in_output * len(MATCHES)
    while count > 0:
        kind = _KIND_OF_MATCH[match] if match < LONGEST_MATCH else len(MATCHES) - 1
        length = min(count, MATCHES[kind + 1] - match) if kind + 1 < len(MATCHES) else count
        runs.append((kind + origin, length))
        match, count = match + length, count - length
    return runs


def model_kind(position: int, margin: float | None, bounds: Sequence[float]) -> int:
    """The kind of a token of a model's draft; level 0 is a margin that is not known."""
    level = 0 if margin is None or not bounds else 1 + bisect_right(bounds, margin)
    return min(position, POSITIONS - 1) * (1 + MARGIN_LEVELS) + level


CONTEXT_KINDS: Final = 2 * len(MATCHES)
MODEL_KINDS: Final = POSITIONS * (1 + MARGIN_LEVELS)
# for sources that the table lacks
_CONTEXT_ODDS: Final = (0.1, 0.35, 0.45, 0.6, 0.7, 0.85, 0.93, 0.97, 0.99)
_MODEL_ODDS: Final = (0.6, 0.3, 0.5, 0.7, 0.9)


@cache
def unknown_source(model: bool) -> SourcePriors:
    """Of a source that no table knows."""
    if model:
        return SourcePriors(tuple(Prior(odds, 4.0) for odds in _MODEL_ODDS) * POSITIONS)
    return SourcePriors(tuple(Prior(odds, 3.0) for odds in _CONTEXT_ODDS) * 2)


def fit_priors(judged: Iterable[Judged], models: Iterable[str]) -> dict[str, SourcePriors]:
    """The table of these tokens; `models` names the sources whose drafts a model makes. Kinds that were
    hardly seen lean on the neighbour before, in match or position."""
    by_source: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        by_source[one.source].append(one)
    table, computed = {}, set(models)
    for source, tokens in sorted(by_source.items()):
        model = source in computed
        margins = _bounds([one.margin for one in tokens if one.margin is not None]) if model else ()
        counts: list[dict[str, list[int]]] = [{} for _ in unknown_source(model).kinds]
        for one in tokens:
            kinds = [context_kind(one.match, one.in_output)]
            if model:
                kinds = [model_kind(one.position, None, ())]
                if one.margin is not None and margins:
                    kinds.append(model_kind(one.position, one.margin, margins))
            for kind in kinds:
                pair = counts[kind].setdefault(one.request, [0, 0])
                pair[not one.accepted] += 1
        before = 1 + MARGIN_LEVELS if model else 1
        fallback = unknown_source(model).kinds
        fitted: list[Prior] = []
        for kind, requests in enumerate(counts):
            leaned = model or kind % len(MATCHES) > 0
            lean = fitted[kind - before] if leaned and kind >= before else fallback[kind]
            fitted.append(_fit(list(requests.values()), lean))
        table[source] = SourcePriors(tuple(fitted if model else _rising(fitted)), margins)
    return table


def _rising(fitted: Sequence[Prior]) -> list[Prior]:
    """A longer match is not less likely to go on: the nearest odds of which that holds, by origin."""
    odds: list[float] = []
    for first in (0, len(MATCHES)):
        odds += rising([prior.odds for prior in fitted[first : first + len(MATCHES)]])
    return [Prior(round(one, 4), prior.weight) for one, prior in zip(odds, fitted, strict=True)]


def _bounds(margins: Sequence[float]) -> tuple[float, ...]:
    """Quartiles, in three digits."""
    ordered = sorted(margins)
    if len(ordered) < 100:
        return ()
    cuts = [ordered[len(ordered) * part // MARGIN_LEVELS] for part in range(1, MARGIN_LEVELS)]
    return tuple(float(f"{cut:.3g}") for cut in cuts)


def _fit(requests: Sequence[Sequence[int]], lean: Prior) -> Prior:
    """Mean odds of the requests' tokens, no request counting for more than _MOST_OF_ONE, and the weight of a
    beta distribution whose variance is that between requests (method of moments); of few requests a small
    one."""
    sizes = [sum(one) for one in requests]
    shares = [min(1.0, _MOST_OF_ONE / size) for size in sizes]
    accepted = sum(one[0] * share for one, share in zip(requests, shares, strict=True))
    seen = sum(size * share for size, share in zip(sizes, shares, strict=True))
    odds = (accepted + _LEAN * lean.odds) / (seen + _LEAN)
    spread = odds * (1.0 - odds)
    most = min(_MOST_WEIGHT, _LEAST_WEIGHT + len(requests))
    pairs = sum(size * (size - 1) for size in sizes)
    if not pairs or not spread:
        return Prior(round(odds, 4), lean.weight)
    # two tokens of one request agree by so much more than two of different requests
    product = sum(
        (one[0] - size * odds) ** 2 - _own(one, odds) for one, size in zip(requests, sizes, strict=True)
    )
    correlation = min(1.0, max(0.0, product / (pairs * spread)))
    weight = 1.0 / correlation - 1.0 if correlation else most
    return Prior(round(odds, 4), round(min(most, max(_LEAST_WEIGHT, weight)), 1))


def _own(one: Sequence[int], odds: float) -> float:
    """The squares in (accepted - n odds) squared: what a token agrees with itself."""
    accepted, refused = one
    return accepted * (1.0 - odds) ** 2 + refused * odds**2


def to_json(priors: Priors) -> dict[str, Any]:
    """The table as a JSON value: per source [odds, weight] of every kind, and the bounds of margins."""
    return {
        "schema": SCHEMA,
        "sources": {
            source: {
                "margins": list(one.margins),
                "kinds": [[prior.odds, prior.weight] for prior in one.kinds],
            }
            for source, one in sorted(priors.items())
        },
    }


def from_json(value: Any) -> dict[str, SourcePriors]:
    """ModelFormatError for anything but what `to_json` writes."""
    try:
        if value["schema"] != SCHEMA:
            raise ValueError(f"schema {value['schema']!r}")
        table = {}
        for source, one in value["sources"].items():
            kinds = tuple(Prior(float(odds), float(weight)) for odds, weight in one["kinds"])
            margins = tuple(map(float, one["margins"]))
            if len(kinds) not in (CONTEXT_KINDS, MODEL_KINDS):
                raise ValueError(f"{len(kinds)} kinds of {source}")
            if not all(0.0 < prior.odds < 1.0 and prior.weight > 0.0 for prior in kinds):
                raise ValueError(f"odds of {source}")
            if list(margins) != sorted(margins) or len(margins) not in (0, MARGIN_LEVELS - 1):
                raise ValueError(f"margins of {source}")
            table[source] = SourcePriors(kinds, margins)
        return table
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelFormatError(
            "the table of priors is damaged", got=str(error)[:200], expected=SCHEMA
        ) from error


@cache
def shipped() -> dict[str, SourcePriors]:
    """The table that comes with quickdraft."""
    return from_json(json.loads(FILE.read_bytes()))


@cache
def shipped_for(models: frozenset[str]) -> dict[str, SourcePriors]:
    """The same, of models only those in `models`: what is known of the shipped drafters says nothing of
    others of their kind."""
    return {
        source: one
        for source, one in shipped().items()
        if len(one.kinds) == CONTEXT_KINDS or source in models
    }
