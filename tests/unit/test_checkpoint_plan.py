"""What a checkpoint of the full size would hold, without writing it."""

from __future__ import annotations

import re

import pytest

from quickdraft.models.known import KNOWN, QWEN_27B, TINY_LLAMA
from quickdraft.prepare.checkpoint_plan import (
    EXTRA,
    FORMATS,
    SHARD_BYTES,
    Format,
    config_of,
    index_of,
    planned_files,
)

LAYER = "model.language_model.layers"
SHAPES: dict[Format, dict[str, tuple[str, tuple[int, ...]]]] = {
    "bf16": {
        f"{LAYER}.63.self_attn.q_proj.weight": ("BF16", (12288, 5120)),
        f"{LAYER}.0.mlp.down_proj.weight": ("BF16", (5120, 17408)),
    },
    "autoround": {
        f"{LAYER}.63.self_attn.q_proj.qweight": ("I32", (640, 12288)),
        f"{LAYER}.63.self_attn.q_proj.scales": ("F16", (40, 12288)),
        f"{LAYER}.63.self_attn.q_proj.qzeros": ("I32", (40, 1536)),
        f"{LAYER}.0.mlp.down_proj.qweight": ("I32", (2176, 5120)),
        f"{LAYER}.0.mlp.down_proj.scales": ("F16", (136, 5120)),
    },
    "compressed-tensors": {
        f"{LAYER}.63.self_attn.q_proj.weight_packed": ("I32", (12288, 640)),
        f"{LAYER}.63.self_attn.q_proj.weight_scale": ("BF16", (12288, 40)),
        f"{LAYER}.63.self_attn.q_proj.weight_shape": ("I64", (2,)),
        f"{LAYER}.0.mlp.down_proj.weight_packed": ("I32", (5120, 2176)),
        f"{LAYER}.0.mlp.down_proj.weight_scale": ("BF16", (5120, 136)),
    },
}
KEPT = {
    "lm_head.weight": ("BF16", (248320, 5120)),
    f"{LAYER}.0.linear_attn.in_proj_a.weight": ("BF16", (48, 5120)),
    f"{LAYER}.0.linear_attn.conv1d.weight": ("BF16", (10240, 1, 4)),
    "mtp.layers.0.mlp.up_proj.weight": ("BF16", (17408, 5120)),
}
PACKED = 64 * 3 + 16 * 4 + 48 * 3  # matrices of the layers, without in_proj_a and in_proj_b


@pytest.mark.parametrize("form", FORMATS)
def test_the_full_size(form: Format) -> None:
    files = planned_files(QWEN_27B, form)
    stored = {tensor.name: tensor for file in files for tensor in file.tensors}
    each = {"bf16": 1, "autoround": 3, "compressed-tensors": 3}[form]
    assert len(stored) == sum(len(file.tensors) for file in files) == 866 + (each - 1) * PACKED
    expected = SHAPES[form] | KEPT
    assert {name: (stored[name].dtype, stored[name].shape) for name in expected} == expected
    assert all(file.bytes <= SHARD_BYTES for file in files)
    shards = [file.name for file in files if file.indexed]
    assert shards == [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    index = index_of(files)
    assert index is not None
    beside = set(stored) - set(index["weight_map"])
    mtp = {name for name in stored if name.startswith("mtp.")}
    assert len(mtp) == 15 and beside == (mtp if form == "compressed-tensors" else set())
    assert [file.name for file in files if not file.indexed] == ([EXTRA] if beside else [])
    if form != "bf16":  # published: 19.5 GB with a vision tower of 0.858 GiB
        assert sum(file.bytes for file in files) == pytest.approx(19.5e9 - 0.858 * 2**30, rel=0.005)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("form", FORMATS[1:])
def test_config_names_what_is_not_packed(name: str, form: Format) -> None:
    """Every module of a layer is either packed or named as kept, by name or pattern."""
    sizes = KNOWN[name]
    said = config_of(sizes, form)["quantization_config"]
    names = [t.name for file in planned_files(sizes, form) for t in file.tensors]
    packed = {n.rpartition(".")[0] for n in names if n.endswith((".qweight", ".weight_packed"))}
    matrices = {t.name.removesuffix(".weight") for t in sizes.tensors() if t.kind in ("linear", "gate")}
    body = {n for n in matrices if n.startswith(sizes.blocks)}
    if form == "autoround":
        assert said["block_name_to_quantize"] == sizes.blocks
        kept = {n for n, value in said["extra_config"].items() if value["bits"] == 16}
    else:
        patterns = [entry.removeprefix("re:") for entry in said["ignore"]]
        kept = {n for n in body if any(re.match(pattern, n) for pattern in patterns)}
    assert packed == body - kept and kept <= body and (kept or sizes is TINY_LLAMA)
    assert packed and "quantization_config" not in config_of(sizes, "bf16")
