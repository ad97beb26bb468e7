"""What memory can be had: the machine's, and every control group's that this process is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from quickdraft.errors import ConfigError
from quickdraft.free_memory import free_memory_bytes

MIB = 1 << 20


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(str(value))


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """/proc of a machine with 1000 MiB available, and an empty /sys/fs/cgroup."""
    write(tmp_path / "proc" / "self")
    write(tmp_path / "groups")
    write(tmp_path / "proc", meminfo=f"MemTotal: 1 kB\nMemAvailable:    {1000 * 1024} kB\n")
    return tmp_path / "proc", tmp_path / "groups"


def group(folder: Path, limit: object, used: int, idle: int) -> None:
    write(folder, memory__max=limit, memory__current=used, memory__stat=f"anon 5\ninactive_file {idle}\n")


def test_without_groups_the_machine_decides(machine: tuple[Path, Path]) -> None:
    assert free_memory_bytes(*machine) == 1000 * MIB


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        ("max", "max", 1000 * MIB),
        (600 * MIB, "max", 350 * MIB),  # a container: its limit less what is used but for idle cache
        ("max", 300 * MIB, 200 * MIB),  # a systemd unit
        (600 * MIB, 300 * MIB, 200 * MIB),
        (600 * MIB, 100 * MIB, 0),
    ],
)
def test_the_narrowest_group_decides(
    machine: tuple[Path, Path], outer: object, inner: object, expected: int
) -> None:
    proc, groups = machine
    write(proc / "self", cgroup="0::/system.slice/quickdraft.service\n")
    group(groups, outer, 300 * MIB, 50 * MIB)
    group(groups / "system.slice" / "quickdraft.service", inner, 110 * MIB, 10 * MIB)
    assert free_memory_bytes(proc, groups) == expected


def test_first_generation_groups_and_a_path_that_is_not_mounted(machine: tuple[Path, Path]) -> None:
    """Docker without a group namespace: /proc names the host's path, the mount shows the container's."""
    proc, groups = machine
    write(proc / "self", cgroup="4:memory:/docker/abc\n1:cpu:/\n0::/\n")
    write(
        groups / "memory", memory__limit_in_bytes=500 * MIB, memory__usage_in_bytes=200 * MIB,
        memory__stat=f"inactive_file 7\ntotal_inactive_file {20 * MIB}\n",
    )  # fmt: skip
    assert free_memory_bytes(proc, groups) == 320 * MIB
    write(groups / "memory", memory__limit_in_bytes=9223372036854771712)
    assert free_memory_bytes(proc, groups) == 1000 * MIB


def test_a_system_that_does_not_say(machine: tuple[Path, Path]) -> None:
    write(machine[0], meminfo="MemTotal: 5 kB\n")
    with pytest.raises(ConfigError, match="--kv-memory"):
        free_memory_bytes(*machine)
