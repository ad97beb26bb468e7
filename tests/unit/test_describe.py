"""Descriptions against files that other programs made: names, shapes and keys of tiny checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quickdraft.models.describe_hybrid import DFlash2Sizes, HybridSizes
from quickdraft.models.known import KNOWN, QWEN_27B

# config.json, names and shapes of checkpoints that transformers 5 and dflash 0.1 read
LAYOUT = json.loads((Path(__file__).parents[1] / "support" / "hybrid_layout.json").read_text())
DRAFTER = DFlash2Sizes(
    width=64, layers=3, heads=4, kv_heads=2, head_dim=16, feed_forward=80, vocabulary=101,
    taps=3, block=8, window=32, rank=12, conv_group=4,
)  # fmt: skip
TARGET = HybridSizes(
    width=64, layers=8, heads=6, kv_heads=2, head_dim=32, feed_forward=96, vocabulary=101, context=4096,
    eos_ids=(0,), key_heads=2, value_heads=6, key_dim=16, value_dim=16, mrope_section=(2, 1, 1),
)  # fmt: skip


@pytest.mark.parametrize(("name", "sizes"), [("target", TARGET), ("dflash2", DRAFTER)])
def test_tensors_are_those_of_a_file(name: str, sizes: HybridSizes | DFlash2Sizes) -> None:
    described = {tensor.name: list(tensor.shape) for tensor in sizes.tensors()}
    assert described == LAYOUT[name]["tensors"]


def test_config_is_that_of_a_file() -> None:
    theirs, ours = LAYOUT["target"]["config"], TARGET.config()
    assert set(ours) == set(theirs)
    text, more = dict(ours["text_config"]), {}
    for key in set(text) - set(theirs["text_config"]):
        more[key] = text.pop(key)
    assert text == {**theirs["text_config"], "dtype": "bfloat16"}
    assert more == {  # keys of the real checkpoint that the tiny one does without
        "attention_bias": False, "output_gate_type": "swish", "mamba_ssm_dtype": "float32",
        "mtp_use_dedicated_embeddings": False,
    }  # fmt: skip


def test_config_of_the_real_one() -> None:
    text: dict[str, Any] = QWEN_27B.config()["text_config"]
    layers = text.pop("layer_types")
    assert [i for i, kind in enumerate(layers) if kind == "full_attention"] == list(range(3, 64, 4))
    assert len(layers) == 64 and text["rope_parameters"]["mrope_section"] == [11, 11, 10]
    assert (text["eos_token_id"], QWEN_27B.eos_ids) == (248044, (248046, 248044))
    sizes = (text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"])
    assert sizes == (24, 4, 256) and text["max_position_embeddings"] == 262144


@pytest.mark.parametrize("name", KNOWN)
def test_other_layers_and_context(name: str) -> None:
    sizes = KNOWN[name]
    fewer = sizes.changed(layers=sizes.fewest_layers, context=777)
    names = {tensor.name for tensor in fewer.tensors()}
    assert f"{sizes.blocks}.{sizes.fewest_layers - 1}.input_layernorm.weight" in names
    assert f"{sizes.blocks}.{sizes.fewest_layers}.input_layernorm.weight" not in names
    assert any("self_attn" in name and name.startswith(sizes.blocks) for name in names)
    config = fewer.config()
    text = config.get("text_config", config)
    assert (text["num_hidden_layers"], text["max_position_embeddings"]) == (sizes.fewest_layers, 777)
    assert sizes.changed(layers=None, context=None) == sizes
