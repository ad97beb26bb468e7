"""Heaviest: the heaviest steps an engine will be asked for, run on a card before it serves.

So kernels are compiled, workspaces have their full size, graphs are captured and memory is at its peak before
there is a user; MemoryError where the card runs out. Steps run over free blocks and slots, as those that are
timed (engine/measured_costs.py). Decides nothing; knows no request.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from quickdraft.engine.measured_costs import Rows, Scratch
from quickdraft.speculate.choose import LogitsRow
from quickdraft.speculate.draft import TimedDrafter
from quickdraft.types import MAX_ROWS

TIMES: Final = 2  # a shape is captured when it is met again, the first of all once more: see Ops.contexts
TOP: Final = 20  # candidates of a sampled token
NOISE: Final = (1.0, 0)  # temperature and seed


@dataclass(frozen=True, slots=True)
class Heaviest:
    """What was run: steps, the rows of the largest, and the time of all."""

    count: int
    rows: int
    seconds: float


def run_heaviest(scratch: Scratch, drafters: Sequence[object], sequences: int) -> Heaviest:
    """Verify blocks of every shape in use and the longest chunks of prompts at the end of the longest
    context, the passes of drafters, and what is asked of a row; MemoryError where memory runs out."""
    started, count, most = time.perf_counter(), 0, 0
    for step, context in heaviest_steps(scratch, sequences):
        plan = scratch.plan(step, context, NOISE)
        if plan is None:  # a pool that holds no such step gets none
            continue
        for _ in range(TIMES if count else TIMES + 1):
            logits = scratch.runner.run(plan)
            count += 1
        most = max(most, plan.rows)
        _ask(logits[-1][0])
    for drafter in drafters:
        if isinstance(drafter, TimedDrafter):
            for _ in range(TIMES):
                drafter.time_upkeep()
                for tokens in drafter.pass_tokens:
                    drafter.time_pass(tokens)
    storage = scratch.slots.storage if scratch.slots is not None else None
    if storage is not None and storage.slots > storage.sequences:
        storage.copy(0, storage.sequences)  # to a checkpoint and back
        storage.copy(storage.sequences, 0)
    return Heaviest(count, most, time.perf_counter() - started)


def _ask(row: LogitsRow) -> None:
    """What requests ask of a row of logits."""
    row.argmax()
    row.top(TOP)
    row.gumbel(*NOISE, 0)
    row.full()


def heaviest_steps(scratch: Scratch, sequences: int) -> Iterator[tuple[tuple[Rows, ...], int | None]]:
    """With the context of each, None: the longest. The largest first, so that what workspaces grow to is
    known before graphs keep them: a chunk of one prompt beside the longest blocks of all other sequences, a
    chunk alone, then blocks of 2, 4 .. sequences, as few shapes as reach every size, as a program captures so
    many and no more; then blocks of one sequence at every context that prepares others."""
    runner, longest = scratch.runner, scratch.most_rows
    chunk = min(runner.max_rows - runner.max_wanted, scratch.max_context)
    others = tuple(_blocks(sequences - 1, longest, runner.max_wanted - 1))
    if others:
        yield (*others, Rows(chunk, 0)), None
    yield (Rows(chunk, 0),), None
    for count in _powers(sequences):
        for rows in _powers(longest):
            if count > 1 and count * rows <= max(MAX_ROWS, count):
                yield (Rows(rows, rows - 1),) * count, None
    for end in runner.ops.contexts(scratch.max_context):
        for rows in _powers(longest):
            yield (Rows(rows, rows - 1),), max(end - rows, 0)


def _blocks(count: int, rows: int, wanted: int) -> Iterator[Rows]:
    """Blocks of that many sequences, as long as the rows whose logits are wanted allow."""
    each = min(rows, wanted // count) if count else 0
    return (Rows(each, each - 1) for _ in range(count if each else 0))


def _powers(most: int) -> list[int]:
    """1, 2, 4 ... and `most` itself, descending."""
    return sorted({most, *(1 << bit for bit in range(most.bit_length()) if 1 << bit <= most)}, reverse=True)
