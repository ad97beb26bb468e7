"""Quantised folders that are odd but well-formed load: extra files, incomplete ignore lists, schemes of
single modules, settings in a file of their own; heads in 8 bits; and what reading takes.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from quickdraft.errors import ConfigError, ModelFormatError, UnsupportedError
from quickdraft.models.digest import compatibility_key
from quickdraft.models.inspect import inspect_model
from quickdraft.models.loading.folder import ModelFolder
from quickdraft.models.loading.head import nearest_codes
from quickdraft.models.registry import load_model
from quickdraft.ops.cpu.backend import CpuOps
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.ops.weights import Int8Groups
from tests.support.broken_folder import INDEX, WEIGHTS, config, edit, load
from tests.support.quant_folder import FORMATS, quantised_folder, quantised_linear, quantised_tensors
from tests.support.tiny import write_tiny_llama
from tests.support.tiny_folder import folder_tensors, put_json, safetensors_bytes, write_tiny_folder

QUERY = "model.layers.1.self_attn.q_proj"
GPTQ, AWQ, CT = "gptq", "awq", "compressed-tensors"


def test_an_embedding_cannot_have_an_order_of_its_inputs(tmp_path: Path) -> None:
    form = FORMATS["compressed-tensors in order"]
    values, _ = quantised_tensors(form, "llama")
    del values["model.embed_tokens.weight"]
    parts, _ = quantised_linear(form, 320, 64)
    values |= {f"model.embed_tokens.{suffix}": part for suffix, part in parts.items()}
    config = {"quantization_config": form.config()}
    write_tiny_folder(tmp_path, "llama", dtype=None, tensors=values, **config)
    with pytest.raises(UnsupportedError, match=r"embed_tokens\.weight_g_idx cannot be used"):
        load(tmp_path)


def test_settings_in_a_file_of_their_own(tmp_path: Path) -> None:
    """As older writers put them; the file then counts among those that determine the numbers."""
    quantised_folder(tmp_path, FORMATS[GPTQ])
    config(quantization_config=None)(tmp_path)
    settings = {k: v for k, v in FORMATS[GPTQ].config().items() if k != "quant_method"}
    put_json(tmp_path / "quantize_config.json", settings)
    loaded = load(tmp_path)
    assert [path.name for path in loaded.files] == ["config.json", WEIGHTS, "quantize_config.json"]


@pytest.mark.parametrize("listed", ["alone", "in part", "wholly"])
def test_extra_files_are_read_however_they_are_listed(tmp_path: Path, listed: str) -> None:
    """And a module is plain though the config has it quantised, another quantised though it is ignored."""
    form = FORMATS[CT]
    plain = quantised_folder(tmp_path, form, keep=("layers.0.mlp",))
    values, _ = quantised_tensors(form, "llama", keep=("layers.0.mlp",))
    extra = {name: values.pop(name) for name in list(values) if "layers.0.mlp" in name or "norm" in name}
    (tmp_path / WEIGHTS).write_bytes(safetensors_bytes(values, None))
    (tmp_path / "model_extra_tensors.safetensors").write_bytes(safetensors_bytes(extra, None))
    if listed != "alone":
        (tmp_path / WEIGHTS).rename(tmp_path / "model-1.safetensors")
        homes = dict.fromkeys(values, "model-1.safetensors")
        names = list(extra)[: 2 if listed == "in part" else None]
        put_json(
            tmp_path / INDEX, {"weight_map": homes | dict.fromkeys(names, "model_extra_tensors.safetensors")}
        )
    ignored = {**form.config(), "ignore": [QUERY, "re:.*nothing.*", "lm_head"]}
    config(quantization_config=ignored)(tmp_path)
    load(tmp_path)
    folder = ModelFolder(tmp_path)
    folder.check_quantisation()
    for name in ("blk.0.ffn_up.weight", "blk.1.attn_q.weight"):
        np.testing.assert_array_equal(
            folder.matrix(name).dequantised(), plain[folder.called(name).replace("weight_packed", "weight")]
        )
    assert len(folder.files) == 3


def test_single_modules_may_be_of_another_scheme(tmp_path: Path) -> None:
    """Named by patterns, which are not matched: a scheme the config has anywhere will do."""
    values, _ = quantised_tensors(FORMATS[GPTQ], "llama")
    parts, expected = quantised_linear(FORMATS["gptq 8 bits"], 64, 64)
    values |= {f"{QUERY}.{suffix}": part for suffix, part in parts.items()}
    dynamic = {"-:.*visual.*": {}, "+:.*q_proj": {"bits": 8}, "lm_head": {"bits": 16}}
    stated = {**FORMATS[GPTQ].config(), "dynamic": dynamic}
    write_tiny_folder(tmp_path, "llama", dtype=None, tensors=values, quantization_config=stated)
    load(tmp_path)
    folder = ModelFolder(tmp_path)
    folder.check_quantisation()
    np.testing.assert_array_equal(folder.matrix("blk.1.attn_q.weight").dequantised(), expected)
    config(quantization_config={**stated, "dynamic": {}})(tmp_path)
    with pytest.raises(ModelFormatError, match=f"{QUERY}.scales is of no scheme"):
        load(tmp_path)


def test_heads_of_sixteen_bits_become_eight(tmp_path: Path) -> None:
    quantised_folder(tmp_path / "q", FORMATS[GPTQ])
    write_tiny_folder(tmp_path / "b", "llama", dtype="BF16")
    write_tiny_folder(tmp_path / "f", "llama")

    def load_with(folder: str, bits: int | None) -> Any:
        return load_model(tmp_path / folder, ReferenceOps(), max_rows=1, max_wanted=1, head_bits=bits)

    changed = {(f, bits): load_with(f, bits).notes for f in "qbf" for bits in (None, 8, 16)}
    assert {key for key, notes in changed.items() if notes} == {("q", None), ("q", 8), ("b", 8), ("f", 8)}
    for note, tensor in zip(changed["q", None], ("model.embed_tokens", "lm_head"), strict=True):
        text, _, error = note.rpartition(" ")
        assert text == f"{tensor}.weight: BF16 in the file, int8 here, relative rms error"
        assert 1e-3 < float(error) < 1e-2
    kv = load_with("q", 8).model.kv_cache(1, "float16")
    keys = {compatibility_key(load_with("q", bits), ReferenceOps(), kv) for bits in (None, 8, 16)}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("stored", "said", "wanted"),
    [
        ("BF16", {}, "bfloat16"),
        ("BF16", {"torch_dtype": "float16"}, "float16"),
        ("F16", {"torch_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_activations_in_the_type_of_the_model(
    tmp_path: Path, stored: str, said: dict[str, str], wanted: str
) -> None:
    """What config.json says; else what type tensors have. It is a part of what results depend on."""
    write_tiny_folder(tmp_path, "llama", dtype=stored, **said)
    keys = []
    for ops in (ReferenceOps("sixteen"), ReferenceOps()):
        loaded = load_model(tmp_path, ops, max_rows=1, max_wanted=1)
        assert ops.activations == (wanted if not keys else "int8")
        keys.append(compatibility_key(loaded, ops, loaded.model.kv_cache(1, "float16")))
    assert keys[0] != keys[1]


def test_a_head_in_eight_bits_is_what_the_codes_say(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path, "llama", dtype="BF16")
    kept, rounded = (ModelFolder(tmp_path, bits).matrix("output.weight").dequantised() for bits in (16, 8))
    codes, scales = nearest_codes(kept)
    np.testing.assert_array_equal(rounded, Int8Groups(codes, scales).dequantised())
    groups = np.abs(kept.reshape(320, 2, 32)).max(axis=2, keepdims=True)
    assert (np.abs((rounded - kept).reshape(320, 2, 32)) <= groups / 127 * 0.501).all()


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-7, 3e-6, 1.0, 6e4, 8.3e6])
def test_eight_bit_codes_of_any_magnitude(size: float) -> None:
    """Scales that are fp16's smallest, 0 or largest; codes stay in range and no value is infinite."""
    values = (np.linspace(-1, 1, 64, dtype=np.float32) * np.float32(size)).reshape(1, 64)
    codes, scales = nearest_codes(values)
    assert codes.min() >= -127 and np.isfinite(scales.astype(np.float32)).all()
    if size > 1e-7:
        step = scales.astype(np.float32).max()
        assert np.abs(Int8Groups(codes, scales).dequantised() - values).max() <= step * 0.501


