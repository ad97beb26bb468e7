"""Every way config.json of a folder can be wrong is an error that names the file and the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.broken_folder import Change, check, config, remove, write

CONFIG = "config.json"
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, tuple[Change, str, str]] = {
    "missing": (remove(CONFIG), CONFIG, "No such file"),
    "no JSON": (write(CONFIG, b"{"), CONFIG, "not valid JSON"),
    "not UTF-8": (write(CONFIG, b'{"\xff": 1}'), CONFIG, "not UTF-8"),
    "a list": (write(CONFIG, b"[]"), CONFIG, "expected an object"),
    "nesting bomb": (write(CONFIG, b"[" * 100_000), CONFIG, "too deep nesting"),
    "NaN": (config(rms_norm_eps=float("nan")), CONFIG, "NaN is not JSON"),
    "infinite": (write(CONFIG, b'{"model_type": "llama", "rms_norm_eps": 1e999}'), CONFIG, ""),
    "endless number": (write(CONFIG, b'{"a": ' + b"9" * 9999 + b"}"), CONFIG, "not valid JSON"),
    "key twice": (write(CONFIG, b'{"a": 1, "a": 2}'), CONFIG, "'a' occurs twice"),
    "unknown architecture": (config(model_type="mamba"), CONFIG, "model_type; got 'mamba'"),
    "no architecture": (config(model_type=None), CONFIG, "model_type; got None"),
    "architecture is a list": (config(model_type=["llama"]), CONFIG, "model_type; got ['llama']"),
    "another head": (config(architectures=["Qwen3ForTokenClassification"]), CONFIG, "architectures"),
    "unknown key": (config(attention_sinks=4), CONFIG, "not understood; got 'attention_sinks'"),
    "own code": (config(auto_map={"AutoModel": "m.M"}), CONFIG, "own Python code"),
    "quantised in FP8": (
        config(quantization_config={"quant_method": "fp8"}), CONFIG, "quant_method; got 'fp8'"),
    "no layers": (config(num_hidden_layers=0), CONFIG, "num_hidden_layers; got 0"),
    "no heads": (config(num_attention_heads=0), CONFIG, "num_attention_heads; got 0"),
    "negative": (config(hidden_size=-64), CONFIG, "hidden_size; got -64"),
    "half a layer": (config(num_hidden_layers=2.0), CONFIG, "num_hidden_layers; got 2.0"),
    "truth for a size": (config(intermediate_size=True), CONFIG, "intermediate_size; got True"),
    "text for a size": (config(vocab_size="320"), CONFIG, "vocab_size; got '320'"),
    "huge size": (config(hidden_size=2**40), CONFIG, "hidden_size"),
    "no eps": (config(rms_norm_eps=None), CONFIG, "rms_norm_eps; got None"),
    "kv heads that do not divide": (config(num_key_value_heads=3), CONFIG, "query heads that"),
    "odd head": (config(head_dim=7), CONFIG, "rotary dimensions; got 7"),
    "other activation": (config(hidden_act="gelu"), CONFIG, "hidden_act; got 'gelu'"),
    "bias": (config(attention_bias=True), CONFIG, "attention_bias; got True"),
    "sliding window": (config(use_sliding_window=True), CONFIG, "use_sliding_window; got True"),
    "sliding layers": (
        config(layer_types=["full_attention", "sliding_attention"]), CONFIG, "layer_types"),
    "layer types of objects": (config(layer_types=[{}]), CONFIG, "layer_types"),
    "linear rope": (
        config(rope_scaling={"type": "linear", "factor": 2}), CONFIG, "rope_type; got 'linear'"),
    "yarn": (config(rope_scaling={"rope_type": "yarn"}), CONFIG, "rope_type; got 'yarn'"),
    "dynamic rope": (config(rope_parameters={"rope_type": "dynamic"}), CONFIG, "got 'dynamic'"),
    "rope is text": (config(rope_scaling="llama3"), CONFIG, "rope_scaling; got 'llama3'"),
    "rope type is a list": (config(rope_scaling={"type": []}), CONFIG, "rope_type; got []"),
    "half a llama3": (config(rope_scaling=ROPE), CONFIG, "original_max_position_embeddings; got nothing"),
    "llama3 upside down": (
        config(rope_scaling={**ROPE, "low_freq_factor": 9, "original_max_position_embeddings": 64}),
        CONFIG, "low_freq_factor; got 9"),
    "rope key": (config(rope_scaling={"mrope_section": [1]}), CONFIG, "got 'mrope_section'"),
    "rope twice": (
        config(rope_scaling={"rope_type": "default"}, rope_parameters={"rope_type": "default"}),
        CONFIG, "both rope_scaling and rope_parameters"),
    "two bases": (config(rope_parameters={"rope_theta": 5.0}), CONFIG, "rope_theta is stated twice"),
    "head of 12": (config(head_dim=12), CONFIG, "head size; got 12; expected a multiple of 8"),
    "part of a head": (config(partial_rotary_factor=0.5), CONFIG, "partial_rotary_factor"),
    "tied is text": (config(tie_word_embeddings="yes"), CONFIG, "tie_word_embeddings; got 'yes'"),
    "vocabulary of another size": (config(vocab_size=2**24), "folder", "expected 16777216 rows"),
    "EOS outside": (config(eos_token_id=320), CONFIG, "eos_token_id; got 320"),
    "EOS is text": (
        write("generation_config.json", b'{"eos_token_id": ["x"]}'), "generation_config.json", "got 'x'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_named(tmp_path: Path, case: str) -> None:
    check(tmp_path / "folder", CASES[case])
