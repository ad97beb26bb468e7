"""A CudaOps in the interpreter, with spans short enough that a few rows have several."""

from __future__ import annotations

from quickdraft.ops.cuda.backend import CudaOps
from tests.support import interpreter as interpreter

SPAN = 64


def card() -> CudaOps:
    return CudaOps(span=SPAN)