def test_a_value_too_large_for_eight_bits_is_named(tmp_path: Path) -> None:
    tensors = folder_tensors("llama")
    tensors["lm_head.weight"][5, 5] = 1e38
    write_tiny_folder(tmp_path, "llama", dtype="BF16", tensors=tensors)
    with pytest.raises(ModelFormatError, match=r"lm_head\.weight holds values too large .* --head-bits 16"):
        load_model(tmp_path, ReferenceOps(), max_rows=1, max_wanted=1, head_bits=8)


def test_head_bits_are_for_folders(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "t.gguf")
    with pytest.raises(ConfigError, match="head bits for a GGUF file"):
        load_model(path, ReferenceOps(), max_rows=1, max_wanted=1, head_bits=8)


@pytest.mark.parametrize("name", [GPTQ, AWQ, "compressed-tensors 8 bits"])
def test_inspect_shows_the_formats(tmp_path: Path, name: str) -> None:
    quantised_folder(tmp_path, FORMATS[name])
    found = inspect_model(tmp_path)
    assert found.problems == ()
    form = f"{FORMATS[name].layout} int{FORMATS[name].bits} g32"
    assert set(found.bytes_by_format) == {form, "BF16"}
    assert sum(found.bytes_by_format.values()) == found.weight_bytes
    edit("config.json", lambda v: v["quantization_config"].update(quant_method="fp8"))(tmp_path)
    assert "quant_method; got 'fp8'" in inspect_model(tmp_path).problems[0]


def test_reading_holds_one_linear_at_a_time(tmp_path: Path) -> None:
    """What packing takes beside the weights is a few times the largest fused linear, not the model."""
    rows = {"layers": 8, "hidden": 256}
    sizes = {"hidden_size": rows["hidden"], "num_hidden_layers": rows["layers"], "intermediate_size": 256}
    values: dict[str, Any] = {}
    for name, shape in _larger(rows["layers"], rows["hidden"]).items():
        if len(shape) == 2 and name.startswith("model.layers"):
            parts, _ = quantised_linear(FORMATS[CT], *shape)
            values |= {name.replace("weight", suffix): part for suffix, part in parts.items()}
        else:
            values[name] = np.ones(shape, ml_dtypes.bfloat16)
    stated = {"quantization_config": FORMATS[CT].config(), **sizes}
    write_tiny_folder(tmp_path, "llama", dtype=None, tensors=values, **stated)
    tracemalloc.start()
    load_model(tmp_path, CpuOps(1), max_rows=1, max_wanted=1, max_context=32)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    codes = 2 * 256 * 256  # of gate and up, a byte each
    assert peak < 16 * codes < rows["layers"] * 7 * 256 * 256


def _larger(layers: int, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shapes[name] = (320, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            shapes[f"{prefix}{part}.weight"] = (hidden, hidden)
        for part in ("self_attn.k_proj", "self_attn.v_proj"):
            shapes[f"{prefix}{part}.weight"] = (hidden // 2, hidden)
        for part in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{part}.weight"] = (hidden,)
    return shapes
