"""config.json as the model families publish it is understood, old and new spelling alike."""

from __future__ import annotations

from typing import Any

import pytest

from quickdraft.models.hf_config import config_from_folder

COMMON: dict[str, Any] = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.43.1", "use_cache": True,
}  # fmt: skip
QWEN25: dict[str, Any] = {
    **COMMON, "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2",
    "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
    "use_sliding_window": False, "use_mrope": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    **COMMON, "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128,
    "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
    "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
LLAMA32: dict[str, Any] = {
    **COMMON, "architectures": ["LlamaForCausalLM"], "attention_bias": False, "head_dim": 64,
    "eos_token_id": [128001, 128008, 128009], "hidden_size": 2048, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
}  # fmt: skip
SMOLLM2: dict[str, Any] = {
    **COMMON, "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_size": 576,
    "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False,
    "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152,
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "head_dim", "base", "bias", "norm"),
    [
        (QWEN25, 64, 1e6, True, False),
        (QWEN3, 128, 1e6, False, True),
        (LLAMA32, 64, 5e5, False, False),
        (SMOLLM2, 64, 1e5, False, False),
    ],
    ids=["qwen2.5", "qwen3", "llama 3.2", "smollm2"],
)
def test_published_configs_are_understood(
    values: dict[str, Any], head_dim: int, base: float, bias: bool, norm: bool
) -> None:
    config, tied = config_from_folder(values, "config.json")
    assert tied
    assert (config.head_dim, config.rotary_dim, config.rope_base) == (head_dim, head_dim, base)
    assert (config.qkv_bias, config.head_norm, config.rope_style) == (bias, norm, "half")
    assert (config.layers, config.width) == (values["num_hidden_layers"], values["hidden_size"])
    assert (config.heads, config.kv_heads) == (values["num_attention_heads"], values["num_key_value_heads"])


def test_defaults_are_those_of_transformers() -> None:
    without = {"num_key_value_heads": None, "rope_theta": None, "tie_word_embeddings": None}
    config, tied = config_from_folder({**SMOLLM2, **without}, "config.json")
    assert (config.kv_heads, config.rope_base, tied) == (9, 10000.0, False)
    assert config_from_folder({**QWEN3, "head_dim": None}, "config.json")[0].head_dim == 128


def test_llama3_factors_leave_short_waves_and_stretch_long_ones() -> None:
    config, _ = config_from_folder(LLAMA32, "config.json")
    assert len(config.rope_factors) == 32
    assert config.rope_factors[0] == 1.0 and config.rope_factors[-1] == 32.0
    assert list(config.rope_factors) == sorted(config.rope_factors)
    assert any(1.0 < factor < 32.0 for factor in config.rope_factors)
