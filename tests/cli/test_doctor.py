"""`doctor`: what reaches stdout for people and as JSON, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from quickdraft.cli.main import app
from tests.support.tiny import write_tiny_llama


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments), "--kv-memory", "4M", "--threads", "1"])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICKDRAFT_CACHE", str(tmp_path / "cache"))


def test_a_healthy_model_ends_with_0(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", tokenizer=False)
    text = run(path)
    assert text.exit_code == 0, text.output
    lines = text.stdout.splitlines()
    assert lines[0].startswith("ok    files           tiny.gguf: 21 tensors")
    assert "skip  tokenizer       the model has no tokenizer; prompts are token ids" in lines
    assert lines[-1] == "10 checks passed, 3 skipped; nothing failed"
    found = run(path, "--output", "json")
    report = json.loads(found.stdout)
    assert found.exit_code == 0 and (report["schema"], report["ok"]) == ("quickdraft-doctor-1", True)
    assert len(report["checks"]) == 13
    assert all(set(check) == {"name", "ok", "detail", "hint"} for check in report["checks"])
    skipped = [check["name"] for check in report["checks"] if check["detail"].startswith("skipped: ")]
    assert skipped == ["tokenizer", "chat template", "stream"]


def test_a_damaged_file_ends_with_1_and_a_hint(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    text = run(path)
    assert text.exit_code == 1
    lines = text.stdout.splitlines()
    assert lines[0].startswith("FAIL  files ") and lines[1].strip().startswith("hint: ")
    assert lines[-1] == "0 checks passed, 11 skipped; failed: files, model"
    report = json.loads(run(path, "--output", "json").stdout)
    assert not report["ok"] and [check["ok"] for check in report["checks"]] == [False] * 2 + [True] * 11


def test_a_wrong_command_line_ends_with_2() -> None:
    assert run("no-such-model").exit_code == 2
    assert run("--head-bits", "3").exit_code == 2
