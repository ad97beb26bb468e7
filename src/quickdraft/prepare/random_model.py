"""write_random: a checkpoint of a described model with random numbers, whole or not at all.

Files are streamed, so memory stays at a few chunks whatever the model. Everything is written into a
folder beside the target and renamed at the end, so that a folder under its final name is whole.
Knows nothing of formats (checkpoint_plan.py) or numbers (random_values.py).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from quickdraft.errors import CapacityError, ConfigError
from quickdraft.models.describe import Description
from quickdraft.prepare.byte_tokenizer import tokenizer_files
from quickdraft.prepare.checkpoint_plan import (
    INDEX,
    SHARD_BYTES,
    File,
    Format,
    config_of,
    index_of,
    planned_files,
)
from quickdraft.prepare.random_values import Constant, chunks

_SMALL_BYTES: Final = 1 << 18
_SPARE_BYTES: Final = 64 << 20  # headers, JSON and what the file system adds


def write_random(
    sizes: Description,
    form: Format,
    folder: Path,
    *,
    seed: int,
    report: Callable[[str], None],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the checkpoint to `folder`, which must be absent or empty.

    The same seed gives the same bytes. ConfigError for a folder that is in use or cannot be written,
    CapacityError when the disk has no room; nothing is left behind then.
    """
    folder = Path(os.path.abspath(folder))
    files = planned_files(sizes, form, shard_bytes)
    try:
        if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
            raise ConfigError(f"{folder} is in use", expected="a new folder, or an empty one")
        folder.parent.mkdir(parents=True, exist_ok=True)
        _check_room(folder, sum(file.bytes for file in files))
        partial = _begun(folder)
        try:
            _write_all(sizes, form, files, partial, seed, report)
            os.rename(partial, folder)  # over an empty folder too, and over nothing else
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise _storage_error(error, folder) from error


def write_outline(sizes: Description, form: Format, folder: Path) -> None:
    """The same files in an empty folder with holes for large tensors, which read as zeros and take no room:
    for those who only need names and shapes of these."""
    files = planned_files(sizes, form)
    for file in files:
        with (folder / file.name).open("xb") as out:
            out.write(_header(file))
            for tensor in file.tensors:
                end = out.tell() + tensor.bytes
                if isinstance(tensor.fill, Constant) or tensor.bytes <= _SMALL_BYTES:
                    for chunk in chunks(tensor.fill, tensor.dtype, tensor.shape, 0, tensor.name):
                        out.write(chunk.data)
                out.seek(end)
            out.truncate()
    _write_texts(sizes, form, files, folder)


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < size + _SPARE_BYTES:
        raise CapacityError(
            "not enough disk space for the checkpoint", got=f"{free} bytes free in {folder.parent}",
            expected=f"{size + _SPARE_BYTES} bytes", hint="--layers writes a shorter model",
        )  # fmt: skip


def _begun(folder: Path) -> Path:
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        partial.mkdir()
    except FileExistsError as error:
        raise ConfigError(
            f"{folder} is being written, or a run that wrote it was killed", got=f"a folder {partial}",
            hint=f"if nothing writes it, remove {partial}",
        ) from error  # fmt: skip
    return partial


def _write_all(
    sizes: Description,
    form: Format,
    files: tuple[File, ...],
    folder: Path,
    seed: int,
    report: Callable[[str], None],
) -> None:
    for file in files:
        report(f"writing {file.name} ({file.bytes / 1e9:.2f} GB)")
        _write_file(folder / file.name, file, seed)
    _write_texts(sizes, form, files, folder)


def _write_texts(sizes: Description, form: Format, files: tuple[File, ...], folder: Path) -> None:
    texts: dict[str, dict[str, Any] | None] = {
        "config.json": config_of(sizes, form),
        "generation_config.json": {
            "eos_token_id": list(sizes.eos_ids), "pad_token_id": sizes.eos_ids[-1], "do_sample": True,
            "temperature": 1.0, "top_p": 0.95, "top_k": 20,
        },
        INDEX: index_of(files),
        **(tokenizer_files() if sizes.byte_tokenizer else {}),
    }  # fmt: skip
    for name, content in texts.items():
        if content is not None:
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _header(file: File) -> bytes:
    """Of a safetensors file: 8 bytes length of the description, the description (padded to 8 bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in file.tensors:
        start, end = end, end + tensor.bytes
        header[tensor.name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_file(path: Path, file: File, seed: int) -> None:
    """One safetensors file: its header, then the data."""
    header = _header(file)
    with path.open("xb") as out:
        out.write(header)
        for tensor in file.tensors:
            for chunk in chunks(tensor.fill, tensor.dtype, tensor.shape, seed, tensor.name):
                out.write(chunk.data)
        assert out.tell() == len(header) + file.bytes


def _storage_error(error: OSError, folder: Path) -> CapacityError | ConfigError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(f"the disk became full while {folder} was written")
    return ConfigError(f"cannot write {folder}", got=error.strerror)
