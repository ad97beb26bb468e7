"""Opening drafters: what is found by default, and one that was asked for drafts or ends the start."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quickdraft.cli.main import app
from quickdraft.engine import open_drafters
from quickdraft.engine.dflash_drafter import DFlashDrafter
from quickdraft.engine.draft_sizes import drafter_sizes
from quickdraft.engine.llm import LLM
from quickdraft.engine.mtp_drafter import MTPDrafter
from quickdraft.errors import ConfigError, ModelFormatError, UnsupportedError
from quickdraft.models.draft_vocab import head_name
from quickdraft.models.registry import open_target
from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.speculate.cost_curve import MeasuredCosts, StepTimes
from quickdraft.types import SamplingParams, Speculation
from tests.support.draft_engine import knowing_drafter
from tests.support.mtp_folder import write_mtp_folder
from tests.support.tiny import write_tiny_llama

SETTINGS: dict[str, Any] = {"threads": 1, "kv_memory_bytes": 1 << 21}
NEXT = {t: t - t % 10 + (t + 1) % 10 for t in range(60)}


@pytest.fixture(autouse=True)
def nothing_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder in place of the package's."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(open_drafters, "SHIPPED", folder)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "tiny.gguf", vocabulary_size=60, tokenizer=False)


def drafter(folder: Path, model: Path, version: int = 2, **more: Any) -> Path:
    folder.parent.mkdir(exist_ok=True)
    knowing_drafter(folder, open_target(model).config, NEXT, version)
    return rewrite(folder, **more)


def rewrite(folder: Path, **more: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder


def opened_sources(model: Path, **settings: Any) -> tuple[str, ...]:
    llm = LLM(model, **SETTINGS | settings)
    try:
        found = llm.opened.sources
        text = "\n".join(llm.opened.explain())
        assert all(source in text for source in found), text
        assert set(llm.opened.engine.metrics().drafted) == set(found)
        return found
    finally:
        llm.close()


def test_folders_are_opened_by_what_they_say_they_are(model: Path, tmp_path: Path) -> None:
    both = [drafter(tmp_path / "one", model, 1), drafter(tmp_path / "two", model, 2)]
    assert opened_sources(model, drafters=both) == ("forced", "prediction", "lookup", "dflash", "dflash2")
    assert opened_sources(model) == opened_sources(model, drafters=()) == ("forced", "prediction", "lookup")


def test_drafters_in_the_package_are_for_one_weight_file(
    model: Path, tmp_path: Path, nothing_shipped: Path
) -> None:
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    drafter(nothing_shipped / "mine", model, target_sha256=digest)
    drafter(nothing_shipped / "other", model, 1, target_sha256="0" * 64)
    drafter(nothing_shipped / "unnamed", model, 1)
    (nothing_shipped / "README.md").write_text("no drafter")
    assert opened_sources(model) == ("forced", "prediction", "lookup", "dflash2")
    assert opened_sources(model, drafters=()) == ("forced", "prediction", "lookup")
    assert opened_sources(model, drafters=[drafter(tmp_path / "one", model, 1)]) == (
        "forced",
        "prediction",
        "lookup",
        "dflash",
    )
    twin = write_tiny_llama(tmp_path / "twin.gguf", vocabulary_size=60, tokenizer=False, seed=2)
    assert opened_sources(twin) == ("forced", "prediction", "lookup")


def test_side_cars_count_in_the_memory_for_keys_and_values(model: Path, tmp_path: Path) -> None:
    plain, drafting = (
        LLM(model, **SETTINGS, drafters=drafters) for drafters in ((), [drafter(tmp_path / "two", model)])
    )
    car = drafting.opened.memory.side_cars[0]
    per_block = drafting.opened.runner.kv.bytes_per_block + car.kv.bytes_per_block
    assert drafting.total_blocks == SETTINGS["kv_memory_bytes"] // per_block < plain.total_blocks
    plain.close()
    drafting.close()


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda folder: [folder / "nothing"], ConfigError, "no drafter there"),
        (lambda folder: [folder / "config.json"], ConfigError, "no drafter there"),
        (lambda folder: (folder / "config.json").unlink(), ModelFormatError, "config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), ModelFormatError, "model.safetensors"),
        (lambda folder: [folder, folder], ConfigError, "2 drafters of source 'dflash2'"),
        (lambda folder: rewrite(folder, architectures=["Llama"]), UnsupportedError, "architectures.*Llama"),
        (lambda folder: rewrite(folder, target_sha256="0" * 64), ModelFormatError, "target_sha256"),
        (lambda folder: rewrite(folder, hidden_size=128), ModelFormatError, "hidden_size"),
    ],
)
def test_a_drafter_that_cannot_run_ends_the_start(
    model: Path, tmp_path: Path, spoil: Any, error: type[Exception], message: str
) -> None:
    folder = drafter(tmp_path / "two", model)
    folders = spoil(folder)
    with pytest.raises(error, match=message):
        LLM(model, **SETTINGS, drafters=folders if isinstance(folders, list) else [folder])


def test_a_cache_on_disk_is_of_one_set_of_drafters(model: Path, tmp_path: Path) -> None:
    """Rows of another drafter, of the same sizes, are never taken for its own."""
    one, other = (drafter(tmp_path / name, model) for name in "ab")
    rewrite(other, rms_norm_eps=1e-5)
    params = SamplingParams(temperature=0.0, max_tokens=8, speculation=Speculation.parse("dflash2"))
    prompt = [*range(10, 50)]
    cached = []
    for folder in (one, other, one):
        llm = LLM(model, **SETTINGS, drafters=[folder], cache_dir=tmp_path / "kv")
        cached.append(llm.generate(prompt, params).timings.cached_tokens)
        while llm.opened.engine.idle():
            pass
        llm.close()
    assert cached == [0, 0, 39]


def test_an_mtp_folder_beside_block_drafters(model: Path, tmp_path: Path) -> None:
    folders = [drafter(tmp_path / "two", model), write_mtp_folder(tmp_path / "mtp", vocab_size=60)]
    llm = LLM(model, **SETTINGS, drafters=folders)
    assert llm.opened.sources == ("forced", "prediction", "lookup", "mtp", "dflash2")
    assert llm.opened.engine.drafting.auto_sources == ("forced", "prediction", "lookup", "dflash2")
    wanted: dict[str, Any] = {}
    for text in ("off", "mtp", "mtp+lookup@16", "mtp+dflash2+lookup@16", "dflash2"):
        params = SamplingParams(temperature=0.0, max_tokens=40, speculation=Speculation.parse(text))
        found = llm.generate([*range(10, 30)], params)
        wanted.setdefault("ids", found.ids)
        assert found.ids == wanted["ids"]
        assert set(found.timings.drafted) <= set(text.split("@")[0].split("+"))
    llm.close()


@pytest.mark.parametrize(
    ("passes", "mtp", "dflash2", "wanted"),
    [
        ({"mtp": 0.05, "dflash2": 0.4}, [2.2, 2.4], [1.9, 2.9, 3.7], "mtp dflash2"),  # 1.63 and 1.61
        ({"mtp": 0.05, "dflash2": 0.4}, [2.2, 2.4], [1.5, 1.8, 2.0], "mtp"),  # 2.2 / (1.3 + 0.05)
        ({"mtp": 0.05, "dflash2": 0.4}, [2.2, 2.4], [1.9, 2.9, 4.4], "dflash2"),  # 4.4 / (1.9 + 0.4)
        ({"mtp": 0.9, "dflash2": 0.1}, [2.2, 2.4], [1.9, 2.9, 3.9], "dflash2"),
        ({"mtp": 0.1, "dflash2": 0.4}, [1.4, 1.6], [1.5, 1.8, 2.0], ""),  # neither promises enough
        ({"mtp": 0.1, "dflash2": 0.4}, [1.5, 1.7], "much", "dflash2"),  # without a note the order stays
        ({"mtp": 0.1, "dflash2": 0.4}, [1.5, 0.5], [1.5], "dflash2"),
    ],
)
def test_auto_uses_the_model_that_promises_most(
    model: Path, tmp_path: Path, passes: dict[str, float], mtp: Any, dflash2: Any, wanted: str
) -> None:
    folders = [
        drafter(tmp_path / "two", model, training={"held_out_tokens_per_step": dflash2}),
        rewrite(
            write_mtp_folder(tmp_path / "mtp", vocab_size=60), training={"held_out_tokens_per_step": mtp}
        ),
    ]
    llm = LLM(model, **SETTINGS, drafters=folders)
    drafting = llm.opened.engine.drafting
    models = [one for one in drafting.drafters if isinstance(one, MTPDrafter | DFlashDrafter)]
    steps = tuple(1.0 + 0.3 * rows for rows in range(16))
    curve = MeasuredCosts(StepTimes(tuple(range(1, 17)), (0,), (steps,), passes))
    open_drafters.settle_auto(models, [open_drafters.read_folder(path) for path in folders], curve)
    assert drafting.auto_sources == ("forced", "prediction", "lookup", *wanted.split())
    llm.close()


def test_what_drafters_take_is_what_is_allocated_for_them(model: Path, tmp_path: Path) -> None:
    folders = [drafter(tmp_path / "two", model), write_mtp_folder(tmp_path / "mtp", vocab_size=60)]
    vocab = {"schema": "quickdraft-draft-vocab-1", "vocabulary_size": 60, "ids": list(range(40))}
    (folders[0] / "draft_vocab.json").write_text(json.dumps(vocab | {"coverage": 0.5, "counted_tokens": 9}))
    target = open_target(model)
    block, mtp = drafter_sizes(open_drafters.find_drafters(folders, target), target)
    with_both, without = LLM(model, **SETTINGS, drafters=folders), LLM(model, **SETTINGS, drafters=[])
    memory, dtype = with_both.opened.memory, with_both.opened.kv_dtype
    (car,) = memory.side_cars
    assert block.kv_bytes_per_token[dtype] * BLOCK_TOKENS == car.kv.bytes_per_block
    more = memory.kv.bytes_per_block - without.opened.memory.kv.bytes_per_block
    assert mtp.kv_bytes_per_token[dtype] * BLOCK_TOKENS == more > 0
    for one in (block, mtp):
        size = (Path(one.path) / "model.safetensors").stat().st_size
        assert 0.5 * size < one.weight_bytes < size, "all but the file's header"
    head = target.file.tensors[head_name(target.file)]
    assert (block.vocab_ids, mtp.vocab_ids) == (40, None) and mtp.head_bytes == 0
    assert block.head_bytes == head.bytes * 40 // 60
    assert with_both.opened.drafter_bytes == block.weight_bytes + block.head_bytes + mtp.weight_bytes
    assert without.opened.drafter_bytes == 0
    found = CliRunner().invoke(app, ["inspect", str(model), "--drafter", str(folders[1]), "--output", "json"])
    (told,) = json.loads(found.stdout)["drafters"]
    assert (told["source"], told["weight_bytes"], told["window_bytes"]) == ("mtp", mtp.weight_bytes, None)
    with_both.close()
    without.close()
