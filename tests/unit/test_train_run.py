"""Training drafters of the tiny llama: exact resume, the self-test, export and evaluation."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from quickdraft.errors import ConfigError, EngineError
from quickdraft.models.draft_vocab import DraftVocab
from quickdraft.train.evaluate import evaluate, table_of
from quickdraft.train.fit import Plan, batch
from quickdraft.train.open_target import mask_of, open_for_training
from quickdraft.train.overfit import alignment, likely_cause, overfit
from quickdraft.train.rows import FEATURES, held_out, read_rows
from quickdraft.train.run import DRAFTER, prepare, train_drafter
from tests.support.tiny import write_tiny_llama
from tests.support.tiny_hybrid import write_tiny_hybrid
from tests.support.training import STEPS, Quiet, tiny_data, tiny_settings, tiny_target

KINDS = pytest.mark.parametrize("kind", ["mtp", "dflash2"])
SLOTS = {"mtp": 3, "dflash2": 3}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    return tiny_data(tmp_path_factory.mktemp("data"), target)


@pytest.fixture(scope="module", params=["mtp", "dflash2"])
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, target: Path, data: Path
) -> tuple[str, Path]:
    out = tmp_path_factory.mktemp(request.param)
    train_drafter(tiny_settings(request.param, target, out, data), Quiet())
    return request.param, out


def tensors(folder: Path) -> dict[str, bytes]:
    with safe_open(folder / "checkpoint.safetensors", "numpy") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


_KILLED = """
import os, signal, sys
from pathlib import Path
from quickdraft.train.run import train_drafter
from tests.support.training import Quiet, tiny_settings
def at(step):
    if step == 30:
        os.kill(os.getpid(), signal.SIGKILL)
