"""Batch arms: several requests decoded together under one setting, beside the same ones under another.

Each prompt is read once and every arm goes on from there, as in engine_arms.py. Tokens of a batch come in
another order under another setting, so turns are counted in tokens of all, and ids compared by request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from quickdraft.bench.arms import WINDOW_TOKENS
from quickdraft.bench.engine_arms import EngineArms
from quickdraft.bench.paired import Turn
from quickdraft.engine.loop import Engine
from quickdraft.engine.request import Request
from quickdraft.types import SamplingParams, Speculation


@dataclass(slots=True)
class BatchRun:
    """What was recorded of one setting."""

    engine: Engine
    requests: list[Request] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)

    @property
    def outputs(self) -> list[tuple[int, ...]]:
        """Ids by request."""
        return [tuple(one.tokens[one.prompt_length :]) for one in self.requests]

    def advance_to(self, tokens: int) -> None:
        """Whole steps until so many ids are out over all requests, or all ended."""
        before = emitted = self.tokens
        started = time.perf_counter()
        while emitted < tokens and self.engine.has_work:
            emitted += sum(len(event.tokens) for event in self.engine.step())
        if emitted > before:
            self.turns.append(Turn(emitted - before, time.perf_counter() - started))


def run_batch(
    readers: Sequence[EngineArms],
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    settings: Sequence[Speculation],
) -> list[BatchRun]:
    """Decode these prompts together under every setting in turns, 32 tokens of each at a time; one BatchRun
    per setting, in order. `readers`: one per prompt, over the parts of one engine; who made them closes
    them."""
    runs: list[BatchRun] = []
    try:
        for setting in settings:
            runs.append(BatchRun(readers[0].engine()))
            for reader, prompt, one in zip(readers, prompts, params, strict=True):
                request = reader.join(runs[-1].engine, prompt, replace(one, speculation=setting))
                runs[-1].requests.append(request)
        window = WINDOW_TOKENS * len(prompts)
        target, order = window, runs
        while any(run.engine.has_work for run in runs):
            for run in order:
                run.advance_to(target)
            target, order = target + window, order[::-1]
    finally:
        for run in runs:
            for request in run.requests:
                run.engine.abort(request.request_id)
    return runs
