"""ToyModel: a Runner in pure Python whose every logit depends on all tokens it really stored.

Its "KV" is one token per slot of a paged memory, written when a row is computed and read back
through the block table; the next-token logits are a function of a running hash of what is read.
A rejected draft that leaks, a stale or poisoned block, a wrong rollback: each changes the output.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quickdraft.engine.drafters import Drafting
from quickdraft.engine.loop import Engine
from quickdraft.engine.plan import StepPlan
from quickdraft.engine.request import Request
from quickdraft.engine.scheduler import Scheduler
from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.ops.reference import gumbel, rows
from quickdraft.speculate.draft import Draft, Drafter, SequenceView, Verdict
from quickdraft.state.blocks import BlockPool
from quickdraft.types import SamplingParams

VOCABULARY = 32
POISON = -1


class ToyRow:
    """LogitsRow over a plain array."""

    def __init__(self, values: NDArray[np.float32]) -> None:
        self.values = values

    def argmax(self) -> int:
        return int(rows.argmax(self.values[None])[0])

    def top(self, k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return rows.top(self.values, k)

    def full(self) -> NDArray[np.float32]:
        return self.values

    def gumbel(
        self,
        temperature: float,
        seed: int,
        position: int,
        values: NDArray[np.float32] | None = None,
        ids: NDArray[np.int64] | None = None,
    ) -> int:
        return gumbel.choice(self.values if values is None else values, temperature, seed, position, ids)


def toy_logits(tokens: Sequence[int], sharpness: float = 3.0) -> NDArray[np.float32]:
    """Logits [VOCABULARY] after `tokens`: pseudo-random in a hash of the last few and of all."""
    state = 0
    for token in tokens:
        state = (state * 1_000_003 + token + 7) % (2**61 - 1)
    period = tokens[-7] if len(tokens) >= 7 and state % 5 else state % VOCABULARY
    noise = np.random.default_rng(state).normal(0, 1, VOCABULARY)
    noise[period % VOCABULARY] += sharpness  # mostly periodic text, so that lookup finds something
    return noise.astype(np.float32)


class ToyModel:
    """engine.plan.Runner; `broken_at` makes the row at that position NaN."""

    def __init__(self, blocks: int, broken_at: int | None = None) -> None:
        self.memory = [[POISON] * BLOCK_TOKENS for _ in range(blocks)]
        self.broken_at = broken_at
        self.plans: list[StepPlan] = []

    def poison(self, block: int) -> None:
        self.memory[block] = [POISON] * BLOCK_TOKENS

    def copy_block(self, source: int, target: int) -> None:
        self.memory[target] = list(self.memory[source])

    def run(self, plan: StepPlan) -> list[list[ToyRow]]:
        self.plans.append(plan)
        return [self._entry(entry) for entry in plan.entries]

    def _entry(self, entry) -> list[ToyRow]:
        for offset, token in enumerate(entry.tokens):
            block, slot = divmod(entry.start + offset, BLOCK_TOKENS)
            self.memory[entry.block_table[block]][slot] = token
        end = entry.start + len(entry.tokens)
        stored = [self.memory[entry.block_table[p // BLOCK_TOKENS]][p % BLOCK_TOKENS] for p in range(end)]
        result = []
        for position in range(end - entry.wanted, end):
            values = toy_logits(stored[: position + 1])
            result.append(ToyRow(values * np.float32(np.nan) if position == self.broken_at else values))
        return result


class ScriptedDrafter:
    """Proposes from a script: the first `right` tokens of the truth, then wrong ones."""

    source = "lookup"

    def __init__(self, truth: dict[str, list[int]], right: int, length: int, seed: int = 0) -> None:
        self.truth, self.right, self.length = truth, right, length
        self.random = random.Random(seed)

    def propose(self, view: SequenceView, budget: int) -> Draft:
        truth = self.truth[view.request_id][len(view.tokens) - view.prompt_length :]
        tokens = []
        for index in range(min(self.length, budget)):
            known = truth[index] if index < len(truth) else self.random.randrange(VOCABULARY)
            tokens.append(known if index < self.right else (known + 1 + index) % VOCABULARY)
        return Draft(tuple(tokens), self.source, match_length=12)

    def observe(self, view: SequenceView, verdict: Verdict, taps: object) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


class AlwaysDraft(Drafting):
    """Drafting without a gain rule: whatever the drafter says, at full length."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__([drafter])
        self.drafter = drafter

    def propose(self, view, speculation, budget: int) -> Draft:
        return self.drafter.propose(view, budget)


def toy_engine(
    drafting: Drafting,
    *,
    blocks: int = 64,
    chunk_rows: int = 32,
    max_sequences: int = 4,
    broken_at: int | None = None,
) -> Engine:
    """An engine over a ToyModel whose freed blocks are poisoned."""
    model = ToyModel(blocks, broken_at)
    scheduler = Scheduler(
        BlockPool(blocks, model.poison),
        max_rows=chunk_rows + 64, chunk_rows=chunk_rows, max_sequences=max_sequences, max_wanted=64,
    )  # fmt: skip
    return Engine(scheduler, model, drafting)


def run_all(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Output ids by request id; checks progress and that nothing leaks."""
    for request in requests:
        engine.add(request)
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        assert steps < 10_000, "the engine makes no progress"
    assert engine.free_blocks == engine.scheduler.pool.count, "blocks leaked"
    return {request.request_id: request.output_ids for request in requests}


def toy_request(name: str, prompt: Sequence[int], params: SamplingParams, max_context: int = 400) -> Request:
    return Request(name, prompt, params, eos_ids=(0,), max_context=max_context)
