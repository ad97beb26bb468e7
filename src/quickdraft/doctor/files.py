"""Files: is the model's file the one its alias names, whole and readable, and can the cache be written?

Reads files, opens no model and downloads nothing.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Final

from quickdraft.config import FoundModel, cache_folder, find_model
from quickdraft.doctor.check import Failed, Note
from quickdraft.models.inspect import inspect_model

CACHE_HINT: Final = "set QUICKDRAFT_CACHE to a folder you may write to"


def files(model: str | Path) -> Note:
    """The pinned size and digest of an alias's file; headers and sizes of any other; the cache folder."""
    found = find_model(model)
    if not found.path.exists():
        raise Failed(f"{found.path} is not there", f"run: quickdraft pull {found.name}")
    try:
        known = _pinned(found) if found.alias is not None else _unpinned(found.path)
    except OSError as error:
        raise Failed(
            f"cannot read {found.path}: {error.strerror}", f"`ls -l {found.path}` shows who may read it"
        ) from error
    return Note(f"{known}; the cache folder {_writable(cache_folder())} can be written")


def _pinned(found: FoundModel) -> str:
    alias = found.alias
    assert alias is not None
    hint = f"run: quickdraft pull {alias.name} (it fetches a damaged file again)"
    size = found.path.stat().st_size
    if size != alias.size_bytes:
        raise Failed(f"{found.path.name} has {size} bytes, the original {alias.size_bytes}", hint)
    with found.path.open("rb") as file:  # every byte, whatever is remembered of it
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != alias.sha256:
        raise Failed(f"{found.path.name} is damaged: SHA-256 {digest}, the original {alias.sha256}", hint)
    return f"{found.path.name}: {size / 1e6:.1f} MB, SHA-256 as published"


def _unpinned(path: Path) -> str:
    inspection = inspect_model(path)
    if inspection.problems:
        raise Failed("; ".join(inspection.problems), f"`quickdraft inspect {path}` lists what is wrong")
    parts = sorted(path.iterdir()) if path.is_dir() else [path]
    for part in parts:
        if part.is_file():
            with part.open("rb") as file:
                file.read(1)
    return (
        f"{path.name}: {inspection.tensors} tensors, {inspection.weight_bytes / 1e6:.1f} MB, headers whole; "
        "no published digest to compare with"
    )


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"quickdraft")
    except OSError as error:
        raise Failed(f"cannot write to the cache folder {folder}: {error.strerror}", CACHE_HINT) from error
    return folder
