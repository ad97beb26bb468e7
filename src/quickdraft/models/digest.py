"""What the numbers of a model depend on, as one key: its files, its KV type, the backend's arithmetic.

Files are hashed whole, once: the SHA-256 is remembered by path, size, inode, and the times of the last
change of content and of anything, in the cache folder. Knows no cache and no engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from quickdraft.config import cache_folder
from quickdraft.errors import ConfigError
from quickdraft.models.interface import LoadedModel
from quickdraft.ops.interface import BLOCK_TOKENS, NUMERICS, KVCache, Ops

_MEMORY: Final = "hashes.json"
_MAX_REMEMBERED: Final = 1000


def compatibility_key(loaded: LoadedModel, ops: Ops, kv: KVCache) -> bytes:
    """32 bytes that differ whenever KV blocks of the same tokens may differ in a bit."""
    parts = {
        "files": [digest.hex() for digest in files_digest(loaded.files)],
        "backend": ops.name,
        "numerics": NUMERICS,
        "kv_dtype": loaded.kv_dtype,
        "block": [BLOCK_TOKENS, kv.bytes_per_block, *kv.keys.shape[:1], *kv.keys.shape[2:]],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def files_digest(files: Sequence[Path]) -> list[bytes]:
    """SHA-256 of each file; ConfigError when one cannot be read."""
    memory = cache_folder() / _MEMORY
    known, new, digests = _remembered(memory), {}, []
    for path in files:
        try:
            identity = _identity(path)
            found = known.get(identity)
            if found is None:
                with path.open("rb") as file:
                    new[identity] = found = hashlib.file_digest(file, "sha256").hexdigest()
                if _identity(path) != identity:
                    raise ConfigError(f"{path} changed while it was read", hint="start again")
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        digests.append(bytes.fromhex(found))
    if new:
        _remember(memory, known | new)
    return digests


def _identity(path: Path) -> str:
    stat = path.stat()
    # a copy may bring its old modification time along; the time of change cannot be set
    times = stat.st_mtime_ns, stat.st_ctime_ns
    return json.dumps([os.path.realpath(path), stat.st_size, stat.st_ino, *times])


def _remembered(memory: Path) -> dict[str, str]:
    """The hashes on file; a damaged file is as good as none."""
    try:
        known: Any = json.loads(memory.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {name: value for name, value in known.items() if _is_digest(value)}


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def _remember(memory: Path, known: dict[str, str]) -> None:
    """Best effort: without it the next start hashes again."""
    latest = dict(list(known.items())[-_MAX_REMEMBERED:])
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=memory.parent, prefix=_MEMORY)
        try:
            with open(descriptor, "w", encoding="ascii") as file:
                json.dump(latest, file)
            os.replace(temporary, memory)
        except OSError:
            os.unlink(temporary)
