"""`bench kv-types`: what is compared and counted, and the shape of the file. No times."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quickdraft.bench.kv_types import PAIRS, Effect, logit_effects, run
from quickdraft.bench.op_work import DescribingOps
from quickdraft.bench.step_runner import StepRunner
from tests.support.tiny import write_tiny_llama


def test_an_effect_counts_rows_differences_and_changed_tokens() -> None:
    effect = Effect("int8", "float32")
    effect.add(np.array([[1, 2, 3]], np.float32), np.array([[1, 2, 3]], np.float32))
    effect.add(np.array([[0, 4], [1, 1]], np.float32), np.array([[3, 0], [1, 1]], np.float32))
    told = effect.to_dict()
    assert (told["rows"], told["best_changed"], told["largest_difference"]) == (3, 1, 4.0)
    assert told["rms_difference"] == pytest.approx(np.sqrt((9 + 16) / 2 / 3))
    assert told["rms_spread"] == pytest.approx(np.sqrt((2 / 3 + 2.25 + 0) / 3))


def test_rounder_types_differ_more(tmp_path: Path) -> None:
    _, effects = logit_effects(write_tiny_llama(tmp_path / "t.gguf", tokenizer=False), 1)
    rms = {(e.dtype, e.baseline): e.to_dict()["rms_difference"] for e in effects}
    assert list(rms) == list(PAIRS) and len({e.rows for e in effects}) == 1
    assert 0 < rms["float16", "float32"] < rms["bfloat16", "float32"] < rms["int8", "float32"]
    assert effects[0].rows == 256


def test_the_result_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path, file = write_tiny_llama(tmp_path / "t.gguf"), tmp_path / "out.json"
    run(path, file, [1, 3], [0, 300], 1)
    told = json.loads(file.read_text())
    assert told["schema"] == "quickdraft-kv-types-1" and told["model"] == "t"
    assert [(t["context"], t["rows"]) for t in told["attention"]] == [(0, 1), (0, 3), (300, 1), (300, 3)]
    assert all(set(t["ms"]) == {"float16", "int8"} for t in told["attention"])
    assert all(0 <= e["best_changed"] <= e["rows"] for e in told["logits"])
    text = capsys.readouterr().out
    assert "best changed" in text and "…" not in text


def test_the_roof_of_int8_attention_counts_its_bytes_and_its_arithmetic(tmp_path: Path) -> None:
    path, works = write_tiny_llama(tmp_path / "t.gguf"), {}
    for kind in ("float16", "int8"):
        ops = DescribingOps(1)
        runner = StepRunner(path, ops, 16, 1, kind)
        works[kind] = [work for work in ops.works if work.name == "attention"]
        kv = runner.runner.kv
        assert sum(work.key_bytes for work in works[kind]) * 16 == kv.bytes_per_block
    half, whole = works["float16"][0], works["int8"][0]
    assert half.key_macs == whole.key_macs > 0
    assert (half.weight_type, whole.weight_type) == ("F32", "Q8_0")
