"""Any traffic over any limits: arrivals, aborts, failures of the device. Output is plain decoding's."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from quickdraft.engine.drafters import Drafting
from quickdraft.engine.plan import StepPlan
from quickdraft.engine.request import Request
from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.speculate.lookup import LookupDrafter
from quickdraft.state.sequence import blocks_for
from quickdraft.types import FinishReason, SamplingParams
from tests.support.settings import SETTINGS
from tests.support.toy import (
    VOCABULARY,
    AlwaysDraft,
    HybridToy,
    RandomDrafter,
    ToyModel,
    ToyRow,
    check_counts,
    check_idle,
    run_all,
    toy_engine,
    toy_request,
)
from tests.support.toy_recurrent import ToyRecurrent


@dataclasses.dataclass(frozen=True)
class Job:
    """One request of the traffic: when it comes, and when its client leaves (None: stays)."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrives: int
    leaves: int | None
    marks: tuple[int, ...] = ()


@st.composite
def jobs(draw) -> Job:
    length, shared = draw(st.integers(1, 50)), draw(st.integers(0, 40))
    source, common = random.Random(draw(st.integers(0, 1000))), random.Random(1)
    alphabet = draw(st.sampled_from([3, VOCABULARY]))
    prompt = [common.randrange(1, VOCABULARY) for _ in range(shared)]
    prompt += [source.randrange(1, alphabet) for _ in range(length - shared)]
    return Job(
        tuple(prompt),
        dataclasses.replace(
            SETTINGS[draw(st.sampled_from(sorted(SETTINGS)))],
            max_tokens=draw(st.integers(24, 40)),
        ),
        draw(st.integers(0, 30)),
        draw(st.one_of(st.none(), st.integers(0, 60))),
        tuple(draw(st.lists(st.integers(0, length), max_size=2))),
    )


class Checked(ToyModel):
    """Checks what every plan must satisfy, and fails on the steps it is told to."""

    def __init__(self, blocks: int, limits: tuple[int, int, int], failing: set[int]) -> None:
        super().__init__(blocks)
        self.limits, self.failing, self.steps = limits, failing, 0

    def run(self, plan: StepPlan) -> list[list[ToyRow]]:
        max_rows, max_wanted, max_sequences = self.limits
        assert 1 <= len(plan.entries) <= max_sequences
        assert plan.rows <= max_rows
        assert sum(entry.wanted for entry in plan.entries) <= max_wanted
        written = [b for e in plan.entries for b in e.block_table[e.start // BLOCK_TOKENS :].tolist()]
        used = [block for entry in plan.entries for block in entry.block_table.tolist()]
        assert all(used.count(block) == 1 for block in written), "a block is written by one, used by two"
        for entry in plan.entries:
            assert entry.wanted == 0 or entry.wanted == len(entry.tokens) == 1 + len(entry.drafted)
            assert len(entry.block_table) == blocks_for(entry.start + len(entry.tokens))
        rows = super().run(plan)
        self.steps += 1
        if self.steps in self.failing:
            raise OSError("the device is gone")
        return rows


TRAFFIC = {
    "traffic": st.lists(jobs(), min_size=1, max_size=6),
    "blocks": st.integers(6, 20),
    "chunk_rows": st.integers(1, 40),
    "max_sequences": st.integers(1, 5),
    "max_wanted": st.integers(5, 40),
    "lookup": st.booleans(),
    "cache": st.booleans(),
    "disk": st.sampled_from([None, 0, 1500, 1 << 20]),
    "failing": st.sets(st.integers(1, 60), max_size=4),
}


@given(**TRAFFIC)
@settings(max_examples=150, deadline=None)
def test_traffic_decodes_as_if_everyone_were_alone(**given) -> None:
    check_traffic(**given, checkpoints=None, interval=0)


@given(**TRAFFIC, checkpoints=st.integers(0, 9), interval=st.sampled_from([0, 16, 64]))
@settings(max_examples=150, deadline=None)
def test_traffic_over_recurrent_states_decodes_as_if_everyone_were_alone(**given) -> None:
    check_traffic(**given)


def check_traffic(
    traffic,
    blocks,
    chunk_rows,
    max_sequences,
    max_wanted,
    lookup,
    cache,
    disk,
    failing,
    checkpoints,
    interval,
) -> None:
    hybrid = checkpoints is not None
    made = [
        toy_request(f"r{i}", job.prompt, job.params, marks=job.marks if hybrid else ())
        for i, job in enumerate(traffic)
    ]
    truth: dict[str, list[int]] = {}
    for request in made:
        alone = toy_request(request.request_id, request.tokens, request.params)
        truth |= run_all(toy_engine(Drafting([]), model=HybridToy(64) if hybrid else None), [alone])
    model = Checked(blocks, (chunk_rows + max_wanted, max_wanted, max_sequences), failing)
    if hybrid:
        model.recurrent = ToyRecurrent(max_sequences, checkpoints)
    folder = tempfile.TemporaryDirectory()
    engine = toy_engine(
        Drafting([LookupDrafter()]) if lookup else AlwaysDraft(RandomDrafter(truth, 0, 0)),
        blocks=blocks,
        chunk_rows=chunk_rows,
        max_sequences=max_sequences,
        max_wanted=max_wanted,
        model=model,
        cache=cache,
        disk=(Path(folder.name), disk) if cache and disk is not None else None,
        checkpoint_interval=interval,
    )
    steps = drive(engine, made, traffic)
    check_idle(engine)
    counts = engine.metrics()
    assert 0 <= counts.prefix_restored <= counts.prefix_hits <= counts.prefix_queries
    assert counts.disk.get("rejected_files", 0) == 0
    if cache and disk is not None:
        engine.scheduler.cache.disk.close()
    folder.cleanup()
    for request in made:
        expected = truth[request.request_id]
        if request.finish == FinishReason.ABORT:
            assert request.output_ids == expected[: request.output_length]
        else:
            assert request.output_ids == expected
        check_counts(request)
    assert steps < 5_000


def drive(engine, made: list[Request], traffic: list[Job]) -> int:
    """Step through arrivals and departures until nothing is left; the number of steps."""
    step = 0
    while step <= 60 or engine.has_work:
        for request, job in zip(made, traffic, strict=True):
            if job.arrives == step:
                engine.add(request)
            if job.leaves == step and job.arrives <= step:
                engine.abort(request.request_id)
        try:
            engine.step()
        except OSError:
            assert all(item.state.pending == 0 for item in engine.scheduler.running)
        if step % 3 == 0:
            engine.idle()
        step += 1
        assert step < 5_000, "the engine makes no progress"
    return step
