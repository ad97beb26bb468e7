"""Fusion: one draft from a model's tokens and the context's continuation of the same text.

The two are followed as long as they agree. Where they part, the branch that promises more tokens goes on;
a branch that is not cut by the other's end goes on alone, so what lies beyond the model's block comes from
the context only, and only behind tokens that both gave or the context alone. Nothing is filled up.
A match counts the drafted tokens that agree with it: a weak one that a model confirms becomes a strong one.
Pure: tokens and odds in, tokens and odds out. As tokens are chosen by the walk, no decision made here can
bias them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fused:
    """`tokens`, of which the first `agreed` both gave; the last `extended` are the context's alone, what
    lies between the model's alone. `odds[i]`: that tokens[i] is accepted if all before it are."""

    tokens: tuple[int, ...]
    odds: tuple[float, ...]
    agreed: int
    extended: int


def fuse(
    model: Sequence[int],
    context: Sequence[int],
    model_odds: Sequence[float],
    context_odds: Callable[[int], float],
) -> Fused:
    """The better of two drafts, on their common beginning.

    `model_odds[i]` is for model[i]; `context_odds(agreed)` for each token of the context's continuation
    once the model agreed with that many of them.
    """
    agreed = agreement(model, context)
    odds = context_odds(agreed)
    both = tuple(max(context_odds(index), model_odds[index]) for index in range(agreed))
    ahead = tuple(model_odds[agreed : len(model)])
    beyond = (odds,) * (len(context) - agreed)
    if expected(beyond) > expected(ahead):
        return Fused((*model[:agreed], *context[agreed:]), both + beyond, agreed, len(beyond))
    return Fused(tuple(model), both + ahead, agreed, 0)


def agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two drafts share."""
    count = 0
    for first, second in zip(one, other, strict=False):
        if first != second:
            break
        count += 1
    return count


def expected(odds: Sequence[float]) -> float:
    """Tokens of a draft that are accepted on average."""
    total, chance = 0.0, 1.0
    for one in odds:
        chance *= one
        total += chance
    return total
