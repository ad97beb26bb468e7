"""Quantised folders: every linear unpacks to its exact values, and a model of them computes what the same
values do in plain float32.

tests/golden/quant.safetensors holds one linear (random numbers) as packed by auto-round, AWQ and
compressed-tensors themselves, with the values their own formulas give; the other folders are written here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from quickdraft.models.loading.folder import ModelFolder
from quickdraft.models.loading.quant_config import read_quant_config
from quickdraft.models.loading.quantised import collect
from quickdraft.models.loading.safetensors import SafetensorsFile
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.ops.select import select
from quickdraft.ops.weights import Blocks, Dense, Stacked, Weight
from tests.parity.test_llama import TOLERANCE, our_logits
from tests.support.quant_folder import FORMATS, Format, quantised_folder
from tests.support.tiny_folder import folder_name, write_tiny_folder

GOLDEN = Path(__file__).parents[1] / "golden" / "quant.safetensors"
PROMPT = [int(i) for i in np.random.default_rng(1).integers(3, 320, 37)]
KINDS = ("llama", "qwen2", "qwen3")


def golden_formats() -> dict[str, tuple[Format, str]]:
    compressed = "compressed-tensors"
    return {
        "gptq_v1": (Format("gptq"), "sym"), "gptq_v2": (Format("gptq", version=2), "sym"),
        "ct_sym": (Format(compressed), "sym"), "ct_asym": (Format(compressed, symmetric=False), "asym"),
        "awq": (Format("awq", symmetric=False), "asym"),
    }  # fmt: skip


@pytest.mark.parametrize("name", golden_formats())
def test_golden_linears_unpack_to_the_values_their_writers_mean(name: str) -> None:
    """Also where a symmetric file and the config disagree about the zero points' offset."""
    form, values = golden_formats()[name]
    expected = load_file(GOLDEN)[f"expected_W_{values}"]
    stated = [form.config()]
    if form.layout == "gptq":
        stated += [{**stated[0], "checkpoint_format": other} for other in ("gptq", "gptq_v2")]
    for config in stated:
        _, linears = collect([SafetensorsFile(GOLDEN)])
        linear = next(each for each in linears if each.module == name)
        linear.agree(read_quant_config(config, "config.json"))
        weight = linear.matrix().value()
        assert not isinstance(weight, Stacked)
        np.testing.assert_array_equal(weight.dequantised(), expected)
        np.testing.assert_array_equal(packed_values(weight), expected)


def packed_values(weight: Any) -> np.ndarray:
    """What the CPU's kernels read back of a weight (as an embedding; it must have no order)."""
    ops = select(2)
    outputs, inputs = weight.shape
    batch = ops.batch(outputs, 1, -(-outputs // 16), -(-outputs // 16), outputs)
    ids = np.arange(outputs, dtype=np.int32)
    blocks = np.arange(-(-outputs // 16), dtype=np.int32)[None]
    batch.set(ids, ids, np.array([0, outputs], np.int32), blocks, np.zeros(0, np.int32))
    out = ops.empty(outputs, inputs)
    ops.embed(batch, ops.pack(weight), out)
    return np.array(out)


@pytest.mark.parametrize("name", FORMATS)
def test_every_linear_of_a_folder_has_its_exact_values(tmp_path: Path, name: str) -> None:
    plain = quantised_folder(tmp_path / "m", FORMATS[name])
    folder = ModelFolder(tmp_path / "m")
    folder.check_quantisation()
    quantised = 0
    for ours, info in folder.tensors.items():
        if len(info.shape) < 2 or info.type_name == "BF16":
            continue
        weight, expected = folder.matrix(ours), plain[folder_name(ours)]
        assert isinstance(weight, Blocks) and weight.shape == info.shape == expected.shape
        value: Any = weight.value()
        np.testing.assert_array_equal(value.dequantised(), expected)
        if value.order is None:
            np.testing.assert_array_equal(packed_values(weight), expected)
        quantised += 1
    assert quantised == 14


def as_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ModelFolder.matrix

    def matrix(self: ModelFolder, name: str) -> Weight:
        return Dense(original(self, name).dequantised())

    monkeypatch.setattr(ModelFolder, "matrix", matrix)


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_folder_computes_what_its_values_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Fused linears, too, some of whose parts are plain, whatever the ignore list says: what the values give
    where activations are not rounded, and near it where they are."""
    kind = KINDS[list(FORMATS).index(name) % 3]
    keep = ("layers.1.self_attn.k_proj", "layers.0.mlp.up_proj")
    plain = quantised_folder(tmp_path / "quantised", FORMATS[name], kind, keep=keep, shards=2)
    sizes = {"head_dim": 32} if kind == "qwen3" else {}
    values = write_tiny_folder(tmp_path / "plain", kind, tensors=plain, **sizes)
    exact = our_logits(values, PROMPT, ReferenceOps())
    ours = [our_logits(tmp_path / "quantised", PROMPT, ops) for ops in (ReferenceOps(), select(2))]
    for rounded in ours:
        assert np.std(rounded - exact) < 0.1 * np.std(exact)
    assert np.std(ours[0] - ours[1]) < 0.03 * np.std(exact)
    as_dense(monkeypatch)
    same = our_logits(tmp_path / "quantised", PROMPT, ReferenceOps(), 16)
    assert np.abs(same - exact).max() < TOLERANCE["tiny"]
