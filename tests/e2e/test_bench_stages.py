"""`bench stages` on real engines: a tiny file of random weights, and the default model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quickdraft.bench import stages
from quickdraft.bench.check import distinct_share
from quickdraft.bench.workloads import all_workloads, encoding_of, prompt_ids
from quickdraft.engine import opened
from quickdraft.engine.llm import LLM
from quickdraft.errors import ConfigError, UnsupportedError
from quickdraft.models.registry import open_target
from quickdraft.speculate.costs import ConstantCosts
from quickdraft.types import FinishReason, SamplingParams, Speculation
from tests.support.draft_engine import knowing_drafter
from tests.support.model import default_model_path
from tests.support.mtp_folder import write_mtp_folder
from tests.support.tiny import write_tiny_llama
from tests.support.tiny_hybrid import write_tiny_hybrid


@pytest.fixture(autouse=True)
def constant_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model's own curve would leave it to the machine whether anything is drafted."""
    monkeypatch.setattr(opened, "measured_costs", lambda *_: ConstantCosts())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("bench") / "tiny.gguf", tokenizer=False)


def test_a_file_without_tokenizer_runs_on_random_ids(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    result = stages.run(tiny, stages=["lookup@16"], json_path=file, threads=2)
    data = json.loads(file.read_text())
    assert (
        data["model"] == "tiny" and data["threads"] == 2 and data == json.loads(json.dumps(result.to_dict()))
    )
    (workload,) = data["workloads"]
    assert (workload["name"], workload["prompt_tokens"], workload["output_tokens"]) == ("random", 256, 128)
    plain, lookup = workload["stages"]
    assert (plain["stage"], lookup["stage"]) == ("off", "lookup@16")
    for stage in (plain, lookup):
        assert "failed" not in stage and stage["ids_equal_plain"] and stage["decode_tokens_per_second"] > 0
        assert stage["steps"] + sum(stage["accepted"].values()) == 128
        assert sum(stage["accepted_per_step"]) == stage["steps"] <= stage["rows"]
    assert lookup["accepted"]["lookup"] > 0, "lookup drafted nothing on periodic text"
    assert plain["break_even"] == {} and list(lookup["break_even"]) == ["2", "4", "8", "16"]
    printed = capsys.readouterr().out
    assert (
        printed.startswith("decode-roof: ") and "lookup@16" in printed and "random ids, not text" in printed
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"stages": ["mtp"]}, UnsupportedError),
        ({"workloads": ["copy"]}, ConfigError),
        ({"json_path": Path("/no/such/folder/out.json")}, ConfigError),
        ({"plot_path": Path("/no/such/folder/out.svg")}, ConfigError),
        ({"plot_path": Path("out.pdf")}, ConfigError),
    ],
)
def test_what_cannot_run_is_an_error_before_anything_is_measured(
    tiny: Path, arguments: dict, error: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error):
        stages.run(tiny, threads=1, **arguments)
    assert capsys.readouterr().out == ""


def test_a_hybrid_with_an_mtp_module_runs_that_stage_too(tmp_path: Path) -> None:
    file, picture = tmp_path / "out.json", tmp_path / "out.svg"
    model = write_tiny_hybrid(tmp_path / "hybrid", tokenizer=False)
    stages.run(model, max_tokens=64, threads=1, json_path=file, plot_path=picture)
    (workload,) = json.loads(file.read_text())["workloads"]
    assert [stage["stage"] for stage in workload["stages"]] == ["off", "lookup@16", "mtp"]
    assert all("failed" not in stage and stage["ids_equal_plain"] for stage in workload["stages"])
    assert list(workload["stages"][2]["break_even"]) == ["2", "4"], "it drafts at most three tokens"
    assert workload["stages"][2]["drafted"]["mtp"] > 0
    assert picture.read_text().lstrip().startswith("<?xml")


def test_the_whole_staircase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a target with an MTP module and a DFlash2 drafter of its own, whose passes have a cost."""
    costs = ConstantCosts(0.4, {"mtp": 0.1, "dflash2": 0.3})
    monkeypatch.setattr(opened, "measured_costs", lambda *_: costs)
    model = write_tiny_llama(tmp_path / "tiny.gguf", vocabulary_size=60, tokenizer=False)
    module = write_mtp_folder(tmp_path / "mtp", vocab_size=60)
    knowing_drafter(tmp_path / "dflash2", open_target(model).config, {t: (t + 1) % 60 for t in range(60)}, 2)
    file = tmp_path / "out.json"
    stages.run(model, threads=1, json_path=file, drafters=(module, tmp_path / "dflash2"))
    (workload,) = json.loads(file.read_text())["workloads"]
    found = {stage["stage"]: stage for stage in workload["stages"]}
    assert tuple(found) == stages.STAIRCASE
    assert all("failed" not in stage and stage["ids_equal_plain"] for stage in found.values())
    assert found["mtp"]["drafted"]["mtp"] > 0 and found["dflash2"]["drafted"]["dflash2"] > 0
    assert found["mtp"]["break_even"] == {"2": 1.5, "4": 2.5}
    longest = found["dflash2+lookup@16"]["break_even"]
    assert found["dflash2+lookup@8"]["break_even"] == {"2": 1.7, "4": 2.5, "8": 4.1}
    assert longest == {"2": 1.7, "4": 2.5, "8": 4.1, "16": 7.3}


@pytest.mark.model
def test_every_workload_of_the_default_model_is_real_text() -> None:
    llm = LLM(default_model_path(), threads=2)
    for workload in all_workloads():
        for prompt in prompt_ids(workload, encoding_of(llm.opened)):
            params = SamplingParams(
                temperature=0.0, max_tokens=prompt.max_tokens, speculation=Speculation.parse("lookup@16")
            )
            answer = llm.generate(prompt.ids, params)
            if prompt.expected is not None:
                assert answer.ids == prompt.expected, "the copy left the document"
                assert len(answer.ids) == 512 and len(answer.ids) / answer.timings.steps >= 8
                continue
            assert answer.finish_reason is FinishReason.STOP, (
                f"{workload.name}: no end of turn in {answer.text!r}"
            )
            share = distinct_share(answer.ids)
            assert share is not None and share >= 0.5, f"{workload.name}: {answer.text!r}"
    llm.close()


@pytest.mark.model
def test_bench_on_the_default_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    stages.run(default_model_path(), ["rag"], ["off", "lookup@16"], 64, file, 2)
    (workload,) = json.loads(file.read_text())["workloads"]
    assert workload["name"] == "rag" and len(workload["stages"]) == 2
    assert all("failed" not in stage and stage["relative_to_plain"] > 0 for stage in workload["stages"])
    assert workload["stages"][1]["steps"] < workload["stages"][0]["steps"] == workload["output_tokens"]
    assert "FAIL" not in capsys.readouterr().out
