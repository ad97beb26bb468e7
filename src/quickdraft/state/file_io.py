"""Moving bytes between memory and the files of the disk cache: vectored, checked, whole or not at all.

CRC-32 is what keeps a restore fast: of zlib.crc32, hashlib.sha256 and hashlib.blake2b it is the
quickest (3.7, 1.6 and 0.6 GB/s on the development machine), finds every burst of up to 32 bits,
and misses other damage once in 4 thousand million. Nothing is ever flushed to the device: a file
torn by a power loss fails these checks and is a miss. Knows no format and no folder's rules.
"""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

_IOV_MAX: Final = 1024  # the most buffers one preadv or pwritev takes


def passing(error: OSError) -> bool:
    """Whether the error says nothing about the file or the disk."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


@contextlib.contextmanager
def reading(folder: int, name: str) -> Iterator[int]:
    """A descriptor of the file `name` in `folder` (a descriptor). OSError."""
    # O_NONBLOCK: a pipe put under this name must not hang the engine.
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def writing(folder: int, name: str, used_ns: int) -> Iterator[int]:
    """A descriptor to write a new file with: whole under `name` afterwards, or not there at all when the
    block raises. OSError."""
    temporary = name + ".tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        yield file
        os.utime(file, ns=(used_ns, used_ns))
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        os.close(file)


def read_into(file: int, views: Sequence[memoryview], position: int) -> int:
    """Fill `views` from the file; bytes read, fewer than asked at its end."""
    return _transfer(os.preadv, file, views, position)


def write_all(file: int, views: Sequence[memoryview], position: int) -> None:
    """Put `views` into the file; OSError when it does not take them."""
    expected = sum(len(view) for view in views)
    if _transfer(os.pwritev, file, views, position) != expected:
        raise OSError(errno.EIO, "the file system took no more bytes")


def checksum(views: Sequence[memoryview]) -> int:
    """CRC-32 of the views, joined."""
    value = 0
    for view in views:
        value = zlib.crc32(view, value)
    return value


def _transfer(
    move: Callable[[int, Any, int], int], file: int, views: Sequence[memoryview], position: int
) -> int:
    waiting, moved = list(views), 0
    while waiting:
        count = move(file, waiting[:_IOV_MAX], position + moved)
        if count == 0:
            break
        moved += count
        while waiting and count >= len(waiting[0]):
            count -= len(waiting.pop(0))
        if count:
            waiting[0] = waiting[0][count:]
    return moved
