"""`bench policy` end to end: what is recorded replays as the engine decodes, and the files of a whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quickdraft.bench import policy
from quickdraft.bench.curves import Curve
from quickdraft.bench.policy import ModelOptions
from quickdraft.bench.record_traces import record_opened
from quickdraft.bench.replay import Engine, replay
from quickdraft.bench.traces import Trace, TracedWorkload, TraceSet, dump_traces, parse_traces
from quickdraft.bench.workloads import Random, Workload
from quickdraft.engine.drafters import Drafting
from quickdraft.engine.llm import LLM
from quickdraft.errors import ConfigError
from quickdraft.speculate.cost_curve import StepTimes
from quickdraft.speculate.draft import Draft
from quickdraft.speculate.priors import from_json
from quickdraft.types import SamplingParams, Speculation
from tests.support.mtp_folder import write_mtp_folder
from tests.support.tiny import write_tiny_llama

PAID = Curve(
    "paid",
    StepTimes((1, 2, 64), (0, 1000), ((1.0, 1.1, 9.0), (2.0, 2.3, 20.0)), {"mtp": 0.05}),
)


@pytest.mark.parametrize("setting", ["auto", "mtp", "mtp+lookup@8"])
def test_a_replay_takes_the_steps_that_the_engine_takes(tmp_path: Path, setting: str) -> None:
    target = write_tiny_llama(tmp_path / "tiny.gguf", quantisation="Q8_0", tokenizer=False)
    drafter, speculation = write_mtp_folder(tmp_path / "mtp"), Speculation.parse(setting)
    llm = LLM(target, threads=1, kv_memory_bytes=1 << 22, drafters=[drafter], prefix_cache=False)
    opened = llm.opened
    traces = record_opened(opened, (Workload("greedy", (Random(40), Random(9)), 120),))
    traces = parse_traces(dump_traces(traces), "a file")  # nothing is lost on the way
    (work,) = traces.workloads
    replayed = replay(work, PAID, lambda: Engine(PAID, traces.longest, ("mtp",), speculation))

    opened.engine.drafting = Drafting(opened.engine.drafting.drafters, PAID.costs)
    steps = rows = 0
    for trace in work.traces:
        params = SamplingParams(temperature=0.0, max_tokens=trace.max_tokens, speculation=speculation)
        found = llm.generate(list(trace.prompt), params)
        assert found.ids == trace.output
        steps, rows = steps + found.timings.steps, rows + found.timings.rows
        assert found.timings.accepted.get("mtp", 0) > 0, "no draft was right"
    llm.close()
    assert (replayed.steps, replayed.rows) == (steps, rows)
    assert replayed.drafting_seconds > 0 and steps < replayed.tokens < rows


def noise(name: str, count: int) -> TracedWorkload:
    """A model that drafts the right token every second time, on a text that never repeats."""
    output = tuple(range(500, 500 + count))
    drafts = tuple(Draft((token if token % 2 else 7,), "mtp") for token in output)
    return TracedWorkload(name, (Trace(f"{name}/0", (1, 2, 3), output, count, {"mtp": drafts}),))


def test_a_run_writes_its_result_and_the_table_of_priors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces, result, priors = tmp_path / "traces.jsonl", tmp_path / "result.json", tmp_path / "priors.json"
    traces.write_text(dump_traces(TraceSet("toy", {"mtp": 1}, (noise("a", 60), noise("b", 30)))))
    policy.run(
        ModelOptions("no model is opened"), "rtx3090", traces, contexts=[2_000, 25_000],
        json_path=result, priors_path=priors, leave_one_out=True,
    )  # fmt: skip
    value = json.loads(result.read_text())
    assert (value["schema"], value["curve"], value["model"]) == ("quickdraft-policy-1", "rtx3090", "toy")
    assert [row["workload"] for row in value["rows"]] == ["a", "b"]
    for row in value["rows"]:
        # a draft every step pays here: 22.4 ms and 0.5 ms for 4 tokens in 3 steps, against 21.7 ms a token
        assert row["plain"] < row["best_static"] <= row["oracle"] + 1e-6
        assert row["policy_tokens_per_second"] <= row["oracle"] + 1e-6
        assert row["plain"] < row["left_out"] <= row["oracle"] + 1e-6
        assert row["best_static_setting"].startswith("mtp") and 1.0 <= row["mean_rows"] <= 2.0
    assert [(row["context"], row["workload"]) for row in value["long_blocks"]] == [
        (2_000, "a"), (2_000, "b"), (25_000, "a"), (25_000, "b"),
    ]  # fmt: skip
    table = from_json(json.loads(priors.read_text()))
    assert table["mtp"].kinds[0].odds == pytest.approx(0.5, abs=0.05)
    printed = capsys.readouterr().out
    assert "assumptions:" in printed and "published: 1 row 21.7 ms" in printed


def test_two_files_of_traces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--record"):
        policy.run(ModelOptions("none"), "cpu", tmp_path / "a", tmp_path / "b")
