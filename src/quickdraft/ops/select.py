"""select: one backend, chosen when an engine is built, never at import.

Owns the choice and its error messages; knows nothing of models. `Ops.explain()` of what it returns
says which kernels run and why.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec

from quickdraft.config import MAX_THREADS, kernel_object, usable_cores
from quickdraft.errors import ConfigError, UnsupportedError
from quickdraft.ops.interface import Ops

_EXTRA = "install the extra: `pip install 'quickdraft[cuda]'`"


def resolve(backend: str) -> tuple[str, str]:
    """What "auto" is, "cpu" or "cuda", and what to say of it: why a card that is there is not used, or "".

    Looks for a card before any package is imported, so that a machine without one loads no torch.
    """
    if backend != "auto":
        return backend, ""
    if not _cards():
        return "cpu", ""
    missing = [name for name in ("torch", "triton") if find_spec(name) is None]
    if missing:
        return "cpu", f"a card is here and not used: no {' and '.join(missing)}; {_EXTRA}"
    try:
        _cuda()
    except UnsupportedError as error:
        return "cpu", f"a card is here and not used: {' '.join(str(error).split())}"
    return "cuda", ""


def _cards() -> int:
    """NVIDIA cards that the driver knows; 0 without a driver."""
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
        known = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    except (OSError, AttributeError):
        return 0
    return count.value if known else 0


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
            hint=_EXTRA,
        ) from error
    return CudaOps()
