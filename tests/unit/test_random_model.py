"""Random checkpoints: what is on the disk, that it is whole or absent, and that the product runs it."""

from __future__ import annotations

import errno
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from quickdraft.cli.main import app
from quickdraft.errors import CapacityError, ConfigError
from quickdraft.models.known import KNOWN, TINY_HYBRID, TINY_LLAMA
from quickdraft.models.loading.safetensors import SafetensorsFile
from quickdraft.prepare import random_model, random_values
from quickdraft.prepare.checkpoint_plan import EXTRA, FORMATS, GROUP, INDEX, Format, planned_files
from quickdraft.prepare.random_model import write_random
from quickdraft.prepare.random_values import Codes, Uniform, chunks


def written(folder: Path, name: str = "tiny-llama", form: Format = "bf16", **changes: Any) -> Path:
    settings: dict[str, Any] = {"seed": 0, "report": lambda line: None, **changes}
    write_random(KNOWN[name], form, folder, **settings)
    return folder


def bits(folder: Path) -> dict[str, bytes]:
    """Raw bytes of every tensor of a folder, whatever file it is in."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        for name, info in SafetensorsFile(path).tensors.items():
            found[name] = raw[info.offset : info.offset + info.bytes]
    return found


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-hybrid"])
@pytest.mark.parametrize("form", FORMATS)
def test_files_hold_what_the_plan_says(tmp_path: Path, name: str, form: Format) -> None:
    folder = written(tmp_path / "m", name, form)
    files = planned_files(KNOWN[name], form)
    assert {p.name for p in folder.glob("*.safetensors")} == {file.name for file in files}
    for file in files:
        found = SafetensorsFile(folder / file.name).tensors
        assert {n: (t.type_name, t.shape) for n, t in found.items()} == {
            tensor.name: (tensor.dtype, tensor.shape) for tensor in file.tensors
        }
    assert (folder / EXTRA).exists() == (name == "tiny-hybrid" and form == "compressed-tensors")
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert ends == list(KNOWN[name].eos_ids)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("form", FORMATS[1:])
def test_packed_weights_are_sane(tmp_path: Path, form: Format) -> None:
    """Unpacked by the formats' formulas: rows of norm about 1, scales of both signs, all codes used."""
    tensors = load_file(written(tmp_path / "m", form=form, seed=3) / "model.safetensors")
    module, shifts = "model.layers.0.mlp.down_proj", np.arange(8) * 4
    if form == "autoround":
        words, scales = tensors[f"{module}.qweight"], tensors[f"{module}.scales"].T
        codes = (words.view(np.uint32)[:, None, :] >> shifts[:, None]) & 15  # [I/8, 8, O]
        codes = codes.reshape(-1, codes.shape[-1]).T
        assert set(tensors[f"{module}.qzeros"].view(np.uint32).flat) == {0x77777777}  # zero point 8, less one
    else:
        words, scales = tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"]
        codes = ((words.view(np.uint32)[:, :, None] >> shifts) & 15).reshape(words.shape[0], -1)
        assert tensors[f"{module}.weight_shape"].tolist() == [128, 256]
    scales = scales.astype(np.float32)
    weight = (codes.astype(np.float32) - 8) * np.repeat(scales, GROUP, axis=1)
    assert weight.shape == (TINY_LLAMA.width, TINY_LLAMA.feed_forward) == (128, 256)
    assert np.linalg.norm(weight, axis=1).mean() == pytest.approx(1, abs=0.1)
    assert set(codes.flat) == set(range(16)) and (scales < 0).mean() == pytest.approx(0.5, abs=0.2)


def test_numbers_depend_on_seed_and_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = bits(written(tmp_path / "a", "tiny-hybrid"))
    other = bits(written(tmp_path / "other seed", "tiny-hybrid", seed=1))
    assert all(other[name] != one[name] for name in one)
    monkeypatch.setattr(random_values, "CHUNK_VALUES", 1000)
    cut = written(tmp_path / "b", "tiny-hybrid", shard_bytes=300_000)
    assert bits(cut) == one and len(set(one.values())) == len(one)
    homes = json.loads((cut / INDEX).read_text())["weight_map"]
    assert set(homes) == set(one) and len(set(homes.values())) > 10 and not (tmp_path / "a" / INDEX).exists()


