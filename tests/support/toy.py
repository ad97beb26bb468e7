"""ToyModel: a Runner in pure Python whose every logit depends on all tokens it really stored.

Its "KV" is one token per slot of a paged memory, written when a row is computed and read back
through the block table; the next-token logits are a function of a running hash of what is read.
A rejected draft that leaks, a stale or poisoned block, a wrong rollback: each changes the output.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from pathlib import Path

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
from quickdraft.state.cache import PrefixCache
from quickdraft.state.persist import DiskStore
from quickdraft.state.slots import SlotPool
from quickdraft.types import SamplingParams
from tests.support.drafting import OneByOne
from tests.support.toy_recurrent import ToyRecurrent, advanced

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


def toy_logits(tokens: Sequence[int], sharpness: float = 4.0, salt: int = 0) -> NDArray[np.float32]:
    """Logits [VOCABULARY] after `tokens`: pseudo-random in a hash of the last few and of all, and in
    `salt`."""
    state = salt
    for token in tokens:
        state = (state * 1_000_003 + token + 7) % (2**61 - 1)
    period = tokens[-7] if len(tokens) >= 7 and state % 16 else state % VOCABULARY
    noise = np.random.default_rng(state).normal(0, 1, VOCABULARY)
    noise[period % VOCABULARY] += sharpness  # mostly periodic text, so that lookup finds something
    return noise.astype(np.float32)


class ToyModel:
    """engine.plan.Runner; `broken_at` makes the row at that position NaN."""

    def __init__(self, blocks: int, broken_at: int | None = None) -> None:
        self.memory = [array("i", [POISON] * BLOCK_TOKENS) for _ in range(blocks)]
        self.broken_at = broken_at
        self.plans: list[StepPlan] = []
        self.pool: BlockPool | None = None  # checked, where known: only private blocks are written
        self.recurrent: ToyRecurrent | None = None

    def poison(self, block: int) -> None:
        self.memory[block][:] = array("i", [POISON] * BLOCK_TOKENS)

    def copy_block(self, source: int, target: int) -> None:
        self.memory[target][:] = self.memory[source]

    bytes_per_block = BLOCK_TOKENS * array("i").itemsize  # it is a BlockStorage, of one layer

    def views(self, block: int) -> list[memoryview]:
        return [memoryview(self.memory[block]).cast("B")]

    room = views

    def filled(self, block: int) -> None:
        pass

    def write(self, block: int, slot: int, token: int) -> None:
        self.memory[block][slot] = token

    def read(self, block: int, slot: int) -> int:
        return self.memory[block][slot]

    def run(self, plan: StepPlan) -> list[list[ToyRow]]:
        self.plans.append(plan)
        return [self._entry(entry) for entry in plan.entries]

    def _entry(self, entry) -> list[ToyRow]:
        for offset, token in enumerate(entry.tokens):
            index, slot = divmod(entry.start + offset, BLOCK_TOKENS)
            block = entry.block_table[index]
            assert self.pool is None or self.pool.private(block), f"block {block} is written and shared"
            self.write(block, slot, token)
        end = entry.start + len(entry.tokens)
        stored = [self.read(entry.block_table[p // BLOCK_TOKENS], p % BLOCK_TOKENS) for p in range(end)]
        salts = self.recurrent.advance(entry) if self.recurrent is not None else [0] * len(entry.tokens)
        result = []
        for position in range(end - entry.wanted, end):
            values = toy_logits(stored[: position + 1], salt=salts[position - entry.start])
            result.append(ToyRow(values * np.float32(np.nan) if position == self.broken_at else values))
        return result


class HybridToy(ToyModel):
    """Its logits depend on the paged memory and on a running hash of the tokens in the sequence's slot."""

    def __init__(self, blocks: int, sequences: int = 4, checkpoints: int = 32) -> None:
        super().__init__(blocks)
        self.recurrent = ToyRecurrent(sequences, checkpoints)


class ScriptedDrafter:
    """Proposes from a script: the first `right` tokens of the truth, then wrong ones.

    Past the end of the truth (past EOS, past the length limit) it goes on with arbitrary tokens.
    """

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


class RandomDrafter(ScriptedDrafter):
    """Right for a random while, of a random length, often silent."""

    def propose(self, view: SequenceView, budget: int) -> Draft:
        self.right, self.length = self.random.randrange(12), self.random.choice([0, 1, 3, 8, 63])
        return super().propose(view, budget)


