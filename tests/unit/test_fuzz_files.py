"""Mutated model files through the real loader: only QuickdraftErrors, no crash, hang or huge allocation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROUNDS = 12_000


def test_mutated_model_files_are_accepted_or_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.fuzz_files", str(tmp_path), str(ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert sum(sum(pair) for pair in counts.values()) >= ROUNDS
    assert all(accepted > 0 and refused > accepted / 10 for accepted, refused in counts.values()), counts