def test_chunks_are_small_and_fill_the_tensor() -> None:
    shape = (3, random_values.CHUNK_VALUES - 1)
    for fill, dtype in ((Codes(), "I32"), (Uniform(0.5, 1.0, either_sign=True), "BF16")):
        sizes = [chunk.size for chunk in chunks(fill, dtype, shape, 0, "x")]
        assert sum(sizes) == math.prod(shape) and max(sizes) == random_values.CHUNK_VALUES and len(sizes) == 3
    halves = np.concatenate([*chunks(Uniform(0.5, 1.0, either_sign=True), "F16", (4096,), 0, "x")])
    magnitudes = np.abs(halves.view(np.float16))
    assert 0.5 <= magnitudes.min() < 0.51 and 0.99 < magnitudes.max() <= 1.0
    (codes,) = chunks(Codes(), "I32", (5, 1), 7, "name")  # the same on every machine
    assert codes.tolist() == [1776107009, 3105274831, 3438639719, 738813939, 2971482509]


def test_the_product_runs_it(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    made = CliRunner().invoke(
        app, ["prepare", "random", "--like", "tiny-llama", "--out", str(folder), "--context", "512"]
    )
    assert (made.exit_code, made.stdout) == (0, f"{folder}\n")
    looked = CliRunner().invoke(app, ["inspect", str(folder), "--output", "json"])
    found = json.loads(looked.stdout)
    assert found["runs"] and found["sizes"]["context"] == 512 and found["chat_template"]
    options = ["--max-tokens", "24", "--ignore-eos", "--output", "json"]
    ids = ",".join(str(byte) for byte in "Bären".encode())
    answers = []
    for prompt in (["--prompt", "Bären"], ["--prompt-ids", ids]):
        asked = CliRunner().invoke(app, ["generate", str(folder), *prompt, *options])
        assert asked.exit_code == 0, asked.stderr
        answers.append(json.loads(asked.stdout)["ids"])
    assert answers[0] == answers[1] and len(answers[0]) == 24 and len(set(answers[0])) > 4


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    written(folder)  # empty: taken
    before = bits(folder)
    with pytest.raises(ConfigError, match="m is in use"):
        written(folder, seed=1)
    assert bits(folder) == before
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is in use"):
        written(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot write"):
        written(tmp_path / "file" / "m")
    (tmp_path / ".n.partial").mkdir()
    with pytest.raises(ConfigError, match=r"hint: if nothing writes it, remove .*\.n\.partial"):
        written(tmp_path / "n")
    assert not (tmp_path / "n").exists() and (tmp_path / ".n.partial").exists()


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), CapacityError),
        (OSError(errno.EIO, "Input/output error"), ConfigError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_what_was_begun_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    def failing(*arguments: Any) -> Any:
        yield from chunks(*arguments)
        raise error

    monkeypatch.setattr(random_model, "chunks", failing)
    with pytest.raises(raised):
        written(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_room_is_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(random_model.shutil, "disk_usage", lambda path: usage._replace(free=70_000_000))
    written(tmp_path / "small")
    with pytest.raises(CapacityError, match="not enough disk space for the checkpoint; got 70000000 bytes"):
        write_random(
            TINY_HYBRID.changed(layers=32, context=None), "bf16", tmp_path / "m", seed=0, report=print
        )
    assert [p.name for p in tmp_path.iterdir()] == ["small"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--seed", "-1"), ("--context", "0"), ("--layers", "3"), ("--layers", "257"), ("--like", "gpt"),
        ("--out", ""),
    ],
)  # fmt: skip
def test_flags_are_checked(tmp_path: Path, flag: str, value: str) -> None:
    given = {"--like": "tiny-hybrid", "--out": str(tmp_path / "m"), flag: value}
    arguments = [text for pair in given.items() for text in pair]
    assert CliRunner().invoke(app, ["prepare", "random", *arguments]).exit_code == 2
    assert list(tmp_path.iterdir()) == []
