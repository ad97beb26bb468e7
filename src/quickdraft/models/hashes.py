"""SHA-256 of model files, whole, once: remembered between starts, in a file of the cache folder.

A hash holds as long as path, size, inode, and the times of the last change of content and of anything
do. The one memory serves fetching (is this the file the alias names?) and the prefix cache's key.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Final

from quickdraft.errors import ConfigError

MEMORY_NAME: Final = "hashes.json"
_MAX_REMEMBERED: Final = 1000


def sha256_of(path: Path, cache: Path) -> str:
    """Hex digits of the file's SHA-256; OSError when it cannot be read, ConfigError when it changes."""
    identity = _identity(path)
    found = _remembered(cache).get(identity)
    if found is not None:
        return found
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if _identity(path) != identity:
        raise ConfigError(f"{path} changed while it was read", hint="start again")
    remember(path, found, cache)
    return found


def remembered_sha256(path: Path, cache: Path) -> str | None:
    """What `sha256_of` would give without reading the file; None when there is no such hash, or no file."""
    try:
        return _remembered(cache).get(_identity(path))
    except FileNotFoundError:
        return None


def remember(path: Path, sha256: str, cache: Path) -> None:
    """Keep a hash that was made while the file was written. Best effort: without it, it is made again."""
    memory = cache / MEMORY_NAME
    known = _remembered(cache)
    latest = dict([*known.items(), (_identity(path), sha256)][-_MAX_REMEMBERED:])
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=cache, prefix=MEMORY_NAME)
        try:
            with open(descriptor, "w", encoding="ascii") as file:
                json.dump(latest, file)
            os.replace(temporary, memory)
        except OSError:
            os.unlink(temporary)


def _identity(path: Path) -> str:
    stat = path.stat()
    # a copy may bring its old modification time along; the time of change cannot be set
    times = stat.st_mtime_ns, stat.st_ctime_ns
    return json.dumps([os.path.realpath(path), stat.st_size, stat.st_ino, *times])


def _remembered(cache: Path) -> dict[str, str]:
    """The hashes on file; a damaged file is as good as none."""
    try:
        known: Any = json.loads((cache / MEMORY_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {name: value for name, value in known.items() if _is_digest(value)}


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
