"""Promise: which of the models that are loaded `auto` may use, by what their makers measured and costs here.

One rule for the engine and the simulator. Whether a request then uses the model is decided token by token, by
its own odds (decide.py). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from quickdraft.speculate.costs import Costs, drafting_cost
from quickdraft.speculate.draft import AUTO_MODELS

# What the counted costs leave out has to be won too: the host's work on a model that follows (150 us a
# step of 3 ms here), and texts unlike the held-out ones.
LEAST: Final = 1.25
NEARLY: Final = 0.98  # of the highest promise


def auto_models(
    sources: Iterable[str], notes: Mapping[str, Sequence[float]], costs: Costs
) -> tuple[str, ...]:
    """Of these models the one that promises most, if that is at least LEAST, and those that promise
    practically as much, between which requests decide: two models follow the text twice and share a credit.
    `notes[source][n - 1]`: tokens per step with drafts of n tokens on held-out texts; where one has none, the
    first of AUTO_MODELS alone."""
    here = list(sources)
    if not all(notes.get(source) for source in here):
        return tuple(name for name in AUTO_MODELS if name in here)[:1]
    gains = {source: promise(source, notes[source], costs) for source in here}
    least = max(LEAST, NEARLY * max(gains.values(), default=0.0))
    return tuple(source for source in here if gains[source] >= least)


def promise(source: str, tokens_per_step: Sequence[float], costs: Costs) -> float:
    """Tokens per plain step's time at the best length near context 0, drafting and following included; 0
    where nothing is noted."""
    steps, upkeep = costs.step_costs(0), costs.upkeep_cost(source)
    return max(
        (
            tokens / (steps[1 + count] + drafting_cost(costs, source, count) + tokens * upkeep)
            for count, tokens in enumerate(tokens_per_step[: len(steps) - 2], 1)
        ),
        default=0.0,
    )
