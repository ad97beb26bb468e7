"""`pull` fetches aliases, prints the path; `bench stages` hands its flags over."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from quickdraft.cli.main import app
from quickdraft.config import ModelAlias
from quickdraft.doctor.card import promises as card_promises
from quickdraft.prepare import models
from tests.cli.fakes import install


def test_pull_fetches_the_default_alias(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fetched: list[tuple[str, Path]] = []

    def fetch(alias: ModelAlias, cache: Path, *, report: Any) -> Path:
        fetched.append((alias.name, cache))
        report("downloading")
        return cache

    monkeypatch.setattr(models, "fetch", fetch)
    monkeypatch.setenv("QUICKDRAFT_CACHE", str(tmp_path))
    result = CliRunner().invoke(app, ["pull"])
    assert result.exit_code == 0
    assert fetched == [("smollm2-135m", tmp_path)]
    assert result.stdout == f"{tmp_path}/models/SmolLM2-135M-Instruct.Q4_1.gguf\n"
    assert result.stderr == "downloading\n"


def test_pull_of_an_unknown_name(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["pull", "llama-9000"])
    assert result.exit_code == 2
    assert "smollm2-135m" in result.stderr


def test_pull_of_a_file_prints_its_path(gguf: str) -> None:
    result = CliRunner().invoke(app, ["pull", gguf])
    assert (result.exit_code, result.stdout) == (0, f"{gguf}\n")


def test_bench_stages(monkeypatch: pytest.MonkeyPatch, gguf: str, tmp_path: Path) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    install(monkeypatch, "quickdraft.bench.stages", run=lambda *a, **k: calls.append((a, k)))
    file = tmp_path / "out.json"
    result = CliRunner().invoke(
        app,
        ["bench", "stages", gguf, "--workloads", "copy,rag", "--stages", "off, lookup@16",
         "--max-tokens", "64", "--json", str(file), "--threads", "2", "--head-bits", "8", "--plot", "a.svg",
         "--drafter", "a", "--draft-vocab", "v.json", "--frozen-costs", "--explain-drafts", "e.jsonl",
         "--backend", "cpu"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    CliRunner().invoke(app, ["bench", "stages", gguf])
    given = {
        "workloads": ["copy", "rag"],
        "stages": ["off", "lookup@16"],
        "max_tokens": 64,
        "json_path": file,
        "threads": 2,
        "head_bits": 8,
        "drafters": (Path("a"),),
        "draft_vocab": Path("v.json"),
        "plot_path": Path("a.svg"),
        "frozen_costs": True,
        "explain_drafts": Path("e.jsonl"),
        "backend": "cpu",
    }
    defaults = dict.fromkeys(given) | {"frozen_costs": False, "backend": "auto"}
    assert calls == [((gguf,), given), ((gguf,), defaults)]


@pytest.mark.parametrize(
    ("command", "module", "head"),
    [("ops", "op_times", ["16"]), ("verify-cost", "verify_cost", ["16"]), ("kv-types", "kv_types", [])],
)
def test_bench_by_rows_and_contexts(
    monkeypatch: pytest.MonkeyPatch, gguf: str, tmp_path: Path, command: str, module: str, head: list[str]
) -> None:
    calls: list[tuple[Any, ...]] = []
    install(monkeypatch, f"quickdraft.bench.{module}", run=lambda *a: calls.append(a))
    file = tmp_path / "out.json"
    flags = ["--rows", "1, 8", "--contexts", "0,300", "--json", str(file), "--threads", "2"]
    flags += ["--head-bits", *head] if head else []
    assert CliRunner().invoke(app, ["bench", command, gguf, *flags]).exit_code == 0
    assert CliRunner().invoke(app, ["bench", command, gguf]).exit_code == 0
    bits = [int(value) for value in head]
    nothing, chosen = [None] * len(bits), ["auto"] * (command == "verify-cost")
    assert calls == [
        (gguf, file, [1, 8], [0, 300], 2, *bits, *chosen),
        (gguf, None, None, None, None, *nothing, *chosen),
    ]
    wrong = CliRunner().invoke(app, ["bench", command, gguf, "--rows", "1,x"])
    assert wrong.exit_code == 2 and "--rows" in wrong.stderr


def test_bench_machine_takes_a_model_or_none(monkeypatch: pytest.MonkeyPatch, gguf: str) -> None:
    calls: list[tuple[Any, ...]] = []
    install(monkeypatch, "quickdraft.bench.limits", run=lambda *a: calls.append(a))
    assert CliRunner().invoke(app, ["bench", "machine"]).exit_code == 0
    assert CliRunner().invoke(app, ["bench", "machine", gguf, "--threads", "1"]).exit_code == 0
    assert calls == [(None, None, None), (gguf, None, 1)]
    assert CliRunner().invoke(app, ["bench", "machine", "no-such-model"]).exit_code == 2


@pytest.mark.parametrize(("fine", "status"), [(True, 0), (False, 1)])
def test_bench_card(monkeypatch: pytest.MonkeyPatch, fine: bool, status: int) -> None:
    calls: list[tuple[Any, ...]] = []

    def run(*arguments: Any, promises: Any) -> Any:
        calls.append((*arguments, promises))
        return SimpleNamespace(ok=fine)

    install(monkeypatch, "quickdraft.bench.card", run=run)
    assert CliRunner().invoke(app, ["bench", "card", "--json", "r.json"]).exit_code == status
    assert calls == [(Path("r.json"), card_promises)]


def test_bench_policy_opens_a_model_only_where_it_needs_one(
    monkeypatch: pytest.MonkeyPatch, gguf: str, tmp_path: Path
) -> None:
    calls: list[tuple[Any, ...]] = []

    def run(*arguments: Any, leave_one_out: bool) -> None:
        calls.append((*arguments, leave_one_out))

    install(monkeypatch, "quickdraft.bench.policy", run=run, ModelOptions=lambda *a: a)
    traces, table = tmp_path / "traces.jsonl", tmp_path / "priors.json"
    flags = ["--curve", "rtx3090", "--traces", str(traces), "--contexts", "2000, 25000", "--json", "r.json"]
    flags += ["--fit-priors", str(table), "--threads", "2", "--head-bits", "8", "--drafter", "a"]
    flags += ["--leave-one-out"]
    assert CliRunner().invoke(app, ["bench", "policy", "no-such-model", *flags]).exit_code == 0
    opened = "no-such-model", 2, 8, (Path("a"),), None
    assert calls == [(opened, "rtx3090", traces, None, [2000, 25000], Path("r.json"), table, True)]
    assert CliRunner().invoke(app, ["bench", "policy", gguf, "--record", str(traces)]).exit_code == 0
    assert calls[1] == ((gguf, None, None, None, None), "measured", None, traces, None, None, None, False)
    for needs in ([], ["--curve", "cpu", "--record", str(traces)]):
        assert CliRunner().invoke(app, ["bench", "policy", "no-such-model", *needs]).exit_code == 2


@pytest.mark.parametrize(("failed", "status"), [(None, 0), ("3 tokens", 1)])
def test_bench_peers(monkeypatch: pytest.MonkeyPatch, gguf: str, failed: str | None, status: int) -> None:
    calls: list[tuple[Any, ...]] = []

    def run(*arguments: Any) -> Any:
        calls.append(arguments)
        return SimpleNamespace(rows=(SimpleNamespace(failed=failed),))

    before = signal.getsignal(signal.SIGTERM)
    install(monkeypatch, "quickdraft.bench.peers", run=run)
    flags = ["--llama-server", "some/llama-server", "--rounds", "5", "--threads", "2"]
    flags += ["--tasks", "decode, copy"]
    assert CliRunner().invoke(app, ["bench", "peers", gguf, *flags]).exit_code == status
    signal.signal(signal.SIGTERM, before)
    assert calls == [(Path("some/llama-server"), gguf, None, 2, 5, ["decode", "copy"])]
    assert CliRunner().invoke(app, ["bench", "peers", gguf]).exit_code == 2
