"""`bench auto`: `auto` beside plain decoding on the model itself, on every workload the policy is judged by.

The two decode the same tokens in turns of 32, in one process, so what the machine does else hits both.
Rounds over all workloads until the time is up; then the ratio of speeds with its 95 % interval, and whether
that says that drafting costs more than it may. No speed of ids that differ.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from quickdraft.bench.arms import WINDOW_TOKENS, run_prompt
from quickdraft.bench.batch_arms import run_batch
from quickdraft.bench.engine_arms import EngineArms
from quickdraft.bench.measure import OFF
from quickdraft.bench.paired import Turn, paired_ratio, window_seconds
from quickdraft.bench.record_traces import MIXED, MIXED_TRACES, sampled_params, traced_workloads
from quickdraft.bench.replay import AUTO
from quickdraft.bench.report import check_json_folder, say, write_json
from quickdraft.bench.workloads import PromptIds, encoding_of, prompt_ids
from quickdraft.engine.opened import EngineConfig, Opened, open_model
from quickdraft.errors import EngineError
from quickdraft.speculate.cost_curve import explain_costs
from quickdraft.types import Timings

SCHEMA: Final = "quickdraft-auto-1"
LEAST: Final = 0.97  # of plain decoding's speed
MOST_ROUNDS: Final = 8
HOLDS, OPEN, FAILS = "holds", "undecided", "fails"


@dataclass(frozen=True, slots=True)
class LiveRow:
    """One workload; `verdict` on "not slower than plain beyond 3 %" by the interval. `rejected`: drafted
    tokens that were verified and refused."""

    workload: str
    ratio: float
    low: float
    high: float
    tokens: int
    steps: int
    drafted: int
    rejected: int
    verdict: str


@dataclass(slots=True)
class _Seen:
    """Windows and counts of a workload, over all rounds."""

    plain: list[float] = field(default_factory=list)
    auto: list[float] = field(default_factory=list)
    tokens: int = 0
    timings: list[Timings] = field(default_factory=list)

    def add(
        self, window: int, plain: Sequence[Turn], auto: Sequence[Turn], timings: Sequence[Timings]
    ) -> None:
        """One decoding; `window` in tokens."""
        self.plain += window_seconds(plain, window)
        self.auto += window_seconds(auto, window)
        self.tokens += sum(turn.tokens for turn in auto)
        self.timings += timings

    def row(self, name: str) -> LiveRow:
        ratio = paired_ratio(self.plain, self.auto)
        low, high = ratio.low or 0.0, ratio.high or float("inf")
        verdict = HOLDS if low >= LEAST else FAILS if high < LEAST else OPEN
        steps = sum(one.steps for one in self.timings)
        drafted = sum(sum(one.drafted.values()) for one in self.timings)
        accepted = sum(sum(one.accepted.values()) for one in self.timings)
        return LiveRow(
            name, ratio.value, low, high, self.tokens, steps, drafted, drafted - accepted, verdict
        )  # fmt: skip


def run(
    model: str | Path,
    seconds: float,
    threads: int | None = None,
    drafters: tuple[Path, ...] | None = None,
    json_path: Path | None = None,
) -> list[LiveRow]:
    """Rounds until `seconds` have passed, at least one; EngineError where ids differ."""
    check_json_folder(json_path)
    config = EngineConfig(threads=threads, prefix_cache=False, drafters=drafters, measure_costs=True)
    end = time.monotonic() + seconds
    with closing(open_model(model, config)) as opened:
        rounds, seen, began = 0, dict[str, _Seen](), time.monotonic()
        while not rounds or (
            rounds < MOST_ROUNDS and time.monotonic() + (time.monotonic() - began) / rounds < end
        ):
            _round(opened, seen)
            rounds += 1
        rows = [one.row(name) for name, one in seen.items()]
        _print(rows, rounds, explain_costs(opened.costs))
        if json_path is not None:
            write_json(json_path, {"schema": SCHEMA, "rounds": rounds, "rows": [asdict(row) for row in rows]})
    return rows


def _round(opened: Opened, seen: dict[str, _Seen]) -> None:
    encoding, known = encoding_of(opened), dict[str, PromptIds]()
    engine, copy_block = opened.engine, opened.memory.storage.copy_block
    for workload in traced_workloads():
        say(f"{workload.name}: off, auto")
        with closing(EngineArms(engine, opened.request, copy_block)) as runner:
            for index, prompt in enumerate(prompt_ids(workload, encoding)):
                known[f"{workload.name}/{index}"] = prompt
                params = sampled_params(workload.name, prompt.max_tokens)
                plain, auto = run_prompt(runner, prompt.ids, params, (OFF, AUTO))
                _check(workload.name, [tuple(plain.ids)], [tuple(auto.ids)])
                one = seen.setdefault(workload.name, _Seen())
                one.add(WINDOW_TOKENS, plain.turns, auto.turns, [auto.arm.timings])
    say(f"{MIXED}: off, auto")
    prompts = [known[name] for name in MIXED_TRACES]
    with ExitStack() as stack:
        readers = [
            stack.enter_context(closing(EngineArms(engine, opened.request, copy_block))) for _ in prompts
        ]
        greedy = [sampled_params("", prompt.max_tokens) for prompt in prompts]
        off, on = run_batch(readers, [prompt.ids for prompt in prompts], greedy, (OFF, AUTO))
        _check(MIXED, off.outputs, on.outputs)
        timings = [request.timings for request in on.requests]
        batch = seen.setdefault(MIXED, _Seen())
        batch.add(WINDOW_TOKENS * len(prompts), off.turns, on.turns, timings)


def _check(workload: str, plain: Sequence[tuple[int, ...]], auto: Sequence[tuple[int, ...]]) -> None:
    if list(plain) != list(auto):
        raise EngineError(f"{workload}: auto gave other ids than plain decoding", hint="quickdraft doctor")


def _print(rows: Sequence[LiveRow], rounds: int, costs: str) -> None:
    table = Table(
        title=f"auto over plain decoding, {rounds} rounds; not slower beyond 3 %?", title_justify="left"
    )
    table.add_column("workload", no_wrap=True)
    for name in ("speed", "95 %", "tok/step", "rejected", "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.workload, f"{row.ratio:.3f} x", f"{row.low:.3f} to {row.high:.3f}",
            f"{row.tokens / row.steps:.2f}", f"{row.rejected}", row.verdict,
        )  # fmt: skip
    console = Console()
    console.print(table)
    console.print(costs, markup=False, highlight=False, soft_wrap=True)
