"""The kernel objects this CPU can run: each is compared with the oracle and, in bits, with the others."""

from __future__ import annotations

from quickdraft.ops.cpu.backend import CpuOps


def _runs(instructions: str) -> bool:
    try:
        CpuOps(1, instructions)
    except ValueError:
        return False
    return True


VECTOR = tuple(name for name in ("avx512", "avx2") if _runs(name))
OBJECTS = (*VECTOR, "scalar")
# (threads, object)
VARIANTS = (*((threads, name) for name in VECTOR for threads in (1, 2, 8)), (2, "scalar"))