class AlwaysDraft(OneByOne):
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
    model: ToyModel | None = None,
    max_wanted: int = 64,
    cache: bool = False,
    disk: tuple[Path, int] | None = None,
    checkpoint_interval: int = 0,
) -> Engine:
    """An engine over a ToyModel whose freed blocks and slots are poisoned; with a prefix cache or
    without, and that one in memory only or with a folder of so many bytes."""
    model = model or ToyModel(blocks, broken_at)
    pool = BlockPool(blocks, model.poison)
    model.pool = pool
    slots = None
    if model.recurrent is not None:
        assert model.recurrent.sequences == max_sequences
        slots = SlotPool(model.recurrent, model.recurrent.poison)
    store = DiskStore(disk[0], bytes(32), model, disk[1], model.recurrent) if disk else None
    scheduler = Scheduler(
        pool,
        max_rows=chunk_rows + max_wanted,
        chunk_rows=chunk_rows,
        max_sequences=max_sequences,
        max_wanted=max_wanted,
        cache=PrefixCache(pool, model.copy_block, store, slots) if cache else None,
        slots=slots,
        checkpoint_interval=checkpoint_interval,
    )
    return Engine(scheduler, model, drafting)


def run_all(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Output ids by request id; checks what holds of every run: progress, events, counts, no leak."""
    for request in requests:
        engine.add(request)
    streamed: dict[str, list[int]] = {request.request_id: [] for request in requests}
    steps = 0
    while engine.has_work:
        for event in engine.step():
            streamed.setdefault(event.request.request_id, []).extend(event.tokens)
        steps += 1
        assert steps < 10_000, "the engine makes no progress"
    check_idle(engine)
    for request in requests:
        check_counts(request)
        assert streamed[request.request_id] == request.output_ids, "events are not the output"
    return {request.request_id: request.output_ids for request in requests}


def check_idle(engine: Engine) -> None:
    """Nothing of a request is left behind."""
    pool = engine.scheduler.pool
    assert pool.free == pool.count, f"{pool.count - pool.free} blocks leaked"
    assert not engine.scheduler.running and not engine.scheduler.waiting
    slots = engine.scheduler.slots
    if slots is not None:
        assert slots.free_sequences == slots.sequences, "slots of sequences leaked"
        cache = engine.scheduler.cache
        held = cache.checkpoints.count if cache else 0
        assert slots.free_checkpoints + held == slots.checkpoints, "checkpoint slots leaked"
        if cache:
            check_checkpoints(engine)
    assert not engine.drafting._odds, "the drafting rule kept a request"


def check_checkpoints(engine: Engine) -> None:
    """Every checkpoint has its KV in the index and holds the state of exactly its tokens."""
    cache, recurrent = engine.scheduler.cache, engine.runner.recurrent
    seen = 0
    for node, group in cache.checkpoints._at.items():
        way, at = b"", node
        while at.parent is not None:
            assert at.parent.children.get(at.tokens) is at, "a checkpoint below a block that is gone"
            way, at = at.tokens + way, at.parent
        for tail, one in group.items():
            assert not tail or any(key.startswith(tail) for key in node.children), "its last block is gone"
            expected = 0
            for token in np.frombuffer(way + tail, "<i4").tolist():
                expected = advanced(expected, token)
            assert recurrent.data[one.slot].tolist() == [expected, one.position]
            seen += 1
    assert seen == cache.checkpoints.count


def check_counts(request: Request) -> None:
    timings = request.timings
    assert timings.completion_tokens == request.output_length
    assert timings.steps + sum(timings.accepted.values()) == timings.completion_tokens
    assert timings.rows == timings.steps + sum(timings.drafted.values())
    assert timings.steps <= timings.completion_tokens


class StopPairs:
    """A TextSink without text: two tokens in a row whose sum is a multiple of 11 are a stop string."""

    stopped_at = None

    def __init__(self) -> None:
        self.last = 0

    def push(self, token: int, allow_stop: bool) -> bool:
        self.last, last = token, self.last
        return allow_stop and last > 0 and (last + token) % 11 == 0

    def finish(self) -> None:
        pass

    def take(self) -> str:
        return ""


def toy_request(
    name: str,
    prompt: Sequence[int],
    params: SamplingParams,
    max_context: int = 400,
    text: bool = False,
    marks: Sequence[int] = (),
    prediction: Sequence[int] = (),
) -> Request:
    sink = StopPairs() if text else None
    return Request(
        name, prompt, params, eos_ids=(0,), text=sink, max_context=max_context, marks=marks,
        prediction=prediction,
    )  # fmt: skip
