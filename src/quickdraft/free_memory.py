"""How much memory this process can still have: what the machine has free, within its control groups.

Reads /proc and /sys/fs/cgroup, both generations, from the process's own group up to the root: a container
sees its limit at the root, a systemd unit further down. What a group has in page cache and does not use
counts as free, as the kernel gives it back before it refuses anything. It knows no flags and no sizes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from quickdraft.errors import ConfigError

_V1_NO_LIMIT: Final = 1 << 62  # the kernel writes about 2^63 for none
# names of the limit, of what is used, and of what of it is idle page cache
_FILES: Final = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_memory_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be had now; all of the machine's where the system is no Linux. ConfigError when the
    system does not say."""
    meminfo = proc / "meminfo"
    if not meminfo.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    if match is None:
        raise ConfigError("cannot tell how much memory is free", hint="give --kv-memory")
    return min([int(match[1]) << 10, *_group_rooms(proc, groups)])


def _group_rooms(proc: Path, groups: Path) -> Iterator[int]:
    """Bytes left in every group with a limit that this process is in."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines or ["0::/"]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers in ("", "memory"):
            version, root = (2, groups) if not controllers else (1, groups / "memory")
            inside = PurePosixPath(path.lstrip("/"))
            for group in (inside, *inside.parents):
                room = _room(root / group, *_FILES[version])
                if room is not None:
                    yield room


def _room(group: Path, limit_file: str, used_file: str, idle_name: str) -> int | None:
    try:
        limit = int((group / limit_file).read_text())
        used = int((group / used_file).read_text())
        idle = re.search(rf"^{idle_name} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # no such group from here, or "max": no limit
        return None
    if limit >= _V1_NO_LIMIT:
        return None
    return max(limit - used + (int(idle[1]) if idle is not None else 0), 0)
