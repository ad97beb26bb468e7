"""Lookup never changes a token of the real model: every workload, greedy and sampled."""

from __future__ import annotations

import pytest

from quickdraft.bench.stages import encoding_of
from quickdraft.bench.workloads import all_workloads, prompt_ids
from quickdraft.engine.llm import LLM
from tests.support.matrix import check
from tests.support.model import default_model_path
from tests.support.settings import SETTINGS

pytestmark = pytest.mark.model


def workload_prompts() -> list[list[int]]:
    """One prompt per workload (the first of `chat`'s eight)."""
    llm = LLM(default_model_path())
    encoding = encoding_of(llm.opened)
    prompts = [list(prompt_ids(workload, encoding)[0].ids) for workload in all_workloads()]
    llm.close()
    return prompts


def test_greedy_and_one_sampled_setting_on_every_workload() -> None:
    settings = {name: SETTINGS[name] for name in ("greedy", "top_k_top_p_min_p")}
    accepted = check(default_model_path(), workload_prompts(), settings, 64, schedules=((2, 256),))
    assert accepted["greedy"] > 64, f"lookup accepted {accepted}: the copy workload alone gives more"


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_whole_matrix_on_every_workload() -> None:
    accepted = check(default_model_path(), workload_prompts(), SETTINGS, 64)
    assert accepted["greedy"] > 64
