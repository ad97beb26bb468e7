"""`bench prefix` on a tiny file: what it counts; its times are for people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quickdraft.bench import prefix
from quickdraft.engine.scheduler import Scheduler
from quickdraft.errors import ConfigError, ContextTooLong
from tests.support.tiny import write_tiny_llama
from tests.support.tiny_hybrid import write_tiny_hybrid


@pytest.mark.parametrize(
    ("tokens", "new_tokens", "tokenizer"), [(96, 5, False), (201, 32, True), (2, 1, True)]
)
def test_counts(
    tmp_path: Path,
    tokens: int,
    new_tokens: int,
    tokenizer: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf", tokenizer=tokenizer)
    prefix.run(model, tokens, new_tokens, tmp_path / "out.json", threads=1)
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["schema"] == "quickdraft-prefix-1"
    assert data["prompt_tokens"] == tokens + new_tokens and data["cached_tokens"] == tokens
    assert data["ids_equal_cold"] is True
    if "failed" in data:  # random weights: the text may be degenerate, and no speed is shown then
        assert "degenerate" in data["failed"] and data["ttft_warm_ms"] is None
        assert "FAIL" in capsys.readouterr().out
    else:
        assert min(data["ttft_cold_ms"], data["ttft_warm_ms"], data["ttft_restart_ms"]) > 0
    assert data["cache_bytes"] > 0 and data["disk_bytes"] > 0 and data["checkpoint_bytes"] == 0


def test_a_model_with_recurrent_layers(tmp_path: Path) -> None:
    """Where the questions part from the document a state is kept, in memory and on disk."""
    model = write_tiny_hybrid(tmp_path / "tiny", tokenizer=False)
    prefix.run(model, 201, 5, tmp_path / "out.json", threads=1)
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["cached_tokens"] == 201 and data["ids_equal_cold"] is True and "failed" not in data
    assert data["checkpoint_bytes"] > 0


def test_no_time_is_shown_for_a_cache_that_does_not_hit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf", tokenizer=False)
    monkeypatch.setattr(prefix, "forward", lambda *arguments: 1.0)
    monkeypatch.setattr(Scheduler, "_attach", lambda self, item: None)
    result = prefix.run(model, 64, 4, None, threads=1)
    assert result.failed is not None and "not 64" in result.failed and result.ttft_warm_ms is None
    assert "FAIL" in capsys.readouterr().out


def test_what_cannot_run_is_an_error(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    with pytest.raises(ContextTooLong):
        prefix.run(model, 100_000, 4, None, threads=1)
    with pytest.raises(ConfigError, match="no folder"):
        prefix.run(model, 100, 4, tmp_path / "none" / "out.json", threads=1)
