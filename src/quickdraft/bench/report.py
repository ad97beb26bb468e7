"""The result of a benchmark as values, as JSON (schema quickdraft-bench-1) and as a table.

A stage that was refused has no speeds: they are None here already, so neither form can show them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from quickdraft.errors import ConfigError

SCHEMA: Final = "quickdraft-bench-1"


@dataclass(frozen=True, slots=True)
class StageResult:
    """One stage of one workload, summed over its prompts. Speeds are None when `failed` is a reason."""

    stage: str
    decode_tokens_per_second: float | None
    relative_to_plain: float | None
    relative_low: float | None
    relative_high: float | None
    ceiling: float | None  # of relative_to_plain, from the costs of steps in this run
    step_ms: float | None
    tokens_per_step: float | None
    steps: int
    drafted: dict[str, int]
    accepted: dict[str, int]
    ids_equal_plain: bool
    failed: str | None = None
    rows: int = 0  # verified, over all steps
    accepted_per_step: tuple[int, ...] = ()  # [n]: steps in which n drafted tokens were accepted
    break_even: Mapping[int, float] = field(default_factory=dict)  # rows of a block -> see break_even.py

    def to_dict(self) -> dict[str, object]:
        """The JSON shape; `failed` is there only when the stage was refused."""
        names = (
            "stage", "decode_tokens_per_second", "relative_to_plain", "relative_low", "relative_high",
            "ceiling", "step_ms", "tokens_per_step", "steps", "drafted", "accepted", "ids_equal_plain",
            "rows", "accepted_per_step",
        )  # fmt: skip
        values = {name: _rounded(getattr(self, name)) for name in names}
        values["break_even"] = {str(rows): _rounded(needed) for rows, needed in self.break_even.items()}
        return values if self.failed is None else values | {"failed": self.failed}


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    """One workload: tokens summed over its prompts; `stages` begins with plain decoding."""

    name: str
    prompt_tokens: int
    output_tokens: int
    stages: tuple[StageResult, ...]

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "stages": [stage.to_dict() for stage in self.stages],
        }


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A whole run of `bench stages`."""

    model: str
    threads: int
    commit: str | None
    workloads: tuple[WorkloadResult, ...]
    costs: str = ""  # the curve behind `break_even`, in words

    def to_dict(self) -> dict[str, object]:
        return {
            "schema": SCHEMA,
            "model": self.model,
            "threads": self.threads,
            "commit": self.commit,
            "costs": self.costs,
            "workloads": [workload.to_dict() for workload in self.workloads],
        }

    def write(self, path: Path) -> None:
        """Write the JSON file, whole or not at all."""
        write_json(path, self.to_dict())


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def check_json_folder(path: Path | None) -> None:
    """ConfigError, before anything is measured, for a file that could not be written."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}", got=f"no folder {path.parent}")


def write_json(path: Path, value: dict[str, object]) -> None:
    """Write a JSON file, whole or not at all."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def print_table(result: BenchResult, console: Console) -> None:
    """One line per workload and stage; FAIL and the reason where no speed may be shown."""
    table = Table(
        title=f"{result.model}, {result.threads} threads",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("workload", no_wrap=True)
    table.add_column("stage", overflow="fold", min_width=9)
    for name in ("tok/s", "x plain", "95 %", "ceiling", "tok/step", "accepted"):
        table.add_column(name, justify="right", no_wrap=True)
    for workload in result.workloads:
        labels = [workload.name, f"{workload.output_tokens} tokens"]
        for index, stage in enumerate(workload.stages):
            table.add_row(
                labels[index] if index < len(labels) else "", stage_label(stage.stage), *_cells(stage)
            )
        table.add_section()
    console.print(table)
    notes = [(w.name, stage) for w in result.workloads for stage in w.stages if stage.failed is not None]
    for name, stage in notes:
        console.print(f"FAIL {name} {stage.stage}: {stage.failed}", style="red", markup=False, soft_wrap=True)
    if any(workload.name == "random" for workload in result.workloads):
        console.print("random: random ids, not text; the output is not checked for repetition")


def stage_label(stage: str) -> str:
    """A stage's name for a narrow column: a line per source."""
    return stage.replace("+", "+\n")


def _cells(stage: StageResult) -> tuple[str, ...]:
    accepted = f"{sum(stage.accepted.values())}/{sum(stage.drafted.values())}"
    if stage.failed is not None:
        return ("FAIL", "", "", "", "", accepted)
    low, high = stage.relative_low, stage.relative_high
    shown = "" if low is None or high is None or low == high else f"{low:.2f}-{high:.2f}"
    return (
        f"{stage.decode_tokens_per_second:.1f}",
        f"{stage.relative_to_plain:.2f}",
        shown,
        f"{stage.ceiling:.2f}",
        f"{stage.tokens_per_step:.2f}",
        accepted,
    )


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value
