"""Break-even: the tokens per step that blocks of some length need before they are faster than plain decoding.

By the engine's own cost curve, which also decides how long its drafts are: a step that verifies a block costs
so many plain steps, and its draft some more; a plain step gives one token. Beside it stands what was reached,
and in how many steps how many drafted tokens were accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from quickdraft.bench.report import BenchResult, StageResult, stage_label
from quickdraft.speculate.costs import Costs, drafting_cost
from quickdraft.types import Speculation

BLOCK_ROWS: Final = (2, 4, 8, 16, 32, 64)
SHOWN_ROWS: Final = BLOCK_ROWS[:4]
ACCEPTED: Final = ((0, 0), (1, 1), (2, 3), (4, 7), (8, 63))  # accepted tokens of a step, from and to


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The costs of an opened model; `longest`: the most tokens of a draft, of sources that run a model."""

    costs: Costs
    sources: Sequence[str]
    longest: Mapping[str, int]

    def needed(self, stage: Speculation, context: int, most_rows: int) -> dict[int, float]:
        """By rows of a block that the stage can verify: tokens per step at which it gains nothing."""
        if stage.off:
            return {}
        sources = self.sources if stage.auto else stage.sources
        limit = most_rows
        if all(source in self.longest for source in sources):
            limit = min(limit, 1 + max(self.longest[source] for source in sources))
        steps = self.costs.step_costs(context)
        return {rows: steps[rows] + self._drafting(sources, rows - 1) for rows in BLOCK_ROWS if rows <= limit}

    def _drafting(self, sources: Sequence[str], count: int) -> float:
        """Plain steps that the dearest of these sources takes to draft `count` tokens, or all it can."""
        return max(
            drafting_cost(self.costs, source, min(count, self.longest.get(source, count)))
            for source in sources
        )


def print_break_even(result: BenchResult, console: Console) -> None:
    """Per workload and stage: tokens per step reached and needed, and how the accepted drafts are spread."""
    stages = [(work.name, stage) for work in result.workloads for stage in work.stages if stage.break_even]
    if not stages:
        return
    table = Table(
        title="tokens per step: reached, and needed by blocks of 2 to 16 rows to gain;\n"
        "% of steps with so many drafted tokens accepted",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("workload", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    table.add_column("reached", justify="right", no_wrap=True)
    for rows in SHOWN_ROWS:
        table.add_column(f"@{rows}", justify="right", no_wrap=True)
    for low, high in ACCEPTED:
        name = f"{low}" if low == high else f"{low}+" if high == ACCEPTED[-1][1] else f"{low}-{high}"
        table.add_column(f"{name}", justify="right", no_wrap=True)
    before = ""
    for name, stage in stages:
        if name != before and before:
            table.add_section()
        table.add_row(name if name != before else "", stage_label(stage.stage), *_cells(stage))
        before = name
    console.print(table)
    console.print(result.costs, markup=False, highlight=False, soft_wrap=True)


def shares(accepted_per_step: Sequence[int]) -> list[float]:
    """Of all steps, the share in each class of ACCEPTED; nothing for no step."""
    total = sum(accepted_per_step)
    return [sum(accepted_per_step[low : high + 1]) / total for low, high in ACCEPTED] if total else []


def _cells(stage: StageResult) -> list[str]:
    reached = f"{stage.tokens_per_step:.2f}" if stage.tokens_per_step is not None else "FAIL"
    needed = [stage.break_even.get(rows) for rows in SHOWN_ROWS]
    spread = [f"{100 * share:.0f}" for share in shares(stage.accepted_per_step)]
    return [reached, *("" if value is None else f"{value:.2f}" for value in needed), *spread]
