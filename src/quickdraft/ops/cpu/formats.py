"""Which format of the compiled module holds a quantised weight, and its arrays as the module takes them.

Knows weights and the names of formats (csrc/weight_formats.cpp), not kernels.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.weights import Grouped, GroupNumbers, Int8Groups, TwoLevel

# (bits, inputs of a group, inputs that share a half of the scales, and of the minimums: 0 without them)
# -> the compiled module's format; those of 4 and 8 bits without minimums are in PLAIN_FORMATS
GROUP_FORMATS: dict[tuple[int, int, int, int], str] = {
    (4, 32, 32, 32): "int4+minimum",
    (4, 32, 256, 256): "int4+minimum, two levels",
    (5, 32, 32, 0): "int5",
    (5, 32, 32, 32): "int5+minimum",
    (5, 32, 256, 256): "int5+minimum, two levels",
    (6, 16, 256, 0): "int6, two levels, groups of 16",
}
# (bits, zero points, bfloat16 scales) -> format, for groups of any multiple of 32 inputs
PLAIN_FORMATS: dict[tuple[int, bool, bool], str] = {
    (bits, zeros, bfloat): f"int{bits}" + "+zero" * zeros + ", bfloat16 scales" * bfloat
    for bits in (4, 8)
    for zeros, bfloat in ((False, False), (True, False), (True, True))
}


def paired(weight: Grouped) -> bool:
    return not isinstance(weight, Int8Groups) and weight.paired


def plain_format(weight: Grouped) -> str | None:
    """The format of a weight of 4 or 8 bits, one level of scales and no minimums."""
    bits = weight.bits if isinstance(weight, Int8Groups) else 4
    if isinstance(weight.scales, TwoLevel) or weight.minimums is not None or weight.group_size % 32:
        return None
    bfloat = weight.scales.dtype == ml_dtypes.bfloat16
    return PLAIN_FORMATS.get((bits, weight.zeros is not None, bfloat))


def group_format(weight: Grouped) -> tuple[int, int, int, int]:
    """The key of GROUP_FORMATS."""
    bits = weight.bits if isinstance(weight, Int8Groups) else 4
    inputs = weight.shape[1]

    def sharing(numbers: GroupNumbers) -> int:
        return inputs // int((numbers.shared if isinstance(numbers, TwoLevel) else numbers).shape[1])

    minimums_of = 0 if weight.minimums is None else sharing(weight.minimums)
    return bits, weight.group_size, sharing(weight.scales), minimums_of


def as_bits(numbers: GroupNumbers | None) -> tuple[NDArray[np.uint16] | None, NDArray[np.int8] | None]:
    """(halves as 16 bits, steps) as the module takes them."""
    if isinstance(numbers, TwoLevel):
        return as_bits(numbers.shared)[0], np.ascontiguousarray(numbers.steps)
    return (None if numbers is None else np.ascontiguousarray(numbers).view(np.uint16)), None
