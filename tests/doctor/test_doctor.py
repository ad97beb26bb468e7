"""The doctor is green on healthy models, and a planted fault fails the check that is named for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quickdraft import config
from quickdraft.config import ModelAlias
from quickdraft.doctor import drafting
from quickdraft.doctor import run as doctor
from quickdraft.doctor.check import Report
from quickdraft.doctor.patient import Patient
from quickdraft.engine.llm import LLM
from quickdraft.models.registry import open_target
from quickdraft.speculate.draft import Draft, Verdict
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import SamplingParams
from tests.support.draft_engine import knowing_drafter
from tests.support.mtp_folder import write_mtp_folder
from tests.support.tiny import CHAT_TEMPLATE, write_tiny_llama
from tests.support.tiny_hybrid import write_tiny_hybrid

EXACT = {"speculation", "prefix cache", "batch"}
NAMES = [
    "files", "model", "tokenizer", "chat template", "kernels", "machine", "memory", "speculation",
    "prefix cache", "batch", "stream", "drafters", "gain",
]  # fmt: skip
Plant = Callable[[Patient, pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache folder of its own; no second of measuring this machine; no digest computed twice."""
    monkeypatch.setenv("QUICKDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("quickdraft.doctor.machine.read_bandwidth", lambda threads: 3e10)
    monkeypatch.setattr("quickdraft.doctor.machine.PEAK_REPEATS", 1)


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Patient]:
    """A tiny llama with an MTP module that is often right."""
    path, module = write_tiny_llama(tmp_path / "tiny.gguf"), write_mtp_folder(tmp_path / "mtp")
    llm = LLM(path, threads=1, kv_memory_bytes=4 << 20, drafters=(module,))
    yield Patient(llm, 1 << 40)
    assert llm.free_blocks == llm.total_blocks, "the doctor left a request behind"
    llm.close()


def examined(patient: Patient) -> Report:
    return Report(tuple(doctor.examine(patient, threads=1)))


def failed(report: Report) -> set[str]:
    return {check.name for check in report.checks if not check.ok}


def settings(**changes: Any) -> doctor.Settings:
    return doctor.Settings(threads=1, kv_memory_bytes=4 << 20, measure_costs=False, **changes)


def what_follows(path: Path) -> dict[int, int]:
    """Which token comes after which in the answers the doctor asks for."""
    llm, following = LLM(path, threads=1, kv_memory_bytes=4 << 20), {}
    for _, prompt in drafting.prompts(Patient(llm, 0)):
        ids = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True)).ids
        following |= dict(pairwise(ids))
    llm.close()
    return following


@pytest.mark.parametrize("kind", ["mtp", "dflash2", "hybrid", "no tokenizer"])
def test_green_on_healthy_models(kind: str, tmp_path: Path) -> None:
    drafters = None
    if kind == "hybrid":
        path = write_tiny_hybrid(tmp_path / "tiny")
    else:
        path = write_tiny_llama(tmp_path / "tiny.gguf", tokenizer=kind != "no tokenizer")
    if kind == "mtp":
        drafters = (write_mtp_folder(tmp_path / "mtp"),)
    if kind == "dflash2":
        drafters = (knowing_drafter(tmp_path / "dflash2", open_target(path).config, what_follows(path)),)
    heard = []
    report = doctor.run(path, settings(drafters=drafters), heard.append)
    assert report.ok, [check for check in report.checks if not check.ok]
    assert tuple(heard) == report.checks and [check.name for check in heard] == NAMES
    skipped = [check.name for check in report.checks if check.skipped]
    assert skipped == (["tokenizer", "chat template", "stream"] if kind == "no tokenizer" else [])
    said = {check.name: check.detail for check in report.checks}
    assert f"of {2 * sum(range(1, 41)) + 2 * 40} such tokens came from it" in said["prefix cache"]
    source = {"hybrid": "mtp", "no tokenizer": None}.get(kind, kind)
    if source is not None:
        assert f"{source}, {source}+lookup, auto" in said["speculation"]
        assert f"{source} (in auto): " in said["drafters"] and f"{source} " in said["gain"]
    assert ("keys and values of drafters" in said["memory"]) == (kind == "dflash2")


