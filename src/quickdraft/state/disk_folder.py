"""The cache folder as a whole: one locked sub-folder per compatibility key, and whatever others left.

A model's files live in a sub-folder named by the first 16 hex digits of its compatibility key, locked
by the process that serves it. Files of other models count towards the byte budget as they were when
the store opened, and the least recently used may be deleted to make room, but never while their
process runs. Knows names, sizes and times; never looks into a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quickdraft.errors import ConfigError
from quickdraft.state.segment_file import SEGMENT_NAME
from quickdraft.state.state_file import STATE_NAME

CACHE_NAME: Final = re.compile(f"{SEGMENT_NAME.pattern}|{STATE_NAME.pattern}")
TEMPORARY_NAME: Final = re.compile(rf"({CACHE_NAME.pattern})\.tmp")
_FOLDER_DIGITS = 16
_LOCK_ATTEMPTS = 10  # another store holds a lock for an instant while it deletes an old file
_LOCK_PAUSE_S = 0.02


def own_folder(folder: Path, compatibility: bytes) -> Path:
    """Where the files of one compatibility key are."""
    return folder / compatibility.hex()[:_FOLDER_DIGITS]


def open_locked(folder: Path) -> int:
    """A descriptor of `folder`, made (0700) when missing, under an exclusive lock until it is closed.

    ConfigError when it cannot be made, read or written, or when another process holds the lock.
    """
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileExistsError as error:
        raise unusable(folder, "something that is not a folder has its name") from error
    except OSError as error:
        raise unusable(folder, str(error)) from error
    try:
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise unusable(folder, "no permission to read and write there")
        _lock(descriptor, folder)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int, folder: Path) -> None:
    for attempt in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt < _LOCK_ATTEMPTS - 1:
                time.sleep(_LOCK_PAUSE_S)
        except OSError as error:
            raise unusable(folder, str(error)) from error
    raise ConfigError(
        f"the disk cache {folder} is in use by another process",
        expected="one process per model and cache folder",
        hint="stop the other process, or give this one its own cache folder",
    )


def unusable(folder: Path, why: str) -> ConfigError:
    """What to raise when the file system does not let the store work in `folder`."""
    return ConfigError(
        f"the disk cache {folder} cannot be used",
        got=why,
        expected="a folder this user may read and write",
        hint="name another folder, or turn the disk cache off",
    )


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file of another model's cache."""

    used_ns: int
    path: Path
    size: int


class OtherFiles:
    """The files in a cache folder that are not this model's, least recently used first."""

    def __init__(self, folder: Path, own: str) -> None:
        self._files: list[OtherFile] = []
        self.bytes = 0
        for entry in _entries(folder):
            named = len(entry.name) == _FOLDER_DIGITS and not entry.name.strip("0123456789abcdef")
            if named and entry.name != own and entry.is_dir(follow_symlinks=False):
                for file in _entries(Path(entry.path)):
                    if CACHE_NAME.fullmatch(file.name) or TEMPORARY_NAME.fullmatch(file.name):
                        self._add(file)
        self._files.sort(key=lambda file: file.used_ns, reverse=True)

    def _add(self, entry: os.DirEntry[str]) -> None:
        with contextlib.suppress(OSError):  # deleted meanwhile
            if entry.is_file(follow_symlinks=False):
                stat = entry.stat(follow_symlinks=False)
                self._files.append(OtherFile(stat.st_mtime_ns, Path(entry.path), stat.st_size))
                self.bytes += stat.st_size

    @property
    def oldest_ns(self) -> int | None:
        """When the next one to go was last used; None when there is none."""
        return self._files[-1].used_ns if self._files else None

    def delete_oldest(self) -> bool:
        """Delete the oldest; False when that one has to stay (its process runs, or no permission)."""
        file = self._files.pop()
        try:
            folder = os.open(file.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            self.bytes -= file.size
            return True
        except OSError:
            return False
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(file.path.name, dir_fd=folder)
        except FileNotFoundError:
            pass
        except OSError:
            return False
        finally:
            os.close(folder)
        self.bytes -= file.size
        return True


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []
