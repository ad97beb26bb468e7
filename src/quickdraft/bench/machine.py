"""What this machine and checkout are: read bandwidth, and the commit that runs.

Plain decoding reads every weight once per token, so bandwidth over tensor bytes is its roof.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

import quickdraft

READ_BUFFER_BYTES: Final = 256 << 20  # well beyond any last-level cache
READ_REPEATS: Final = 5


def read_bandwidth(threads: int) -> float:
    """Bytes per second `threads` threads read from memory, measured now over 256 MiB."""
    from quickdraft.ops.cpu import _cpu  # type: ignore[attr-defined]  # compiled

    return float(_cpu.read_bandwidth(READ_BUFFER_BYTES, threads, READ_REPEATS))


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
