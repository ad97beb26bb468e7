"""Measured costs: what steps of several row counts take on this machine, timed when a model is opened.

Steps run on blocks and a slot of pools of its own, over zeros, before any request: nothing is left behind,
and what a step costs does not depend on what it reads. Time is bounded, not repeats, so a large model is not
held up. A curve is remembered in the user's cache folder, and again as it was corrected when that was much;
a file there that does not read well is measured again. Costs change time, never tokens.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import quickdraft
from quickdraft.config import cache_folder
from quickdraft.engine.plan import PlanEntry, StepPlan
from quickdraft.engine.runner import ModelRunner
from quickdraft.models.hashes import remembered_sha256, sha256_of
from quickdraft.models.interface import LoadedModel
from quickdraft.ops.interface import BLOCK_TOKENS, NUMERICS
from quickdraft.speculate.cost_curve import KnownCosts, MeasuredCosts, StepTimes
from quickdraft.speculate.costs import ConstantCosts
from quickdraft.speculate.draft import Drafter, TimedDrafter
from quickdraft.state.blocks import BlockPool
from quickdraft.state.sequence import SequenceState, blocks_for
from quickdraft.state.slots import SlotPool
from quickdraft.types import MAX_ROWS

SCHEMA: Final = "quickdraft-costs-1"
FOLDER: Final = "costs"
ROWS: Final = (1, 4, 16, 2, 8)  # in the order they are timed: the widest span first
LEAST_ROWS: Final = 4  # a curve needs steps of at least so many
FAR_CONTEXT: Final = 2048
ROUNDS: Final = 9
BUDGET_SECONDS: Final = 1.5
_HASHED_AT_ONCE: Final = 256 << 20  # bytes of model files that take less to hash than to measure
_EXPECTED: Final = ConstantCosts()

Step = Callable[[int, int], float]  # (context, rows) -> seconds
Pass = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory to run steps in before any request does; pools over it are made and dropped here."""

    runner: ModelRunner
    blocks: int  # of runner.kv that sequences may use
    slots: SlotPool | None
    max_context: int

    @property
    def most_rows(self) -> int:
        """Rows of the longest verify block."""
        kept = self.slots.max_pending + 1 if self.slots is not None else MAX_ROWS
        return min(kept, MAX_ROWS, self.runner.max_wanted, self.max_context)


def measured_costs(scratch: Scratch, drafters: Sequence[Drafter], file: Path | None) -> KnownCosts:
    """The curve of this model here, remembered in `file` or timed now; the constant one where the model takes
    too long to time a step of four rows."""
    timed = {one.source: one.time_pass for one in drafters if isinstance(one, TimedDrafter)}
    times = remembered(file) if file is not None else None
    if times is None:
        times = time_steps(scratch, timed)
        if times is None:
            return ConstantCosts()
        if file is not None:
            remember(file, times)
    return MeasuredCosts(times)


def time_steps(
    scratch: Scratch, passes: Mapping[str, Pass], budget_seconds: float = BUDGET_SECONDS
) -> StepTimes | None:
    """Steps of 1 to 16 rows near context 0 and after 2,048 tokens (fewer where they do not fit), and passes
    of drafters; None where the time does not suffice for four rows."""
    rows = [count for count in ROWS if count <= scratch.most_rows]
    room = min(scratch.max_context, scratch.blocks * BLOCK_TOKENS) - max(rows)
    contexts = sorted({0, min(FAR_CONTEXT, max(0, room))})
    kv, used = scratch.runner.kv, blocks_for(contexts[-1] + max(rows))
    kv.keys[:, :used] = 0  # memory that was never written is not read from memory
    kv.values[:, :used] = 0
    return medians(lambda c, r: _time_step(scratch, c, r), passes, rows, contexts, budget_seconds)


