"""A hybrid folder: names, layouts, what is left for others, padding rows, ends of text, and what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quickdraft.engine.llm import LLM
from quickdraft.errors import ConfigError, ModelFormatError, UnsupportedError
from quickdraft.models.inspect import inspect_model
from quickdraft.models.interface import Taps
from quickdraft.models.registry import load_model
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.ops.select import select
from quickdraft.types import SamplingParams
from tests.support.model_steps import ModelSteps
from tests.support.quant_folder import FORMATS, hybrid_parts, quantised_hybrid
from tests.support.tiny_folder import put_json, safetensors_bytes
from tests.support.tiny_hybrid import ADDRESSABLE, hybrid_tensors, write_tiny_hybrid

IDS = [int(i) for i in np.random.default_rng(4).integers(3, 300, 20)]
NESTED = "model.language_model.layers."


def logits(folder: Path) -> bytes:
    return ModelSteps(folder, select(2)).step(IDS).tobytes()


def test_layouts_and_shards_give_the_same_bits(tmp_path: Path) -> None:
    expected = logits(write_tiny_hybrid(tmp_path / "nested"))
    assert logits(write_tiny_hybrid(tmp_path / "text", nested=False)) == expected
    assert logits(write_tiny_hybrid(tmp_path / "shards", shards=3)) == expected


def test_a_vision_tower_is_skipped_in_any_format(tmp_path: Path) -> None:
    tower = {"model.visual.patch_embed.qweight": np.ones((3, 4)), "model.visual.merger.scales": np.ones(2)}
    folder = write_tiny_hybrid(tmp_path / "a", tensors=hybrid_tensors() | tower)
    assert logits(folder) == logits(write_tiny_hybrid(tmp_path / "b"))
    assert inspect_model(folder).problems == ()


def test_the_rest_of_the_folder_is_left_for_others(tmp_path: Path) -> None:
    folder = write_tiny_hybrid(tmp_path / "a")
    loaded = load_model(folder, ReferenceOps(), max_rows=1, max_wanted=1)
    with_module = load_model(folder, ReferenceOps(), max_rows=1, max_wanted=1, mtp=True)
    rest = [name for name in loaded.tensors.tensors if name.startswith("mtp.")]
    assert len(rest) == 15 and loaded.tensors.matrix("mtp.fc.weight").shape == (64, 128)
    assert not [name for name in loaded.tensors.tensors if "visual" in name]
    assert loaded.eos_ids == (2, 0)
    inspection = inspect_model(folder)
    assert inspection.problems == () and inspection.config == with_module.model.config
    own, both = (one.model.config.kv_bytes_per_block("float16") for one in (loaded, with_module))
    assert inspection.kv_bytes_per_token("float16") == both // 16 > own // 16


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_rows_without_a_token_are_never_chosen(tmp_path: Path, temperature: float) -> None:
    """The likeliest token after the tokenizer's last is a padding row, and would be chosen if it could."""
    params = SamplingParams(temperature=temperature, max_tokens=60, seed=1, ignore_eos=True)
    prompt = [*range(305, ADDRESSABLE)]
    padded = LLM(write_tiny_hybrid(tmp_path / "a"), threads=2, kv_memory_bytes=1 << 22)
    assert max(padded.generate(prompt, params).ids) < ADDRESSABLE
    top = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5, ignore_eos=True)
    (first,) = padded.generate(prompt, top).logprobs
    assert all(entry[0] < ADDRESSABLE for entry in first.top)
    all_rows = LLM(write_tiny_hybrid(tmp_path / "b", tokenizer=False), threads=2, kv_memory_bytes=1 << 22)
    assert all_rows.generate(prompt, top).ids == (ADDRESSABLE,)


def test_tokens_that_only_the_settings_have_are_tokens(tmp_path: Path) -> None:
    folder = write_tiny_hybrid(tmp_path / "a")
    extra = {"content": "<|audio_start|>", "special": True, "lstrip": False, "rstrip": False}
    put_json(folder / "tokenizer_config.json", {"added_tokens_decoder": {str(ADDRESSABLE): extra}})
    tokenizer = load_model(folder, ReferenceOps(), max_rows=1, max_wanted=1).tokenizer
    assert tokenizer is not None and tokenizer.tokens[ADDRESSABLE] == "<|audio_start|>"
    llm = LLM(folder, threads=1, kv_memory_bytes=1 << 22)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    assert llm.generate([*range(305, ADDRESSABLE)], params).ids == (ADDRESSABLE,)


