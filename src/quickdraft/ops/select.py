"""select: one backend, chosen when an engine is built, never at import.

Owns the choice and its error messages; knows nothing of models. `Ops.explain()` of what it returns
says which kernels run and why.
"""

from __future__ import annotations

from quickdraft.config import MAX_THREADS, kernel_object, usable_cores
from quickdraft.errors import ConfigError, UnsupportedError
from quickdraft.ops.interface import Ops


def select(threads: int | None = None, backend: str = "cpu") -> Ops:
    """The Ops of "cpu", with `threads` threads (default: every usable core), or of "cuda", where threads mean
    nothing.

    Raises ConfigError for a wrong setting, UnsupportedError when something it needs is missing.
    """
    if backend == "cuda":
        return _cuda()
    if backend != "cpu":
        raise ConfigError("unknown backend", got=repr(backend), expected="'cpu' or 'cuda'")
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


def _cuda() -> Ops:
    try:
        from quickdraft.ops.cuda.backend import CudaOps
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "the CUDA backend needs a package that is not installed",
            got=str(error),
            hint="install the extra: `pip install 'quickdraft[cuda]'`",
        ) from error
    return CudaOps()
