"""`bench peers` with a real quickdraft and a fake llama-server: who is asked what, and that all are ended."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from quickdraft.bench import peers
from quickdraft.bench.peer_tasks import DRAFTING, Sizes
from quickdraft.errors import ConfigError, EngineError, UnsupportedError
from tests.support.fake_llama_server import NEW_HELP, OLD_HELP, write_binary
from tests.support.tiny import write_tiny_llama

SIZES = Sizes(
    contexts=(0, 40), decode=6, prefills=(33,), copy_document=50, copy_decode=20, cached=70, question=5
)


def starts(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny.gguf")


@pytest.fixture(autouse=True)
def import_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"))


def test_every_task_under_every_configuration(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "starts"
    binary = write_binary(tmp_path / "llama-server", NEW_HELP, starts_file=log, ends_with="ngram-mod")
    peers.run(binary, tiny, tmp_path / "out.json", threads=1, rounds=2, sizes=SIZES)
    data = json.loads((tmp_path / "out.json").read_text())
    assert (data["schema"], data["peer_version"]) == ("quickdraft-peers-1", "4711 (abc)")
    names = ["prefill 33", "copy, plain", DRAFTING, "decode after 0", "decode after 40"]
    assert [row["name"] for row in data["rows"]] == [*names, "second question (70 of 75 cached)"]
    for row in data["rows"]:
        assert row["ratio"] is not None and min(row["ratio"], row["quickdraft"], row["peer"]) > 0
    drafting = next(row for row in data["rows"] if row["name"] == DRAFTING)
    assert "ngram-simple" in drafting["peer_config"] and drafting["quickdraft_config"].startswith("lookup@")
    failed = [one for one in data["configurations"] if "failed" in one]
    assert {one["peer_config"].split(", ")[1].split(" ")[0] for one in failed} == {"ngram-mod"}
    assert all("does not like this flag" in one["failed"] for one in failed)
    assert "texts differ in" in capsys.readouterr().out  # the fake knows no language
    # two plain, two of ngram-simple, and the better of these with the other flash attention
    assert len(starts(log)) == 5
    for start in starts(log):
        assert "--threads 1" in " ".join(start["arguments"])
        with pytest.raises(ProcessLookupError):
            os.kill(start["pid"], 0)


def test_a_peer_that_forgets_has_no_speed_where_a_cache_was_asked_for(tiny: Path, tmp_path: Path) -> None:
    binary = write_binary(tmp_path / "llama-server", OLD_HELP, forgets=True)
    result = peers.run(binary, tiny, None, threads=1, rounds=1, sizes=SIZES)
    rows = {row.task.name: row for row in result.rows}
    assert "it was not cached" in str(rows["second question (70 of 75 cached)"].failed)
    assert rows["prefill 33"].failed is None
    assert "it has no n-gram drafting" in rows[DRAFTING].peer_config


@pytest.mark.parametrize(
    ("fault", "message"),
    [("short", "0 tokens were generated, not 1"), ("dies", "ended, status 7; got it is all too much")],
)
def test_a_peer_without_any_valid_answer_is_an_error(
    tiny: Path, tmp_path: Path, fault: str, message: str
) -> None:
    binary = write_binary(tmp_path / "llama-server", OLD_HELP, **{fault: True})
    with pytest.raises(EngineError, match=message):
        peers.run(binary, tiny, None, threads=1, rounds=1, sizes=SIZES)


def test_interrupted_while_the_peer_runs(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    log = tmp_path / "starts"
    binary = write_binary(tmp_path / "llama-server", NEW_HELP, starts_file=log)
    monkeypatch.setattr(peers._Comparison, "_pair", interrupted)
    with pytest.raises(KeyboardInterrupt):
        peers.run(binary, tiny, None, threads=1, sizes=SIZES)
    (start,) = starts(log)
    with pytest.raises(ProcessLookupError):
        os.kill(start["pid"], 0)


def test_only_some_kinds_of_tasks(tiny: Path, tmp_path: Path) -> None:
    binary = write_binary(tmp_path / "llama-server", OLD_HELP)
    result = peers.run(binary, tiny, None, threads=1, rounds=1, only=["decode"], sizes=SIZES)
    assert [row.task.name for row in result.rows] == [f"decode after {count}" for count in SIZES.contexts]
    with pytest.raises(ConfigError, match="kinds of tasks"):
        peers.run(binary, tiny, only=["decoding"])


def test_a_folder_is_not_for_llama_server(tmp_path: Path) -> None:
    binary = write_binary(tmp_path / "llama-server", NEW_HELP)
    with pytest.raises(UnsupportedError, match="GGUF"):
        peers.run(binary, tmp_path)
