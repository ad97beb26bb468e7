"""What this machine and checkout are: read bandwidth, arithmetic peaks, and the commit that runs.

Plain decoding reads every weight once per token, so bandwidth over tensor bytes is its roof; the
peaks are the roof of long blocks. What the numbers mean for a model is roofline.py's business.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import quickdraft
from quickdraft.bench.roofline import Rates
from quickdraft.errors import UnsupportedError

READ_BUFFER_BYTES: Final = 256 << 20  # well beyond any last-level cache
READ_REPEATS: Final = 5
PEAK_PASS_MS: Final = 5.0
PEAK_REPEATS: Final = 20
NARROW, WIDE, FLOAT = "int8, int16 sums", "int8, int32 sums", "fp32"
KERNELS: Final = ("avx2", "plain C++")  # what quickdraft's own kernels are written for, the better first


@dataclass(frozen=True, slots=True)
class Peak:
    """Multiply-adds a second of one loop in registers, all threads together."""

    name: str  # NARROW, WIDE or FLOAT
    instructions: str
    threads: int
    macs_per_second: float

    @property
    def unit(self) -> str:
        return "GFLOP/s" if self.name == FLOAT else "GMAC/s"

    @property
    def value(self) -> float:
        """In `unit`: a multiply-add is two FLOPs."""
        return self.macs_per_second * (2 if self.name == FLOAT else 1) / 1e9


def read_bandwidth(threads: int) -> float:
    """Bytes per second `threads` threads read from memory, measured now over 256 MiB."""
    return float(_compiled().read_bandwidth(READ_BUFFER_BYTES, threads, READ_REPEATS))


def measure_peaks(threads: int, pass_ms: float = PEAK_PASS_MS, repeats: int = PEAK_REPEATS) -> list[Peak]:
    """Every loop this CPU can run, AVX-VNNI and AVX-512 included; the fastest of `repeats` passes each."""
    module = _compiled()
    return [
        Peak(name, instructions, threads, module.measure_peak(index, threads, pass_ms, repeats))
        for index, (name, instructions, _integer, _macs) in enumerate(module.peak_loops())
    ]


def rates(bytes_per_second: float, peaks: list[Peak]) -> Rates:
    """The rates of the instructions that quickdraft's kernels use here."""
    best: dict[str, float] = {}
    for instructions in reversed(KERNELS):
        best |= {peak.name: peak.macs_per_second for peak in peaks if peak.instructions == instructions}
    return Rates(bytes_per_second, best.get(NARROW, best[WIDE]), best[WIDE], best[FLOAT])


def _compiled() -> Any:
    try:
        from quickdraft.ops.cpu import _cpu  # type: ignore[attr-defined]  # compiled
    except ImportError as error:
        raise UnsupportedError(
            "the compiled CPU kernels are missing", got=str(error), hint="build them with `pip install .`"
        ) from error
    return _cpu


def commit() -> str | None:
    """The git commit of the checkout the running package lies in; None when it is not in one.

    A package installed into a folder that some other repository ignores is not in a checkout.
    """
    package = Path(quickdraft.__file__).resolve().parent
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(package, "rev-parse", "HEAD")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
