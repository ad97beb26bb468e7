"""The noise of sampling, defined once: Philox4x32-10 -> a float64 in (0, 1) -> -log(-log(u)).

Gumbel noise depends only on (seed, position, token id), so a request draws the same tokens with
any drafter, batch or schedule. Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2,
3" (SC 2011). The logarithm is written out (`stated_log`), because libm's differ in the last bit;
every backend repeats these operations one for one and matches in bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = np.uint64(0xFFFFFFFF)
_LN2 = math.log(2.0)  # 0.6931471805599453
_SQRT_HALF = math.sqrt(0.5)  # 0.7071067811865476
LOG_TERMS = 12


def philox(counter: tuple[int, int], ids: NDArray[np.int64], seed: int) -> tuple[NDArray[np.uint64], ...]:
    """Philox4x32-10 of counter (id, 0, position low, position high) under key seed (64 bits)."""
    c0 = ids.astype(np.uint64) & _MASK
    c1 = ids.astype(np.uint64) >> np.uint64(32)
    c2 = np.full_like(c0, counter[0])
    c3 = np.full_like(c0, counter[1])
    k0, k1 = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (p1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            p1 & _MASK,
            (p0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            p0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return c0, c1, c2, c3


def stated_log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """log(x) for finite x > 0: x = m 2^e, m in [sqrt(1/2), sqrt(2)), z = (m-1)/(m+1),
    e ln2 + 2 z (1 + z^2/3 + ... + z^24/25), Horner, every operation rounded by itself."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < _SQRT_HALF
    mantissa = np.where(low, mantissa * 2.0, mantissa)
    exponent = np.where(low, exponent - 1, exponent).astype(np.float64)
    z = (mantissa - 1.0) / (mantissa + 1.0)
    square = z * z
    series = np.full_like(z, 1.0 / (2 * LOG_TERMS + 1))
    for term in range(LOG_TERMS - 1, -1, -1):
        series = series * square + 1.0 / (2 * term + 1)
    return exponent * _LN2 + 2.0 * z * series


def uniform(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """float64 in (0, 1): ((c0 >> 6) 2^26 + (c1 >> 6) + 0.5) 2^-52, exact 52-bit midpoints."""
    c0, c1, _, _ = philox((position & 0xFFFFFFFF, position >> 32), ids, seed & (2**64 - 1))
    high = (c0 >> np.uint64(6)).astype(np.float64)
    low = (c1 >> np.uint64(6)).astype(np.float64)
    return (high * 67108864.0 + low + 0.5) * 2.0**-52


def gumbel(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise [len(ids)] of each token id at this absolute position."""
    return -stated_log(-stated_log(uniform(seed, position, ids)))


def choice(
    row: NDArray[np.float32],
    temperature: float,
    seed: int,
    position: int,
    ids: Sequence[int] | NDArray[np.int64] | None = None,
) -> int:
    """See Ops.gumbel_choice; ties go to the lowest id."""
    names = np.arange(len(row), dtype=np.int64) if ids is None else np.asarray(ids, np.int64)
    scores = row.astype(np.float64) / temperature + gumbel(seed, position, names)
    best = scores.max()
    return int(names[scores == best].min())
