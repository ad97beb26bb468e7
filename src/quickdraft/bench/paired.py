"""Paired statistics of two arms that emitted the same tokens: times per window, speed ratio, interval.

Pure arithmetic on (tokens, seconds); knows nothing of engines or clocks.

The ratio is plain's time over the stage's time for the same tokens (the speed a user sees), not a mean
of window ratios: a stage is often four times faster in one window and no faster in the next. Its interval
is the classical one of a ratio estimator (Cochran, Sampling Techniques, ch. 6: residuals plain_k - R *
stage_k), on the log scale, with Student's t. With the 8 to 16 windows of a workload a percentile
bootstrap is too narrow (docs/concepts/benchmarks.md has the coverage of both), and a t interval on log
window ratios aims at another quantity, their geometric mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# Student's t, 0.975 quantile, for 1..30 degrees of freedom, then some; between two, the lower one is used.
_T_SMALL: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_T_LARGE: Final = ((40, 2.021), (60, 2.000), (120, 1.980), (1000, 1.962))


@dataclass(frozen=True, slots=True)
class Turn:
    """What an arm did before it gave way to the next one: `tokens` >= 1 emitted in `seconds`."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """Speed relative to plain and its 95 % interval; low and high are None for a single window."""

    value: float
    low: float | None
    high: float | None


def window_seconds(turns: Sequence[Turn], window_tokens: int) -> list[float]:
    """Seconds per window of `window_tokens` tokens, the last window holding the rest.

    A turn that ran over an edge (a verify block is never cut) is divided in proportion to its
    tokens on either side; the sum over windows is the sum over turns.
    """
    total = sum(turn.tokens for turn in turns)
    seconds = [0.0] * -(-total // window_tokens)
    position = 0
    for turn in turns:
        left = turn.tokens
        while left:
            here = min(left, window_tokens - position % window_tokens)
            seconds[position // window_tokens] += turn.seconds * here / turn.tokens
            position += here
            left -= here
    return seconds


def paired_ratio(plain: Sequence[float], stage: Sequence[float]) -> Ratio:
    """Total plain time over total stage time, with a 95 % interval from the paired windows.

    Both hold seconds > 0 of the same token ranges, at least one window; windows may differ in size.
    """
    assert len(plain) == len(stage) > 0, f"{len(plain)} and {len(stage)} windows cannot be paired"
    count = len(plain)
    value = sum(plain) / sum(stage)
    if count == 1:
        return Ratio(value, None, None)
    residuals = sum((p - value * s) ** 2 for p, s in zip(plain, stage, strict=True))
    error = math.sqrt(count / (count - 1) * residuals) / sum(stage)
    margin = math.exp(t_quantile(count - 1) * error / value)
    return Ratio(value, value / margin, value * margin)


def t_quantile(degrees: int) -> float:
    """0.975 quantile of Student's t; never below the exact value."""
    assert degrees >= 1, "an interval needs two windows"
    if degrees <= len(_T_SMALL):
        return _T_SMALL[degrees - 1]
    return next((t for n, t in reversed(_T_LARGE) if degrees >= n), _T_SMALL[-1])
