"""Measured costs: what steps of several row counts take on this machine, timed when a model is opened.

Steps run on blocks and a slot of pools of its own, over zeros, before any request: nothing is left behind,
and what a step costs does not depend on what it reads. A curve is remembered in the user's cache folder with
how steady it was, and again as it was corrected when that was much; one that was not steady, that steps
contradicted, or whose file does not read well is measured again. Costs change time, never tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

import quickdraft
from quickdraft.config import cache_folder
from quickdraft.engine.plan import PlanEntry, StepPlan
from quickdraft.engine.runner import ModelRunner
from quickdraft.engine.step_timing import LEAST_ROWS, Rounds, Timed
from quickdraft.models.hashes import remembered_sha256, sha256_of
from quickdraft.models.interface import LoadedModel
from quickdraft.ops.interface import BLOCK_TOKENS, NUMERICS
from quickdraft.speculate.cost_curve import KnownCosts, MeasuredCosts, StepTimes
from quickdraft.speculate.costs import ConstantCosts
from quickdraft.speculate.draft import Drafter, TimedDrafter
from quickdraft.speculate.online_costs import OnlineCosts
from quickdraft.state.sequence import blocks_for
from quickdraft.state.slots import SlotPool
from quickdraft.types import MAX_ROWS

SCHEMA: Final = "quickdraft-costs-3"
FOLDER: Final = "costs"
ROWS: Final = (1, 4, 16, 2, 8)  # in the order they are timed: the widest span first
ROWS_ON_CARD: Final = (1, 4, 16, 32, 2, 8)  # where more than 16 are drafted at a time
FAR_CONTEXT: Final = 2048
BUDGET_SECONDS: Final = 1.8  # once more where the rounds differ much
_HASHED_AT_ONCE: Final = 256 << 20  # bytes of model files that take less to hash than to measure


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one sequence in a step: so many, of which the last `drafted` are, and the one before is wanted
    too."""

    count: int
    drafted: int


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory to run steps in before any request does: blocks and slots that nobody owns yet."""

    runner: ModelRunner
    blocks: int  # of runner.kv that sequences may use
    slots: SlotPool | None
    max_context: int

    @property
    def most_rows(self) -> int:
        """Rows of the longest verify block."""
        kept = self.slots.max_pending + 1 if self.slots is not None else MAX_ROWS
        return min(kept, MAX_ROWS, self.runner.max_wanted, self.max_context)

    def plan(
        self, step: Sequence[Rows], context: int | None = None, noise: tuple[float, int] | None = None
    ) -> StepPlan | None:
        """A step, greedy or drawn with `noise`, of these sequences behind `context` tokens that nobody
        computed and all share; None for the context: the longest. None where that does not fit."""
        longest = max(rows.count for rows in step)
        if context is None:
            left = self.blocks - sum(blocks_for(rows.count) for rows in step)
            context = min(left, (self.max_context - longest) // BLOCK_TOKENS) * BLOCK_TOKENS
        first, over = divmod(context, BLOCK_TOKENS)
        shared, entries = range(first), list[PlanEntry]()
        for index, rows in enumerate(step):
            own = range(first, first + blocks_for(over + rows.count))
            tokens, slot = (0,) * rows.count, index if self.slots is not None else -1
            entries.append(
                PlanEntry(
                    "scratch", tokens, context, rows.drafted + 1, tokens[: rows.drafted], "",
                    np.array([*shared, *own], np.int32), slot, best_only=noise is None, noise=noise,
                )
            )  # fmt: skip
            first = own.stop
        fits = context >= 0 and first <= self.blocks and context + longest <= self.max_context
        return StepPlan(tuple(entries)) if fits else None


def measured_costs(scratch: Scratch, drafters: Sequence[Drafter], file: Path | None) -> KnownCosts:
    """The curve of this model here, remembered in `file` or timed now; the constant one where the model takes
    too long to time a step of four rows. One that was not steady when it was timed, as others used the
    machine, is timed again at every start until one is; meanwhile the steadiest is used."""
    known = remembered(file) if file is not None else None
    if known is not None and known.steady:
        return MeasuredCosts(known.times)
    timed = time_steps(scratch, drafters)
    if timed is None:
        return ConstantCosts()
    best = timed if known is None or timed.spread <= known.spread else known
    if file is not None and best is timed:
        remember(file, timed)
    return MeasuredCosts(best.times)


def time_steps(
    scratch: Scratch, drafters: Sequence[Drafter], budget_seconds: float = BUDGET_SECONDS
) -> Timed | None:
    """Steps of 1 to 16 rows (32 on a card) near context 0 and after 2,048 tokens (fewer where they do not
    fit), and what the models of drafters take; None where the time does not suffice for four rows. Rounds
    that are not steady get the budget once more."""
    all_rows = ROWS if scratch.runner.ops.free_memory_bytes() is None else ROWS_ON_CARD
    rows = [count for count in all_rows if count <= scratch.most_rows]
    room = min(scratch.max_context, scratch.blocks * BLOCK_TOKENS) - max(rows)
    contexts = sorted({0, min(FAR_CONTEXT, max(0, room))})
    kv, used = scratch.runner.kv, blocks_for(contexts[-1] + max(rows))
    kv.take(used)  # memory that was never written is not read from memory
    timed = [one for one in drafters if isinstance(one, TimedDrafter)]
    passes = {one.source: {most: partial(one.time_pass, most) for most in one.pass_tokens} for one in timed}
    upkeep = {one.source: one.time_upkeep for one in timed}
    rounds = Rounds(lambda c, r: time_step(scratch, c, r), passes, upkeep, rows, contexts)
    rounds.run(budget_seconds)
    found = rounds.result()
    if found is not None and not found.steady:
        rounds.run(budget_seconds)
        found = rounds.result()
    return found


def time_step(scratch: Scratch, context: int, rows: int) -> float:
    """Seconds of one greedy step of a sequence of its own after `context` tokens that nobody computed, all
    rows drafted but the first."""
    plan = scratch.plan([Rows(rows, rows - 1)], context)
    assert plan is not None, "it was asked what fits"
    if scratch.slots is not None:
        scratch.slots.storage.clear(0)
    started = time.perf_counter()
    scratch.runner.run(plan)
    return time.perf_counter() - started


def remembered(file: Path) -> Timed | None:
    """What is on file; None when there is no file, or a damaged one."""
    try:
        value: Any = json.loads(file.read_bytes())
        if value["schema"] != SCHEMA:
            return None
        times = StepTimes(
            tuple(value["rows"]),
            tuple(value["contexts"]),
            tuple(tuple(line) for line in value["seconds"]),
            dict(value["passes"]),
            dict(value["upkeep"]),
            blocks_of(value["blocks"]),
        )
        spread = value["spread"]
        sound = _sound(times) and type(spread) is float and 0.0 <= spread < math.inf
        return Timed(times, spread) if sound else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def blocks_of(value: Any) -> dict[str, dict[int, float]]:
    """StepTimes.blocks from JSON, whose keys are texts; ValueError or TypeError for anything else."""
    found = {source: dict(of) for source, of in dict(value).items()}
    return {source: {int(most): seconds for most, seconds in of.items()} for source, of in found.items()}


def _sound(times: StepTimes) -> bool:
    rows, contexts, lines = times.rows, times.contexts, times.seconds
    numbers = [*(seconds for line in lines for seconds in line), *times.passes.values()]
    numbers += times.upkeep.values()
    numbers += [seconds for of in times.blocks.values() for seconds in of.values()]
    return (
        all(type(number) is int for number in (*rows, *contexts))
        and all(type(number) is float and math.isfinite(number) and number > 0 for number in numbers)
        and all(of and min(of) > 0 for of in times.blocks.values())
        and rows[:1] == (1,) and contexts[:1] == (0,) and LEAST_ROWS <= rows[-1] <= MAX_ROWS
        and list(rows) == sorted(set(rows)) and list(contexts) == sorted(set(contexts))
        and len(lines) == len(contexts) and all(len(line) == len(rows) for line in lines)
    )  # fmt: skip


def remember(file: Path, timed: Timed) -> None:
    """Write the file, whole or not at all. Best effort: without it, the next start measures again."""
    times = timed.times
    value = {
        "schema": SCHEMA, "rows": times.rows, "contexts": times.contexts, "seconds": times.seconds,
        "passes": dict(times.passes), "upkeep": dict(times.upkeep), "spread": timed.spread,
        "blocks": {source: dict(of) for source, of in times.blocks.items()},
    }  # fmt: skip
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        try:
            with open(descriptor, "w", encoding="ascii") as out:
                json.dump(value, out)
            os.replace(temporary, file)
        except OSError:
            os.unlink(temporary)


def settle_curve(costs: OnlineCosts, file: Path) -> None:
    """What the steps of a run say of its curve: the next start uses it as corrected, measures again one that
    they contradict, or finds it as it is."""
    corrected = costs.corrected
    if corrected is not None:
        remember(file, Timed(corrected, 0.0))
    elif costs.doubtful:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def curve_file(
    loaded: LoadedModel, runner: ModelRunner, drafters: Sequence[Drafter], drafter_files: Sequence[Path] = ()
) -> Path | None:
    """Where the curve is kept: by all that it depends on. None for files that would have to be hashed for
    longer than measuring takes. `drafter_files`: what drafters were opened from beside the model's own."""
    sources = sorted(one.source for one in drafters if isinstance(one, TimedDrafter))
    cache, files = cache_folder(), [*loaded.files, *drafter_files]
    try:
        known = [remembered_sha256(path, cache) for path in files]
        if None in known:
            if sum(path.stat().st_size for path in files) > _HASHED_AT_ONCE:
                return None
            known = [sha256_of(path, cache) for path in files]
    except OSError:
        return None
    parts = [
        SCHEMA, quickdraft.__version__, NUMERICS, platform.node(), known, loaded.notes,
        runner.ops.explain(), runner.ops.activations, loaded.kv_dtype, sources,
    ]  # fmt: skip
    name = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return cache / FOLDER / f"{name[:32]}.json"
