"""Fusion: one draft from a model's tokens and the context's continuation of the same text.

The two are followed as long as they agree. Where they part there are two branches, of which the one that
gains more is verified; a branch that is not cut by the other's end goes on alone, so what lies beyond the
model's block comes from the context only, and only behind tokens that both gave or the context alone.
A match counts the drafted tokens that agree with it: a weak one that a model confirms becomes a strong one,
as the odds of the context's later tokens are those behind a longer match.
Pure: tokens and odds in, tokens and odds out. As tokens are chosen by the walk, no decision made here can
bias them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fused:
    """`tokens`, of which the first `agreed` both gave; the last `extended` are the context's alone, what
    lies between the model's alone. `odds[i]`: that tokens[i] is accepted if all before it are."""

    tokens: tuple[int, ...]
    odds: tuple[float, ...]
    agreed: int
    extended: int


def join(
    model: Sequence[int],
    context: Sequence[int],
    model_odds: Sequence[float],
    context_odds: Sequence[float],
) -> list[Fused]:
    """The drafts that two make on their common beginning: the model's, and the context's where it goes
    elsewhere or further.

    `model_odds[i]` is for model[i], `context_odds[i]` for context[i], if all tokens before it are accepted.
    """
    agreed = agreement(model, context)
    both = tuple(map(max, model_odds[:agreed], context_odds[:agreed]))
    drafts = [Fused(tuple(model), both + tuple(model_odds[agreed : len(model)]), agreed, 0)]
    if len(context) > agreed:
        beyond = tuple(context_odds[agreed : len(context)])
        drafts.append(Fused((*model[:agreed], *context[agreed:]), both + beyond, agreed, len(beyond)))
    return drafts


def agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens two drafts share."""
    count = min(len(one), len(other))
    if tuple(one[:count]) == tuple(other[:count]):  # the common case, at once
        return count
    count = 0
    for first, second in zip(one, other, strict=False):
        if first != second:
            break
        count += 1
    return count
