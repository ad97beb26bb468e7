"""--explain-drafts: a line per step whose numbers add up to the request's; a curve is kept when it healed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quickdraft.engine.explain import SCHEMA, ExplainFile
from quickdraft.engine.llm import LLM
from quickdraft.engine.measured_costs import FOLDER, remembered
from quickdraft.errors import ConfigError
from quickdraft.speculate.cost_curve import MeasuredCosts, StepTimes
from quickdraft.speculate.online_costs import OnlineCosts
from quickdraft.types import SamplingParams, Speculation
from tests.support.mtp_folder import write_mtp_folder
from tests.support.tiny import write_tiny_llama

OPTIONS = {"threads": 1, "kv_memory_bytes": 1 << 22}
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8] * 6


def params(text: str = "auto") -> SamplingParams:
    speculation = Speculation.parse(text)
    return SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, speculation=speculation)


def test_every_step_says_its_candidates_choice_and_outcome(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf", tokenizer=False, quantisation="Q8_0")
    drafter, file = write_mtp_folder(tmp_path / "mtp"), tmp_path / "drafts.jsonl"
    llm = LLM(model, **OPTIONS, drafters=[drafter], explain_drafts=file)
    done = llm.generate_many([(PROMPT, params()), (PROMPT[3:], params()), (PROMPT, params("off"))])
    llm.close()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert {line["schema"] for line in lines} == {SCHEMA}
    by_request: dict[str, list] = {}
    for line in lines:
        for one in line["sequences"]:
            by_request.setdefault(one["request"], []).append(one)
    assert len(by_request) == 2, "what may not draft is not explained"
    for completion, steps in zip(done, by_request.values(), strict=False):
        timings = completion.timings
        assert len(steps) == timings.steps
        assert sum(one["outcome"]["emitted"] for one in steps) == timings.completion_tokens
        assert sum(one["outcome"]["verified"] for one in steps) == sum(timings.drafted.values())
        assert sum(one["outcome"]["accepted"] for one in steps) == sum(timings.accepted.values())
        for one in steps:
            sources = [candidate["source"] for candidate in one["candidates"]]
            assert one["choice"]["source"] in ["", *sources]
            assert one["outcome"]["verified"] <= one["choice"]["tokens"] <= one["room"]
            assert set(one["choice"]) == {
                "source", "tokens", "extended", "gain", "ran", "spent", "probe"
            }  # fmt: skip
        assert any("mtp" in [each["source"] for each in one["candidates"]] for one in steps)
    assert max(one["outcome"]["verified"] for steps in by_request.values() for one in steps) > 0


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--explain-drafts"):
        ExplainFile(tmp_path / "missing" / "file")


@pytest.mark.parametrize("frozen", [False, True])
def test_a_curve_that_was_wrong_for_long_is_written_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    monkeypatch.setenv("QUICKDRAFT_CACHE", str(tmp_path / "cache"))
    model = write_tiny_llama(tmp_path / "tiny.gguf", tokenizer=False)
    llm = LLM(model, **OPTIONS, measure_costs=True, frozen_costs=frozen)
    costs = llm.opened.costs
    assert isinstance(costs, OnlineCosts) and costs.frozen == frozen
    (file,) = (tmp_path / "cache" / FOLDER).iterdir()
    before = remembered(file)
    llm.generate(PROMPT, params())
    assert (costs._steps == {}) == frozen, "the engine's steps are observed"
    true = MeasuredCosts(StepTimes((1, 16), (0,), ((1.0, 9.0),), {}))
    for rows in [1, 16] * 1500:
        costs.observe_step(rows, 40, true.seconds(rows, 40))
    llm.close()
    after = remembered(file)
    assert before is not None and after is not None
    assert (after == before) == frozen
    if not frozen:
        assert MeasuredCosts(after.times).step_cost(16, 40) > MeasuredCosts(before.times).step_cost(16, 40)
