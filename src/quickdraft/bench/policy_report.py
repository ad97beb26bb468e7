"""The result of `bench policy` as values, as JSON (schema quickdraft-policy-1) and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

SCHEMA: Final = "quickdraft-policy-1"
TRACES_NOTE: Final = (
    "tokens and acceptance are those of {model}; a context of the second table is a cost only, the tokens "
    "stay the same"
)


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One workload; speeds in tokens per second."""

    workload: str
    policy_tokens_per_second: float
    best_static: float
    oracle: float
    plain: float
    mean_rows: float  # verified per sequence and step
    tokens_per_step: float
    best_static_setting: str
    one_static: float  # with the setting that is best over all workloads
    spent_of_plain: float  # drafting and refused rows, over plain decoding's time
    left_out: float | None = None  # the policy by priors that were fitted to the other workloads alone


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second with blocks of at most so many rows."""

    policy: float
    best_static: float
    oracle: float


@dataclass(frozen=True, slots=True)
class LongRow:
    """One workload as if every step came after `context` tokens, with short and with long blocks."""

    context: int
    workload: str
    plain: float
    rows_16: Speeds
    rows_64: Speeds


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """A whole run of `bench policy`."""

    curve: str
    assumptions: tuple[str, ...]
    model: str  # whose traces they are
    one_static: str
    rows: tuple[PolicyRow, ...]
    long_blocks: tuple[LongRow, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """The JSON shape of `--json`."""
        return {
            "schema": SCHEMA,
            "curve": self.curve,
            "assumptions": list(self.assumptions),
            "model": self.model,
            "one_static": self.one_static,
            "rows": [_rounded(asdict(row)) for row in self.rows],
            "long_blocks": [_rounded(asdict(row)) for row in self.long_blocks],
        }


def print_result(result: PolicyResult, console: Console) -> None:
    """The policy beside hindsight, then what long blocks add, then what both rest on."""
    table = _table(f"{result.model} on the curve {result.curve}: tokens/s")
    for name in ("policy", "plain", "best static", "", "x static", "x oracle", "x plain", "rows", "tok/step"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    table.add_column("spent %", justify="right", no_wrap=True)
    left_out = any(row.left_out is not None for row in result.rows)
    if left_out:
        table.add_column("left out", justify="right", no_wrap=True)
        table.add_column("x static", justify="right", no_wrap=True)
    for row in result.rows:
        speed = row.policy_tokens_per_second
        ratios = (f"{speed / other:.2f}" for other in (row.best_static, row.oracle, row.plain))
        fitted = row.left_out
        apart = (f"{fitted:.1f}", f"{fitted / row.best_static:.2f}") if fitted is not None else ()
        table.add_row(
            row.workload, f"{speed:.1f}", f"{row.plain:.1f}", f"{row.best_static:.1f}",
            row.best_static_setting, *ratios, f"{row.mean_rows:.1f}", f"{row.tokens_per_step:.2f}",
            f"{100 * row.spent_of_plain:.1f}", *apart,
        )  # fmt: skip
    console.print(table)
    if left_out:
        _say(console, "left out: by priors fitted to the other workloads, without the texts of this one")
    _say(console, f"one setting for all workloads: {result.one_static}")
    if result.long_blocks:
        _print_long(result.long_blocks, console)
    _say(console, "assumptions:")
    for line in (*result.assumptions, TRACES_NOTE.format(model=result.model)):
        _say(console, f"- {line}")


def _print_long(rows: Sequence[LongRow], console: Console) -> None:
    table = _table("blocks of up to 64 rows beside up to 16: tokens/s, and what the longer ones add")
    table.add_column("context", justify="right", no_wrap=True)
    table.add_column("plain", justify="right", no_wrap=True)
    for name in ("policy", "best static", "oracle"):
        table.add_column(f"{name} 16", justify="right", no_wrap=True)
        table.add_column("64", justify="right", no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
    for index, row in enumerate(rows):
        if index and rows[index - 1].context != row.context:
            table.add_section()
        cells = [
            cell
            for name in ("policy", "best_static", "oracle")
            for short, long in ((getattr(row.rows_16, name), getattr(row.rows_64, name)),)
            for cell in (f"{short:.1f}", f"{long:.1f}", f"{100 * (long / short - 1):+.0f} %")
        ]
        table.add_row(row.workload, f"{row.context}", f"{row.plain:.1f}", *cells)
    console.print(table)


def _table(title: str) -> Table:
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    table.add_column("workload", no_wrap=True)
    return table


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return round(value, 4) if isinstance(value, float) else value
