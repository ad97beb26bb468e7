"""Whether the card computes what it should: every op beside the reference, and a row's bits beside others.

What speculation promises rests on the second: a row that is verified among drafts must have the bits that it
has alone. The interpreter shows that of the kernels as they are written, only a card shows it of the code
that is compiled for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from quickdraft.bench.card_cases import Sizes, cases
from quickdraft.ops.interface import Ops
from quickdraft.ops.reference.backend import ReferenceOps

REFERENCE_ROWS: Final = (1, 17)
FEW: Final = (1, 2, 5, 16, 17, 33, 64)  # both ends of the heights that a tile may have
MANY: Final = 80
REAL: Final = Sizes(2048, 192, 256, 2500, 128, 20_000)  # heads and states of Qwen3.8-27B


@dataclass(frozen=True, slots=True)
class Parity:
    """The largest difference, as a part of the largest value."""

    kernel: str
    difference: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.difference <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


def parities(ops: Ops, rows: tuple[int, ...] = REFERENCE_ROWS) -> Iterator[Parity]:
    """Every op beside the reference in the same numerics, at small sizes."""
    reference: Any = ReferenceOps("sixteen")
    for case in cases(Sizes(), max(rows)):
        found, wanted = case.make(ops), case.make(reference)
        for count in rows:
            apart = _apart(found(count), wanted(count))
            yield Parity(f"{case.name}, {count} rows", apart, case.tolerance)


def rows_alike(
    ops: Ops, few: tuple[int, ...] = FEW, many: int = MANY, sizes: Sizes = REAL
) -> Iterator[Parity]:
    """Of every op the largest difference between a row among `many` and among few; nothing but 0 is ok."""
    for case in cases(sizes, many):
        run = case.make(ops)
        wanted = run(many)
        worst = max(_apart(run(count), wanted[:count]) for count in few)
        yield Parity(f"{case.name}, the same bits among few rows", worst, 0.0)


def _apart(found: Any, wanted: Any) -> float:
    """Infinite where something is not a number."""
    found, wanted = (np.asarray(each, np.float64) for each in (found, wanted))
    difference = float(np.abs(found - wanted).max()) / max(float(np.abs(wanted).max()), 1e-30)
    return difference if np.isfinite(difference) else float("inf")