def medians(
    step: Step,
    passes: Mapping[str, Pass],
    rows: Sequence[int],
    contexts: Sequence[int],
    budget_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimes | None:
    """Medians of at most ROUNDS rounds over all of these. A step that is expected to end beyond the budget
    is not begun; what is left are the row counts timed at all contexts, and a later context only where its
    first three row counts were."""
    end = clock() + budget_seconds
    step(contexts[0], 1)  # the first reads the weights into caches, and huge pages into the table
    found: dict[tuple[int, int], list[float]] = {}
    passed: dict[str, list[float]] = {source: [] for source in passes}
    for _ in range(ROUNDS):
        for context in contexts:
            for count in rows:
                if clock() + _expected(found, contexts[0], context, count) < end:
                    found.setdefault((context, count), []).append(step(context, count))
        for source, time_pass in passes.items():
            if clock() < end:
                passed[source].append(time_pass())
    first, *later = contexts
    whole = [first, *(each for each in later if all((each, count) in found for count in rows[:3]))]
    counts = [count for count in sorted(rows) if all((context, count) in found for context in whole)]
    if counts[-1:] < [LEAST_ROWS]:
        return None
    seconds = tuple(tuple(statistics.median(found[context, count]) for count in counts) for context in whole)
    each = {source: statistics.median(times) for source, times in passed.items() if times}
    return StepTimes(tuple(counts), tuple(whole), seconds, each)


def _expected(found: Mapping[tuple[int, int], list[float]], near: int, context: int, rows: int) -> float:
    """Seconds of a step, from one row there (else near) and so many rows near (else the constant cost)."""
    if (near, 1) not in found:
        return 0.0
    one = min(found[near, 1])
    cost = min(found[near, rows]) / one if (near, rows) in found else _EXPECTED.step_cost(rows, near)
    return cost * min(found.get((context, 1), (one,)))


def _time_step(scratch: Scratch, context: int, rows: int) -> float:
    """Seconds of one greedy step of a sequence of its own, all rows drafted but the first."""
    slots = SlotPool(scratch.slots.storage) if scratch.slots is not None else None
    pool = BlockPool(scratch.blocks)
    state = SequenceState(pool, slots)
    state.begin()
    state.resume(pool.take(blocks_for(context)), context)
    state.reserve(rows, rows - 1)
    tokens = (0,) * rows
    entry = PlanEntry(
        "costs", tokens, context, rows, tokens[1:], "", state.block_table, state.slot, best_only=True
    )
    started = time.perf_counter()
    scratch.runner.run(StepPlan((entry,)))
    return time.perf_counter() - started


def remembered(file: Path) -> StepTimes | None:
    """The times on file; None when there is no file, or a damaged one."""
    try:
        value: Any = json.loads(file.read_bytes())
        if value["schema"] != SCHEMA:
            return None
        times = StepTimes(
            tuple(value["rows"]),
            tuple(value["contexts"]),
            tuple(tuple(line) for line in value["seconds"]),
            dict(value["passes"]),
        )
        return times if _sound(times) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _sound(times: StepTimes) -> bool:
    rows, contexts, lines = times.rows, times.contexts, times.seconds
    numbers = [*(seconds for line in lines for seconds in line), *times.passes.values()]
    return (
        all(type(number) is int for number in (*rows, *contexts))
        and all(type(number) is float and math.isfinite(number) and number > 0 for number in numbers)
        and rows[:1] == (1,) and contexts[:1] == (0,) and LEAST_ROWS <= rows[-1] <= MAX_ROWS
        and list(rows) == sorted(set(rows)) and list(contexts) == sorted(set(contexts))
        and len(lines) == len(contexts) and all(len(line) == len(rows) for line in lines)
    )  # fmt: skip


def remember(file: Path, times: StepTimes) -> None:
    """Write the file, whole or not at all. Best effort: without it, the next start measures again."""
    value = {"schema": SCHEMA, **asdict(times), "passes": dict(times.passes)}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        try:
            with open(descriptor, "w", encoding="ascii") as out:
                json.dump(value, out)
            os.replace(temporary, file)
        except OSError:
            os.unlink(temporary)


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
        runner.ops.explain(), loaded.kv_dtype, sources,
    ]  # fmt: skip
    name = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return cache / FOLDER / f"{name[:32]}.json"
