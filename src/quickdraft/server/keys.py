"""Where API keys come from: flags, a file, the environment; and which ones are refused.

No message here shows a key.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from quickdraft.errors import ConfigError

GUESSABLE_KEY: Final = 16  # characters: a shorter one is taken, with a warning
LONGEST_KEY: Final = 1000


def check_keys(keys: Sequence[str], where: str) -> tuple[str, ...]:
    """`keys` without repetitions; ConfigError names the first bad one by its number in `where`."""
    for number, key in enumerate(keys, 1):
        if not 1 <= len(key) <= LONGEST_KEY:
            got = f"{len(key)} characters"
        elif not (key.isascii() and key.isprintable()) or " " in key or "," in key:
            got = "a character that is not printable ASCII, a space or a comma"
        else:
            continue
        raise ConfigError(
            f"API key {number} of {where} cannot be used",
            got=got,
            expected=f"1 to {LONGEST_KEY} printable ASCII characters without spaces and commas",
            hint="for example: python -c 'import secrets; print(secrets.token_urlsafe(32))'",
        )
    return tuple(dict.fromkeys(keys))


def keys_of_file(path: Path) -> tuple[tuple[str, ...], str]:
    """(the keys in a file, a warning or ""): one a line; blank lines and lines that begin with # are
    skipped. ConfigError when the file cannot be read or holds no key."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the key file {path}: {reason}") from error
    stripped = (line.strip() for line in lines)
    keys = check_keys([line for line in stripped if line and not line.startswith("#")], f"{path}")
    if not keys:
        raise ConfigError(f"the key file {path} holds no key", expected="one key a line")
    open_to_all = mode & (stat.S_IRGRP | stat.S_IROTH)
    warning = f"the key file {path} can be read by other users. hint: chmod 600 {path}" if open_to_all else ""
    return keys, warning
