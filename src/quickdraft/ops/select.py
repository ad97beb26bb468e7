"""select: one backend, chosen when an engine is built, never at import.

Owns the choice and its error messages; knows nothing of models. `Ops.explain()` of what it returns
says which kernels run and why.
"""

from __future__ import annotations

from quickdraft.config import MAX_THREADS, kernel_object, usable_cores
from quickdraft.errors import ConfigError, UnsupportedError
from quickdraft.ops.interface import Ops


def select(threads: int | None = None, backend: str = "cpu") -> Ops:
    """The backend's Ops with `threads` threads (default: every usable core).

    Raises ConfigError for a wrong setting, UnsupportedError when the compiled module is missing.
    """
    if backend != "cpu":
        raise ConfigError("unknown backend", got=repr(backend), expected="'cpu'")
    chosen = usable_cores() if threads is None else threads
    if not 1 <= chosen <= MAX_THREADS:
        raise ConfigError("wrong number of threads", got=chosen, expected=f"1..{MAX_THREADS}")
    try:
        from quickdraft.ops.cpu.backend import CpuOps
    except ImportError as error:
        raise UnsupportedError(
            "the compiled CPU kernels are missing",
            got=str(error),
            hint="build them with `pip install .` in the repository (needs a C++17 compiler)",
        ) from error
    instructions = kernel_object()
    try:
        return CpuOps(chosen, instructions)
    except ValueError as error:
        raise ConfigError(
            "QUICKDRAFT_KERNELS cannot be used", got=str(error), hint="unset it: the best kernels are found"
        ) from error
