"""The JSON schema, exactly, and a table that never shows a refused speed."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

import quickdraft
from quickdraft.bench import machine
from quickdraft.bench.report import BenchResult, StageResult, WorkloadResult, print_table

GOOD = StageResult(
    "lookup@16", 123.456789, 1.5, 1.4, 1.6, 3.25, 20.0, 2.5, 40, {"lookup": 90}, {"lookup": 60}, True,
    None, 130, (10, 20, 5, 0, 5), {2: 1.23456, 16: 4.0},
)  # fmt: skip
FAILED = StageResult(
    "off", None, None, None, None, None, None, None, 100, {}, {}, True, "degenerate text: [0.02]"
)
RESULT = BenchResult("tiny", 2, "abc", (WorkloadResult("copy", 30, 100, (FAILED, GOOD)),))


def test_json_has_exactly_the_schema(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    RESULT.write(file)
    data = json.loads(file.read_text())
    assert list(data) == ["schema", "model", "threads", "commit", "costs", "workloads"]
    assert (data["schema"], data["model"], data["threads"], data["commit"]) == (
        "quickdraft-bench-1",
        "tiny",
        2,
        "abc",
    )
    (workload,) = data["workloads"]
    assert list(workload) == ["name", "prompt_tokens", "output_tokens", "stages"]
    failed, good = workload["stages"]
    keys = [
        "stage", "decode_tokens_per_second", "relative_to_plain", "relative_low", "relative_high", "ceiling",
        "step_ms", "tokens_per_step", "steps", "drafted", "accepted", "ids_equal_plain",
        "rows", "accepted_per_step", "break_even",
    ]  # fmt: skip
    assert list(good) == keys and list(failed) == [*keys, "failed"]
    assert good["decode_tokens_per_second"] == 123.4568 and good["drafted"] == {"lookup": 90}
    assert good["accepted_per_step"] == [10, 20, 5, 0, 5] and good["break_even"] == {"2": 1.2346, "16": 4.0}
    assert (failed["rows"], failed["accepted_per_step"], failed["break_even"]) == (0, [], {})
    assert [failed[key] for key in keys[1:8]] == [None] * 7 and failed["failed"] == FAILED.failed
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def table(result: BenchResult) -> str:
    stream = io.StringIO()
    print_table(result, Console(file=stream, width=80))
    return stream.getvalue()


def test_the_table_fits_80_columns_and_says_fail_with_the_reason() -> None:
    text = table(RESULT)
    lines = text.splitlines()
    off, lookup = (next(line for line in lines if name in line) for name in ("off", "lookup@16"))
    assert "FAIL" in off and "123.5" in lookup and "1.40-1.60" in lookup and "60/90" in lookup
    assert not any(digit in off.replace("0/0", "") for digit in "0123456789"), (
        "a refused stage shows no number"
    )
    assert "FAIL copy off: degenerate text: [0.02]" in lines
    assert all(len(line) <= 80 for line in lines)


def test_random_ids_are_marked_as_such() -> None:
    text = table(BenchResult("tiny", 1, None, (WorkloadResult("random", 9, 9, (GOOD,)),)))
    assert "random ids, not text" in text
    assert "random ids" not in table(RESULT)


def test_commit_is_that_of_the_checkout_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "venv" / "quickdraft"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(quickdraft, "__file__", str(package / "__init__.py"))
    assert machine.commit() is None, "not in a repository"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.com"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    assert machine.commit() is None, "in a repository that does not track it"
    subprocess.run([*git, "add", "-f", "venv/quickdraft/__init__.py"], check=True)
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert machine.commit() == head
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.commit() is None, "git is not installed"
