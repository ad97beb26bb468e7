"""`bench decisions`: what deciding a step takes, without a model: odds, choice, shared rows, learning.

Steps of one request and of four that copy with 64 rows, where a decision looks at the most tokens.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from quickdraft.bench.report import check_json_folder
from quickdraft.speculate.cost_curve import MeasuredCosts, StepTimes
from quickdraft.speculate.decide import Decider
from quickdraft.speculate.draft import NOTHING, Draft, Verdict
from quickdraft.speculate.lookup import LookupDrafter
from quickdraft.speculate.policy import Wish, share

SCHEMA: Final = "quickdraft-decisions-1"
PERIOD: Final = 500  # tokens of the text that is copied
ROOM: Final = 63
STEPS, LIMITS = 200, {1: 50.0, 4: 200.0}  # sequences -> microseconds a step should take at most
_CURVE: Final = StepTimes(
    (1, 2, 4, 8, 16), (0, 2048), ((1.0, 1.05, 1.1, 2.0, 3.8), (1.6, 1.9, 2.6, 4.6, 8.8)), {}
)


@dataclass
class _Sequence:
    request_id: str
    tokens: list[int] = field(default_factory=lambda: [*range(PERIOD), *range(20)])
    prompt_length: int = PERIOD + 20
    prediction: tuple[int, ...] = ()
    matcher: None = None


def microseconds(sequences: int, steps: int = STEPS) -> float:
    """Time of the decisions of a step, choices and what is learned from its tokens, that one in ten steps
    stays under: others use the machine too."""
    costs, lookup = MeasuredCosts(_CURVE), LookupDrafter()
    deciders, views = (
        [Decider(costs) for _ in range(sequences)],
        [_Sequence(str(n)) for n in range(sequences)],
    )
    times = []
    for _ in range(steps):
        proposed = [lookup.propose(view, ROOM) for view in views]
        started = time.perf_counter()
        made = [
            decider.decide([draft], {}, len(view.tokens), ROOM, _no_model)
            for decider, draft, view in zip(deciders, proposed, views, strict=True)
        ]
        counts = share([Wish(one.odds, one.context) for one in made], costs, ROOM)
        spent = time.perf_counter() - started
        for decider, view, count in zip(deciders, views, counts, strict=True):
            verdict = Verdict(tuple((view.tokens[-1] + 1 + at) % PERIOD for at in range(count + 1)), count)
            started = time.perf_counter()
            decider.observe(verdict)
            spent += time.perf_counter() - started
            view.tokens += verdict.tokens
        times.append(spent)
    return 1e6 * statistics.quantiles(times, n=10)[0]


def _no_model(source: str, count: int) -> Draft:
    return NOTHING


def run(json_path: Path | None = None) -> dict[int, float]:
    """Print, and write `json_path` if given: microseconds by sequences."""
    check_json_folder(json_path)
    found = {sequences: microseconds(sequences) for sequences in LIMITS}
    for sequences, taken in found.items():
        print(f"{sequences} at a time: {taken:.0f} us a step (at most {LIMITS[sequences]:.0f} are wanted)")
    if json_path is not None:
        rows = [{"sequences": number, "microseconds": taken} for number, taken in found.items()]
        json_path.write_text(json.dumps({"schema": SCHEMA, "rows": rows}) + "\n", encoding="utf-8")
    return found
