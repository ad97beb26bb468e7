"""`bench ops` and `bench verify-cost`: what is counted, what is run, and the shape of the files. No times."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from quickdraft.bench import op_times, verify_cost
from quickdraft.bench.machine import FLOAT, WIDE, Peak
from quickdraft.bench.op_work import DescribingOps, OpWork
from quickdraft.bench.roofline import Rates, model_work
from quickdraft.bench.step_runner import CONTEXTS, ROWS, StepRunner, checked_contexts, checked_rows
from quickdraft.errors import ConfigError
from quickdraft.models.loading.gguf import GGUFFile
from quickdraft.ops.cpu.backend import CpuOps
from tests.support.tiny import write_tiny_llama, written_as
from tests.support.tiny_hybrid import write_tiny_hybrid


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny.gguf", quantisation="Q4_0", tokenizer=False)


def test_steps_run_over_a_real_context(tiny: Path) -> None:
    """The rows of a step after 300 tokens have the logits they have when all is computed at once."""
    whole = StepRunner(tiny, CpuOps(2), 64, 64)
    whole.step(64)
    split = StepRunner(tiny, CpuOps(2), 64, 7)
    split.read(57)
    split.step(7)
    assert split.context == 57 and whole.context == 0
    assert np.array_equal(split.model.logits[:7], whole.model.logits[57:64])
    split.step(3)
    assert np.array_equal(split.model.logits[:3], whole.model.logits[57:60])


def test_a_timed_program_computes_the_same_and_times_every_op(tiny: Path) -> None:
    ops = DescribingOps(3)
    runner = StepRunner(tiny, ops, 64, 16)
    runner.step(16)
    plain = runner.model.logits.copy()
    runner.model.logits[...] = 0
    started = time.perf_counter()
    times = runner.timed_ops(16)
    wall = time.perf_counter() - started
    assert np.array_equal(runner.model.logits, plain)
    assert len(times) == len(ops.works) == 1 + 2 * 10 + 4
    assert all(0 <= waiting <= seconds for seconds, waiting in times)
    assert 0 < sum(seconds for seconds, _ in times) < wall  # nothing is counted twice


@pytest.mark.parametrize("quantisation", ["F32", "Q4_0", "Q6_K", "mixed"])
def test_every_multiply_add_of_the_file_is_described(tmp_path: Path, quantisation: str) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", **written_as(quantisation))
    ops = DescribingOps(1)
    StepRunner(path, ops, 16, 1)
    assert (
        sum(work.row_macs for work in ops.works)
        == model_work(GGUFFile(path).tensors.items()).total_macs_per_row
    )
    assert not [work for work in ops.works if work.name == "other"]
    linear = [work for work in ops.works if work.name.startswith("linear")]
    assert all(work.weight_bytes > 0 and work.row_macs > 0 for work in linear)
    assert {work.weight_type for work in linear} <= {"F32", "F16", "Q4_0"}


def test_every_op_of_a_hybrid_is_described(tmp_path: Path) -> None:
    ops = DescribingOps(2)
    runner = StepRunner(write_tiny_hybrid(tmp_path / "tiny", tokenizer=False), ops, 64, 16)
    runner.read(20)
    assert len(runner.timed_ops(16)) == len(ops.works)
    assert not [work for work in ops.works if work.name == "other"]
    states = [work for work in ops.works if work.name == "gated_delta"]
    assert len(states) == 3 and {work.weight_bytes for work in states} == {2 * 4 * 4 * 16 * 24}


def test_roof_of_an_op() -> None:
    attention = OpWork("attention", key_bytes=8, key_macs=10)
    assert attention.macs(3, 5) == 10 * (6 + 7 + 8)
    assert attention.bytes(3, 5) == 8 * 8
    linear = OpWork("linear", weight_bytes=1000, row_macs=2000, weight_type="Q8_0")
    machine = Rates(100.0, 800.0, 400.0, 200.0)
    assert linear.roof_seconds(1, 99, machine) == 10.0  # by bytes
    assert linear.roof_seconds(4, 99, machine) == 20.0  # by arithmetic
    assert OpWork("rope").roof_seconds(4, 99, machine) == 0.0


def test_ops_file_and_tables(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(op_times, "read_bandwidth", lambda threads: 1e9)
    peaks = [Peak(WIDE, "avx2", 2, 2e9), Peak(FLOAT, "avx2", 2, 1e9)]
    monkeypatch.setattr(op_times, "measure_peaks", lambda threads: peaks)
    op_times.run(tiny, tmp_path / "out.json", [8, 1], [40, 0], threads=2)
    data = json.loads((tmp_path / "out.json").read_text())
    assert (data["schema"], data["threads"]) == ("quickdraft-ops-1", 2)
    assert [(step["context"], step["rows"]) for step in data["steps"]] == [(0, 1), (0, 8), (40, 1), (40, 8)]
    for step in data["steps"]:
        counts = {op["name"]: op["count"] for op in step["ops"]}
        assert counts["attention"] == 2 and counts["rms_norm"] == 5
        assert sum(counts.values()) == 25
        roofs = {op["name"]: op["roof_ms"] for op in step["ops"]}
        assert roofs["rope"] == roofs["embed"] == 0 < min(roofs["attention"], step["roof_ms"])
        assert step["roof_ms"] == pytest.approx(sum(roofs.values()), abs=1e-3)
        assert step["sum_ms"] == pytest.approx(sum(op["ms"] for op in step["ops"]), abs=1e-3)
    out = capsys.readouterr().out
    assert "8 rows after 40 tokens" in out and "x the sum" in out


def test_verify_cost_file(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = verify_cost.run(tiny, tmp_path / "out.json", None, [0, 33], threads=1)
    data = json.loads((tmp_path / "out.json").read_text())
    assert (data["schema"], data["threads"]) == ("quickdraft-verify-cost-1", 1)
    assert data["rows"] == list(ROWS) and data["contexts"] == [0, 33]
    assert [len(line) for line in data["step_ms"]] == [7, 7]
    assert all(value > 0 for line in curve.step_ms for value in line)
    assert "64 rows" in capsys.readouterr().out


def test_choices_take_turns_in_mirrored_order() -> None:
    asked: list[int] = []
    answers = iter([9.0, 9, 9, 9, 9, 9, 1, 10, 100, 300, 30, 3, 2, 20, 200])

    def measure(choice: int) -> float:
        asked.append(choice)
        return next(answers)

    assert verify_cost.medians_in_turns(measure, [1, 2, 4], rounds=3) == [2, 20, 200]
    assert asked == [1, 1, 2, 2, 4, 4, 1, 2, 4, 4, 2, 1, 1, 2, 4]


def test_what_does_not_fit_is_an_error(tmp_path: Path) -> None:
    assert checked_rows(None) == list(ROWS) and checked_rows([8, 1, 8]) == [1, 8]
    assert checked_contexts(None, 64, 8192) == list(CONTEXTS)
    assert checked_contexts(None, 64, 4096) == [0, 2048]
    assert checked_contexts([5, 0], 1, 6) == [0, 5]
    for rows in ([], [0], [65]):
        with pytest.raises(ConfigError, match="row counts"):
            checked_rows(rows)
    for contexts, length in (([6], 6), ([-1], 6), (None, 0), ([], 6)):
        with pytest.raises(ConfigError, match="cannot hold"):
            checked_contexts(contexts, 1, length)
    with pytest.raises(ConfigError, match="no folder"):
        verify_cost.run("unused", tmp_path / "none" / "out.json")
    with pytest.raises(ConfigError, match="threads"):
        op_times.run("unused", threads=100_000)