@pytest.mark.parametrize("tokenizer", [True, False], ids=["with tokenizer", "ids only"])
def test_every_end_of_text_ends_it(tmp_path: Path, tokenizer: bool) -> None:
    folder = write_tiny_hybrid(tmp_path / "a", tokenizer=tokenizer)
    put_json(folder / "generation_config.json", {"eos_token_id": [17, 34]})
    llm = LLM(folder, threads=1, kv_memory_bytes=1 << 22)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    for prompt, end in ((13, 17), (30, 34)):  # the text runs through rings of ten ids
        found = llm.generate([prompt], params)
        assert (found.ids[-1], found.finish_reason) == (end, "stop"), found.ids


@pytest.mark.parametrize("layers", [0, None, 1])
def test_an_mtp_module_is_no_problem_whatever_the_config_says(tmp_path: Path, layers: int | None) -> None:
    folder = write_tiny_hybrid(tmp_path / "a", mtp_num_hidden_layers=layers)
    load_model(folder, ReferenceOps(), max_rows=1, max_wanted=1)
    assert inspect_model(folder).problems == ()


def broken(**changes: Any) -> dict[str, Any]:
    tensors: dict[str, Any] = hybrid_tensors()
    for name, value in changes.items():
        full = next(key for key in tensors if key.endswith(name))
        if value is None:
            del tensors[full]
        else:
            tensors[full] = value
    return tensors


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (broken(**{"0.linear_attn.A_log": None}), f"{NESTED}0.linear_attn.A_log is missing"),
        (broken(**{"2.linear_attn.conv1d.weight": None}), f"{NESTED}2.linear_attn.conv1d.weight is missing"),
        (broken(**{"1.self_attn.q_proj.weight": np.ones((128, 64))}), "1.self_attn.q_proj.weight has"),
        (broken(**{"3.linear_attn.conv1d.weight": np.ones((160, 4))}), "got (160, 4); expected (160, 1, 4)"),
        (broken(**{"0.linear_attn.dt_bias": np.ones(6)}), f"{NESTED}0.linear_attn.dt_bias has a wrong shape"),
        (broken(**{"language_model.norm.weight": None}), "model.language_model.norm.weight is missing"),
        (broken(**{"0.linear_attn.A_log": np.full(4, np.nan)}), "A_log holds values that are not finite"),
        (broken(**{"0.linear_attn.A_log": np.full(4, 89)}), "0.linear_attn.A_log holds values too large"),
        (hybrid_tensors() | {f"{NESTED}0.linear_attn.in_proj_ba.weight": np.ones((8, 64))},
         f"nobody uses; got {NESTED}0.linear_attn.in_proj_ba.weight"),
        (hybrid_tensors() | {"model.layers.0.mlp.up_proj.weight": np.ones((96, 64))}, "model.layers.0.mlp"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, tensors: dict[str, Any], message: str) -> None:
    folder = write_tiny_hybrid(tmp_path / "a", tensors=tensors)
    with pytest.raises(ModelFormatError) as error:
        load_model(folder, ReferenceOps(), max_rows=1, max_wanted=1)
    assert message in str(error.value)


@pytest.mark.parametrize("form", ["gptq", "awq", "compressed-tensors asymmetric"])
def test_whatever_is_missing_or_cut_in_a_quantised_hybrid_is_named(tmp_path: Path, form: str) -> None:
    whole = hybrid_parts(FORMATS[form])
    folder = quantised_hybrid(tmp_path / "m", FORMATS[form], whole)
    twice = ("mtp.", f"{NESTED}2", f"{NESTED}3")  # of the same kind as others, or left in the file
    names = [name for name in whole if not name.startswith(twice) and not name.endswith("g_idx")]
    assert len(names) > 40
    for name in names:
        rest = {other: values for other, values in whole.items() if other != name}
        for tensors in (rest, rest | {name: whole[name][:-1]}):
            (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, None))
            with pytest.raises((ModelFormatError, UnsupportedError)) as error:
                load_model(folder, ReferenceOps(), max_rows=1, max_wanted=1)
            assert name.rpartition(".")[0] in str(error.value), name


def test_a_tap_after_no_layer_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_hybrid(tmp_path / "a")
    with pytest.raises(ConfigError, match="a tap after no layer"):
        load_model(folder, ReferenceOps(), max_rows=1, max_wanted=1, taps=Taps(layers=(4,)))