kind, *paths = sys.argv[1:]
train_drafter(tiny_settings(kind, *map(Path, paths)), Quiet(at))
"""


def test_a_killed_run_goes_on_to_the_same_bits(
    trained: tuple[str, Path], target: Path, data: Path, tmp_path: Path
) -> None:
    kind, whole = trained
    command = [sys.executable, "-c", _KILLED, kind, str(target), str(tmp_path), str(data)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with safe_open(tmp_path / "checkpoint.safetensors", "numpy") as file:
        assert 0 < json.loads(file.metadata()["about"])["step"] < STEPS
    with open(tmp_path / "curve.jsonl", "a") as curve:
        curve.write('{"step": 3')  # a line that was cut off
    train_drafter(tiny_settings(kind, target, tmp_path, data), Quiet())
    assert tensors(tmp_path) == tensors(whole)
    for name in ("config.json", "model.safetensors", "draft_vocab.json"):
        assert (tmp_path / DRAFTER / name).read_bytes() == (whole / DRAFTER / name).read_bytes()
    steps = [json.loads(line)["step"] for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == STEPS


def test_what_is_exported_says_how_it_was_made(trained: tuple[str, Path], data: Path) -> None:
    kind, out = trained
    config = json.loads((out / DRAFTER / "config.json").read_text())
    learnt = [row for row in read_rows(data) if not held_out(row)]
    note = config["training"]
    assert (note["steps"], note["seed"], note["rows"]) == (STEPS, 1, len(learnt))
    assert note["tokens"] == sum(len(row.tokens) for row in learnt)
    assert len(note["held_out_tokens_per_step"]) == SLOTS[kind]
    first, *_, last = [json.loads(line)["loss"] for line in (out / "curve.jsonl").read_text().splitlines()]
    assert last < first
    vocab = DraftVocab.load(out / DRAFTER / "draft_vocab.json", 320)
    assert len(vocab) <= 200 and vocab.coverage > 0.9


def test_other_settings_are_refused(trained: tuple[str, Path], target: Path, data: Path) -> None:
    kind, out = trained
    settings = tiny_settings(kind, target, out, data)
    with pytest.raises(ConfigError, match=r"other settings; got seed"):
        train_drafter(replace(settings, seed=2), Quiet())
    train_drafter(replace(settings, bits=8), Quiet())  # done, so it is only exported again
    train_drafter(settings, Quiet())


def test_evaluation_through_the_engine(trained: tuple[str, Path], target: Path, data: Path) -> None:
    kind, out = trained
    settings = tiny_settings(kind, target, out, data)
    result = evaluate(out / DRAFTER, str(target), data, 8, 30, 1, Quiet())
    engine, forced = result["engine"], result["teacher_forced"]
    session = prepare(settings, Quiet())
    held = session.corpus.held_out
    assert result["rows"] == len(held) == 2
    # the exported folder, read back, is the network that was trained, in 16 bits
    start = {name: value.half().float() for name, value in trained_weights(out).items()}
    session.trainee.weights = start
    assert forced["positions"] == session.trainee.measure(session.corpus, held).positions
    np.testing.assert_allclose(
        forced["slot_accuracy"], session.trainee.measure(session.corpus, held).slot_accuracy, atol=0.05
    )
    assert len(engine["tokens_per_step"]) == len(engine["slot_accuracy"]) == SLOTS[kind]
    assert all(1 <= value <= 1 + n for n, value in enumerate(engine["tokens_per_step"], 1))
    assert sum(engine["accepted"]) > 0 and engine["tokens"] == 60
    assert sum(n * count for n, count in enumerate(engine["accepted"])) > 0, "nothing was ever right"
    assert len(table_of(result)) == SLOTS[kind] + 2


def trained_weights(out: Path) -> dict:  # type: ignore[type-arg]
    with safe_open(out / "checkpoint.safetensors", "pt") as file:
        names = [name for name in file.keys() if name.startswith("weights.")]  # noqa: SIM118
        return {name.removeprefix("weights."): file.get_tensor(name) for name in names}


@KINDS
def test_a_few_rows_are_learnt_by_heart(kind: str, target: Path, data: Path, tmp_path: Path) -> None:
    settings = tiny_settings(kind, target, tmp_path, data, steps=None, vocab_size=320)
    assert overfit(settings, Quiet()) > 0.9
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifted_features_are_named(shift: int, target: Path, data: Path, tmp_path: Path) -> None:
    prepared = prepare(tiny_settings("mtp", target, tmp_path / "out", data), Quiet())
    sound = alignment(prepared.corpus, prepared.trainee.head)
    assert sound[0] > 0.95 and "labels or masks" in likely_cause(sound)
    width = 2 * 4 * 64  # bytes of a position: three taps and the final state
    values = (data / FEATURES).read_bytes()
    moved = values[-shift * width :] + values[: -shift * width]
    other = tmp_path / "data"
    other.mkdir()
    for name in ("rows.jsonl", "features.json"):
        (other / name).write_bytes((data / name).read_bytes())
    (other / FEATURES).write_bytes(moved)
    settings = tiny_settings("mtp", target, tmp_path, other, steps=2)
    with pytest.raises(EngineError, match=rf"features are shifted by {re.escape(format(shift, '+d'))}"):
        overfit(settings, Quiet())


def test_every_row_comes_once_per_epoch() -> None:
    plan = Plan(10, 3, 1e-3, seed=4)
    rows = [5, 7, 9, 11, 13, 15]
    seen = [batch(plan, rows, step) for step in range(4)]
    assert sorted(seen[0] + seen[1]) == sorted(seen[2] + seen[3]) == rows
    assert seen[:2] != seen[2:] and seen == [batch(plan, rows, step) for step in range(4)]


def test_a_target_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    from quickdraft.errors import UnsupportedError

    folder = write_tiny_hybrid(tmp_path / "hybrid")
    with pytest.raises(UnsupportedError, match="recurrent layers"):
        open_for_training(folder)


def test_the_mask_is_a_control_token_no_chat_writes(tmp_path: Path) -> None:
    opened, _ = open_for_training(write_tiny_llama(tmp_path / "tiny.gguf"))
    assert mask_of(opened) == 0  # <|endoftext|>: the other two are its BOS and EOS
    tokenizer = replace(opened.tokenizer, padding_id=0)
    with pytest.raises(ConfigError, match="mask"):
        mask_of(replace(opened, tokenizer=tokenizer))
