"""config.json of the hybrid: both layouts and spellings give one config; whatever else is said is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quickdraft.errors import ModelFormatError, QuickdraftError, UnsupportedError
from quickdraft.models.config import ModelConfig
from quickdraft.models.hf_config import config_from_folder
from tests.support.tiny_hybrid import LAYERS, hybrid_config

# the values of Qwen/Qwen3.8-27B
LARGE = {
    "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
    "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "max_position_embeddings": 262144, "layer_types": None, "full_attention_interval": 4,
    "eos_token_id": 248044, "dtype": "bfloat16",
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        "mrope_interleaved": True, "mrope_section": [11, 11, 10],
    },
}  # fmt: skip


def nested(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "text_config": hybrid_config(**changes), "vision_config": {"depth": 27}, "image_token_id": 248056,
        "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
        "tie_word_embeddings": False, "transformers_version": "5.2.0",
    }  # fmt: skip


def read(values: dict[str, Any]) -> ModelConfig:
    return config_from_folder(values, "config.json")[0]


def test_the_released_config_is_understood() -> None:
    config = read(nested(**LARGE))
    recurrent = config.recurrent
    assert recurrent is not None
    assert [i for i in range(64) if i not in recurrent.indices] == list(range(3, 64, 4))
    assert (config.rotary_dim, config.rope_base, config.rope_style) == (64, 1e7, "half")
    assert (config.kv_layers, config.mtp_layers, recurrent.state.channels) == (16, 1, 10240)
    assert config.kv_bytes_per_block("bfloat16") == 16 * 65536
    assert config.state_bytes == 48 * 4 * (48 * 128 * 128 + 3 * 10240)


def test_all_spellings_give_one_config() -> None:
    expected = read(nested())
    rope = hybrid_config()["rope_parameters"]
    older = {"rope_parameters": None, "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    sections = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "type": "mrope"}
    outer: dict[str, Any] = {"architectures": ["Qwen3_5ForCausalLM"]}
    for values in (
        {**outer, **hybrid_config()},
        nested(**older),
        nested(**older, rope_scaling=sections),
        {**outer, **hybrid_config(**older, rope_scaling={"rope_type": "default"})},
        nested(rope_parameters={"rope_theta": rope["rope_theta"]}),  # a quarter turns unless it is said
    ):
        assert read(values) == expected
    regular = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    by_list = read(nested(layer_types=regular))
    assert read(nested(layer_types=None, full_attention_interval=4)) == by_list
    assert read(nested(layer_types=regular, full_attention_interval=4)) == by_list != expected


def test_either_place_says_that_the_head_is_the_embedding() -> None:
    assert config_from_folder(nested(), "config.json")[1] is False
    values = nested(tie_word_embeddings=None)
    assert config_from_folder({**values, "tie_word_embeddings": True}, "config.json")[1] is True
    with pytest.raises(ModelFormatError, match="tie_word_embeddings is stated twice"):
        config_from_folder({**nested(), "tie_word_embeddings": True}, "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 8}, "not understood; got 'num_experts'"),
        ({"auto_map": {}}, "not understood; got 'auto_map'"),
        ({"attention_bias": True}, "attention_bias; got True"),
        ({"attn_output_gate": False}, "attn_output_gate; got False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type; got 'sigmoid'"),
        ({"hidden_act": "gelu"}, "hidden_act; got 'gelu'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype; got 'bfloat16'"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings; got True"),
        ({"linear_conv_kernel_dim": 5}, "linear_conv_kernel_dim; got 5"),
        ({"linear_conv_kernel_dim": True}, "linear_conv_kernel_dim; got True"),
        ({"linear_key_head_dim": 20}, "linear_key_head_dim; got 20"),
        ({"linear_num_value_heads": 3}, "value heads that key heads cannot share; got 3 and 2"),
        ({"linear_num_key_heads": None}, "linear_num_key_heads; got nothing"),
        ({"num_key_value_heads": 3}, "query heads that key heads cannot share"),
        ({"layer_types": [*LAYERS, "full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types; got no full_attention"),
        ({"layer_types": None, "full_attention_interval": 9}, "layer_types; got no full_attention"),
        ({"full_attention_interval": 2}, "layer_types and full_attention_interval contradict"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "rope_type; got 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1e7, "factor": 4.0}}, "not understood; got 'factor'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "rope_theta; got nothing"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 2.0}}, "factor; got 2"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.01}}, "rotary dimensions; got 0"),
        ({"rope_theta": 10000.0}, "rope_theta is stated twice"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is stated twice"),
        ({"rope_scaling": {"type": "default"}}, "both rope_scaling and rope_parameters"),
        ({"mtp_num_hidden_layers": -1}, "mtp_num_hidden_layers; got -1"),
        ({"model_type": "qwen3_5_moe_text"}, "model_type; got 'qwen3_5_moe_text'"),
        ({"vocab_size": "many"}, "vocab_size; got 'many'"),
    ],
)  # fmt: skip
def test_what_would_change_the_numbers_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(QuickdraftError) as error:
        read(nested(**changes))
    assert message in str(error.value) and "config.json" in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**nested(), "quantisation": {}}, "not understood; got 'quantisation'"),
        ({**nested(), "text_config": None}, "text_config; got None"),
        ({**nested(), "architectures": ["Qwen3_5MoeForConditionalGeneration"]}, "architectures"),
        ({**hybrid_config(), "architectures": ["Qwen3_5ForConditionalGeneration"]}, "architectures"),
    ],
)
def test_a_wrong_frame_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises((ModelFormatError, UnsupportedError)) as error:
        read(values)
    assert message in str(error.value)
