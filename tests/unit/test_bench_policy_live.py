"""`bench auto`: what its windows say, and that a wrong id is no speed."""

from __future__ import annotations

import pytest

from quickdraft.bench.paired import Turn
from quickdraft.bench.policy_live import FAILS, HOLDS, OPEN, _check, _Seen
from quickdraft.errors import EngineError
from quickdraft.types import Timings


@pytest.mark.parametrize(
    ("slower", "noise", "verdict"),
    [(0.5, 0.01, HOLDS), (1.02, 0.001, HOLDS), (1.02, 0.2, OPEN), (1.1, 0.01, FAILS), (1.1, 0.9, OPEN)],
)
def test_the_verdict_is_by_the_interval(slower: float, noise: float, verdict: str) -> None:
    seen = _Seen()
    for index in range(10):
        late = 1.0 + noise * (-1) ** index
        timings = Timings(steps=20, drafted={"lookup": 15}, accepted={"lookup": 12})
        seen.add(32, [Turn(32, 1.0)], [Turn(32, slower * late)], [timings])
    row = seen.row("chat")
    assert row.verdict == verdict and row.ratio == pytest.approx(1 / slower, rel=0.02)
    assert (row.tokens, row.steps, row.drafted, row.rejected) == (320, 200, 150, 30)


def test_other_ids_end_the_run() -> None:
    _check("chat", [(1, 2)], [(1, 2)])
    with pytest.raises(EngineError, match="chat"):
        _check("chat", [(1, 2)], [(1, 3)])
