"""The result of `bench peers`: pairs as measured, and one row per task against the peer's best."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from quickdraft.bench.peer_tasks import Task

SCHEMA: Final = "quickdraft-peers-1"


@dataclass(frozen=True, slots=True)
class Pair:
    """One task under one configuration of the peer, round by round; `failed` says why no speed counts."""

    task: Task
    quickdraft_config: str  # its speculation setting
    peer_config: str
    quickdraft_values: tuple[float, ...]  # in the task's unit
    peer_values: tuple[float, ...]
    texts_equal: bool
    failed: str | None = None

    @property
    def quickdraft(self) -> float:
        return statistics.median(self.quickdraft_values)

    @property
    def peer(self) -> float:
        return statistics.median(self.peer_values)

    @property
    def ratio(self) -> float:
        """How many times as fast quickdraft is."""
        return self.task.ratio(self.quickdraft, self.peer)

    def to_dict(self) -> dict[str, object]:
        """One row of the JSON; without any speed when it failed."""
        shown = self.failed is None
        value: dict[str, object] = {
            "name": self.task.name,
            "unit": self.task.unit,
            "quickdraft": round(self.quickdraft, 4) if shown else None,
            "quickdraft_config": self.quickdraft_config,
            "peer": round(self.peer, 4) if shown else None,
            "peer_config": self.peer_config,
            "ratio": round(self.ratio, 4) if shown else None,
            "texts_equal": self.texts_equal,
        }
        return value if shown else value | {"failed": self.failed}


@dataclass(frozen=True, slots=True)
class PeersResult:
    """A whole run of `bench peers`."""

    model: str
    threads: int
    commit: str | None
    peer_version: str
    rows: tuple[Pair, ...]  # one per task
    pairs: tuple[Pair, ...]  # every configuration

    def to_dict(self) -> dict[str, object]:
        """The JSON shape of `--json`."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "threads": self.threads,
            "commit": self.commit,
            "peer_version": self.peer_version,
            "rows": [pair.to_dict() for pair in self.rows],
            "configurations": [pair.to_dict() for pair in self.pairs],
        }


def best_rows(tasks: Sequence[Task], pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Per task the pair in which the peer was fastest; a failed one only where all failed."""
    rows = []
    for task in tasks:
        mine = [pair for pair in pairs if pair.task.name == task.name]
        good = [pair for pair in mine if pair.failed is None]
        rows.append(max(good, key=lambda pair: pair.task.ratio(pair.peer, 1.0)) if good else mine[0])
    return tuple(rows)


def print_rows(result: PeersResult, console: Console) -> None:
    """One line per task; FAIL and the reason where no speed may be shown."""
    table = Table(
        title=f"{result.model}, {result.threads} threads; peer: llama-server {result.peer_version}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("task", overflow="fold", min_width=16)
    for name in ("unit", "quickdraft", "peer", "x peer"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("configurations", overflow="fold", min_width=20)
    for pair in result.rows:
        speeds = ("FAIL", "", "")
        if pair.failed is None:
            digits = 3 if pair.task.unit == "s" else 1
            speeds = (f"{pair.quickdraft:.{digits}f}", f"{pair.peer:.{digits}f}", f"{pair.ratio:.2f}")
        table.add_row(
            pair.task.name, pair.task.unit, *speeds, f"{pair.quickdraft_config} | {pair.peer_config}"
        )
    console.print(table)
    for pair in result.rows:
        if pair.failed is not None:
            console.print(f"FAIL {pair.task.name}: {pair.failed}", style="red", markup=False, soft_wrap=True)
    different = [pair.task.name for pair in result.rows if pair.failed is None and not pair.texts_equal]
    if different:
        console.print(
            f"The texts differ in: {'; '.join(different)}. Other rounding may choose other tokens; "
            "the numbers of tokens are equal.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
