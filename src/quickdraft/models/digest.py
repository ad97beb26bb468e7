"""What the numbers of a model depend on, as one key: its files, its KV type, the backend's arithmetic.

Knows no cache and no engine; the files' hashes are in models/hashes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from quickdraft.config import cache_folder
from quickdraft.errors import ConfigError
from quickdraft.models.hashes import sha256_of
from quickdraft.models.interface import LoadedModel
from quickdraft.ops.interface import BLOCK_TOKENS, NUMERICS, KVCache, Ops


def compatibility_key(
    loaded: LoadedModel, ops: Ops, kv: KVCache, drafters: Sequence[Sequence[Path]] = ()
) -> bytes:
    """32 bytes that differ whenever KV blocks of the same tokens may differ in a bit; `drafters` are the
    files of those whose rows lie in the blocks too."""
    parts = {
        "files": [digest.hex() for digest in files_digest(loaded.files)],
        "backend": ops.name,
        "numerics": NUMERICS,
        "activations": ops.activations,
        "kv_dtype": loaded.kv_dtype,
        "block": [BLOCK_TOKENS, kv.bytes_per_block, *kv.layout],
    }
    if drafters:
        parts["drafters"] = [[digest.hex() for digest in files_digest(files)] for files in drafters]
    if loaded.notes:
        parts["changed"] = loaded.notes
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def weight_digests(files: Sequence[Path]) -> list[str]:
    """Hex SHA-256 of the weight files among a model's files; ConfigError when one cannot be read."""
    return [_sha256_of(path) for path in files if path.suffix != ".json"]


def files_digest(files: Sequence[Path]) -> list[bytes]:
    """SHA-256 of each file; ConfigError when one cannot be read."""
    return [bytes.fromhex(_sha256_of(path)) for path in files]


def _sha256_of(path: Path) -> str:
    try:
        return sha256_of(path, cache_folder())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