class ChangedRunner:
    """A runner whose results pass through `change` (plan, rows)."""

    def __init__(self, patient: Patient, change: Callable[[Any, list[list[Any]]], list[list[Any]]]) -> None:
        self._inner, self._change = patient.llm.opened.engine.runner, change
        patient.llm.opened.engine.runner = self

    def run(self, plan: Any) -> list[list[Any]]:
        return self._change(plan, self._inner.run(plan))


class OneBitOff:
    """A row whose logits are right but for the last bits of the first."""

    def __init__(self, row: Any) -> None:
        self.argmax, self.top, self.gumbel, self._row = row.argmax, row.top, row.gumbel, row

    def full(self) -> Any:
        values = self._row.full().copy()
        values[0] += abs(values).max() * 1e-5
        return values


def credulous_walk(request: Any, rows: Any, draft: Any) -> Verdict:
    """Emits the draft, whatever the rows say."""
    emitted, finish = [], None
    for index, row in enumerate(rows):
        token = request.choose(row)
        token = draft[index] if index < len(draft) else token
        finish = request.push(token)
        emitted.append(token)
        if finish is not None:
            break
    return Verdict(tuple(emitted), len(draft), finish)


def believes_drafts(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quickdraft.engine.loop.walk", credulous_walk)


def rows_depend_on_rows(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    ChangedRunner(patient, lambda plan, rows: [[row[0], *row[:-1]] if len(row) > 2 else row for row in rows])


def last_bits_depend_on_rows(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    ChangedRunner(patient, lambda plan, rows: [[*row[:1], *map(OneBitOff, row[1:])] for row in rows])


def forgets_to_copy(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = patient.llm.opened.engine.scheduler.cache
    monkeypatch.setattr(cache, "_copy_block", lambda source, target: None)


def wipes_a_block(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = patient.llm.opened
    cache, keys = opened.engine.scheduler.cache, opened.memory.kv.keys
    attach = cache.attach

    def wiping(state: Any, *arguments: Any) -> Any:
        found = attach(state, *arguments)
        if state.committed >= 16:
            keys[:, state.block_table[0]] = 0
        return found

    monkeypatch.setattr(cache, "attach", wiping)


def caches_nothing(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = patient.llm.opened.engine.scheduler.cache
    monkeypatch.setattr(cache, "publish", lambda cursor, state, tokens, partial: cursor)


def leaks_in_a_batch(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(plan: Any, rows: list[list[Any]]) -> list[list[Any]]:
        wanted = [row[0] for row in rows if row]
        return rows if len(wanted) < 2 else [[wanted[0], *row[1:]] if row else row for row in rows]

    ChangedRunner(patient, change)


def breaks_in_a_batch(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(plan: Any, rows: list[list[Any]]) -> list[list[Any]]:
        if len(plan.entries) > 1:
            raise RuntimeError("no batch today")
        return rows

    ChangedRunner(patient, change)


def module_is_never_right(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = patient.llm.opened.engine.drafting._drafters["mtp"]
    propose = drafter.propose

    def wrong(view: Any, budget: int) -> Draft:
        draft = propose(view, budget)
        return Draft(tuple((token + 5) % 320 for token in draft.tokens), "mtp", draft.scores)

    monkeypatch.setattr(drafter, "propose", wrong)


def loses_spaces(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda self, ids: decode(self, ids).replace("  ", " "))


def cuts_characters(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    def push(self: Any, token: int) -> str:
        return self._token_bytes(token).decode("utf-8", "replace")

    monkeypatch.setattr("quickdraft.text.detokenizer.Detokenizer.push", push)


def template(old: str, new: str) -> Plant:
    def plant(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
        assert old in CHAT_TEMPLATE
        patient.llm.opened.chat_template = ChatTemplate(CHAT_TEMPLATE.replace(old, new))

    return plant


@pytest.mark.parametrize(
    ("plant", "named", "untouched", "says"),
    [
        (believes_drafts, "speculation", {"prefix cache"}, "plain decoding gives"),
        (rows_depend_on_rows, "speculation", {"prefix cache"}, "plain decoding gives"),
        (last_bits_depend_on_rows, "speculation", {"prefix cache", "gain"}, "other logprobs"),
        (forgets_to_copy, "prefix cache", {"speculation", "batch", "stream"}, "a cold cache gives"),
        (wipes_a_block, "prefix cache", {"speculation", "batch", "stream"}, "a cold cache gives"),
        (caches_nothing, "prefix cache", set(NAMES), "none of 1720 tokens"),
        (leaks_in_a_batch, "batch", set(NAMES), "the request alone gives"),
        (breaks_in_a_batch, "batch", set(NAMES), "RuntimeError in test_doctor.py"),
        (module_is_never_right, "drafters", set(NAMES), "not one was right"),
        (loses_spaces, "tokenizer", EXACT, "came back as"),
        (cuts_characters, "stream", EXACT | {"tokenizer"}, "streams as"),
        (template("'<|im_end|>'", "'<|endoftext|>'"), "chat template", set(NAMES), "does not end an answer"),
        (template("message['content']", "'...'"), "chat template", EXACT, "leaves out what the user said"),
        (template("message['role']", "message['role'] + 1"), "chat template", EXACT, "template failed"),
    ],
    ids=lambda value: getattr(value, "__name__", None) if callable(value) else "",
)  # fmt: skip
def test_a_planted_fault_fails_its_check(
    plant: Plant,
    named: str,
    untouched: set[str],
    says: str,
    patient: Patient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(patient, monkeypatch)
    report = examined(patient)
    found = {check.name: check for check in report.checks}
    assert not report.ok and not found[named].ok, found[named]
    assert says in found[named].detail and "`" in found[named].hint, found[named]
    assert not failed(report) & (untouched - {named}), failed(report)


def test_memory_that_does_not_suffice_is_named(patient: Patient) -> None:
    report = examined(Patient(patient.llm, 1 << 20))
    assert failed(report) == {"memory"}
    assert "--kv-memory" in next(check.hint for check in report.checks if not check.ok)


def test_rates_that_are_none_fail(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quickdraft.doctor.machine.read_bandwidth", lambda threads: float("nan"))
    assert failed(examined(patient)) == {"machine"}


@pytest.mark.parametrize("fault", ["none", "a flipped byte", "cut short", "missing", "no cache"])
def test_files_are_compared_with_what_was_published(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    alias = ModelAlias(
        "tiny", "tiny.gguf", "none==1", "", len(data), hashlib.sha256(data).hexdigest(), "Apache-2.0"
    )
    monkeypatch.setitem(config.ALIASES, "tiny", alias)  # type: ignore[call-overload]
    held = tmp_path / "cache" / "models" / "tiny.gguf"
    held.parent.mkdir(parents=True)
    if fault == "a flipped byte":
        data[-1] ^= 1
    held.write_bytes(data[:-1] if fault == "cut short" else data)
    if fault == "missing":
        held.unlink()
    if fault == "no cache":
        monkeypatch.setattr("quickdraft.doctor.files.cache_folder", lambda: held)  # no folder
    report = doctor.run("tiny", settings(drafters=()))
    first = report.checks[0]
    says = {
        "none": "SHA-256 as published",
        "a flipped byte": "is damaged",
        "cut short": "bytes, the original",
        "missing": "is not there",
        "no cache": "cannot write to the cache folder",
    }[fault]
    assert first.name == "files" and says in first.detail and first.ok == (fault == "none"), first
    assert first.ok or "quickdraft pull tiny" in first.hint or "QUICKDRAFT_CACHE" in first.hint
    opened = fault not in ("cut short", "missing")
    assert {check.skipped for check in report.checks[2:]} == {not opened}
    assert [check.name for check in report.checks] == NAMES
    assert failed(report) == ({"files"} if fault != "none" else set()) | (set() if opened else {"model"})
