"""A step of which only the best ids are wanted gives rows that answer everything else as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quickdraft.engine.llm import LLM
from quickdraft.engine.plan import PlanEntry, StepPlan
from quickdraft.engine.request import Request
from quickdraft.types import SamplingParams
from tests.support.tiny import write_tiny_llama

IDS = tuple(range(30, 42))


def plan_of(wanted: int, *, best_only: bool) -> StepPlan:
    """Two sequences, each with its own block; the first one's rows are not wanted."""
    entry = PlanEntry("a", IDS, 0, 0, (), "", np.array([0], np.int32))
    other = PlanEntry("b", IDS[::-1], 0, wanted, (), "", np.array([1], np.int32), best_only=best_only)
    return StepPlan((entry, other))


@pytest.mark.parametrize("tied", [True, False])
def test_rows_answer_as_those_of_a_whole_step(tied: bool, tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", quantisation="Q8_0", tied=tied)
    runner: Any = LLM(path, threads=2).opened.runner
    for wanted in (1, 2):
        whole = [
            (row.argmax(), row.full().copy(), row.top(5), row.gumbel(0.8, 3, 7))
            for row in runner.run(plan_of(wanted, best_only=False))[1]
        ]
        rows = runner.run(plan_of(wanted, best_only=True))[1]
        assert [row.argmax() for row in rows] == [best for best, *_ in whole]
        held = runner.model.logits[:wanted].copy()
        assert any((held[i] != logits).any() for i, (_, logits, *_) in enumerate(whole)), "nothing was saved"
        for row, (_, logits, top, drawn) in zip(rows, whole, strict=True):
            assert row.gumbel(0.8, 3, 7) == drawn
            assert [part.tolist() for part in row.top(5)] == [part.tolist() for part in top]
            assert row.full().tobytes() == logits.tobytes()


def test_only_steps_of_few_rows_that_all_want_the_best_leave_logits_out(tmp_path: Path) -> None:
    runner: Any = LLM(write_tiny_llama(tmp_path / "tiny.gguf", quantisation="Q8_0")).opened.runner
    exact = runner.run(plan_of(3, best_only=False))[1][2].full().copy()
    for plan in (plan_of(3, best_only=True), plan_of(1, best_only=False)):
        runner.run(plan)
        last = plan.entries[1].wanted - 1
        assert runner.model.logits[last].tobytes() == exact.tobytes()


@pytest.mark.parametrize("logprobs, expected", [(None, True), (0, False)])
def test_a_request_that_wants_logprobs_reads_whole_rows(logprobs: int | None, expected: bool) -> None:
    params = SamplingParams(temperature=0.0, logprobs=logprobs)
    assert Request("r", [1], params, max_context=16).best_only is expected
