"""Model files, opened and parsed as strictly as their numbers are used.

A model may come from anywhere: only regular files are read (a pipe would wait for ever), no larger
than stated, as UTF-8 JSON without repeated keys, NaN or endless nesting. Every failure is a
ModelFormatError that names the file. Knows nothing of what the JSON means.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import ModelFormatError

MAX_JSON_BYTES: Final = 128 << 20  # the largest tokenizer.json in use have some 35 MB


def open_regular(path: Path) -> BinaryIO:
    """The file, open for reading; ModelFormatError when it is missing, unreadable or no regular file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise ModelFormatError(f"{path}: cannot be read", got=cause) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelFormatError(f"{path}: cannot be read", got="something else than a regular file")
    return os.fdopen(descriptor, "rb")


def read_at(file: BinaryIO, path: Path, offset: int, size: int) -> NDArray[np.uint8]:
    """`size` bytes of `file` from `offset` on; ModelFormatError when they are not there.

    Read, not mapped: a file that shrinks or a disk that fails would end the process with SIGBUS.
    """
    data = np.empty(size, np.uint8)
    done = 0
    try:
        while done < size:
            count = os.preadv(file.fileno(), [data.data[done:]], offset + done)
            if count == 0:
                raise ModelFormatError(
                    f"{path}: the file became shorter while it was read",
                    got=f"{os.fstat(file.fileno()).st_size} bytes",
                    expected=f"at least {offset + size}",
                    hint="let what writes it end, and try again",
                )
            done += count
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read", got=error.strerror) from error
    return data


def is_there(path: Path) -> bool:
    """Whether the folder has such a name. A link that leads nowhere counts: it is an error when opened,
    not a file that is not needed."""
    return os.path.lexists(path)


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """The UTF-8 text of a file of at most `max_bytes`."""
    with open_regular(path) as handle:
        if os.fstat(handle.fileno()).st_size > max_bytes:
            raise ModelFormatError(f"{path}: too large", expected=f"at most {max_bytes} bytes")
        data = handle.read()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{path}: not UTF-8", got=error) from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    return parse_object(read_text(path), str(path))


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object in `text`; errors start with `where`."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        cause = "too deep nesting" if isinstance(error, RecursionError) else error
        raise ModelFormatError(f"{where}: not valid JSON", got=cause) from error
    if not isinstance(value, dict):
        raise ModelFormatError(f"{where}: bad JSON", got=type(value).__name__, expected="an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} occurs twice")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
