"""How far fp32 kernels may be from the float64 oracle, and why. One table for all parity tests.

`UNIT` is fp32's rounding error. Errors of a chain grow like the square root of its length for
rounding that goes either way; 4 times that is allowed, relative to the sum of magnitudes.
"""

from __future__ import annotations

import numpy as np

UNIT = 2.0**-24

TOLERANCES = {
    "rms_norm": 1e-6,  # relative: 16 partial sums, one square root, two divisions
    "swiglu": 1e-6,  # relative: exp to 2 units, one division
    "rope": 4 * UNIT,  # relative to |a| + |b|: two products, one of them fused
    "attention": 2e-5,  # relative to the largest |value|: exp makes a score's error a relative one
    "attention int8": 1e-4,  # as above; a weight's code may fall to the other side, 1/32767 of the largest
    # on a card queries and weights are rounded to the type they meet: 8 or 11 bits, in scores of a few units
    "card bfloat16": 2e-2,
    "card float16": 2e-3,
    "card int8": 2e-3,
    "card float32": 2e-5,
    "recurrent": 2e-5,  # relative to the largest: a chain of rows, each with an exp and a norm
}


def chain(length: int) -> float:
    """Allowed error of a sum of `length` products, relative to the sum of their magnitudes."""
    return 4.0 * float(np.sqrt(length)) * UNIT
