"""A tiny random Qwen3.5 hybrid as a folder: nested like the releases, or text only; with an MTP module.

Its text is peaked and periodic like that of tests/support/tiny.py, so that lookup has work. The
embedding has more rows than the tokenizer has tokens, and those rows would be chosen if they could.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.tiny import CHAT_TEMPLATE
from tests.support.tiny_folder import VOCABULARY, put_json, safetensors_bytes, tiny_tokenizer

NESTED_PREFIX, TEXT_PREFIX = "model.language_model.", "model."
ADDRESSABLE = VOCABULARY - 7  # the tokenizer's highest id is VOCABULARY - 8
LAYERS = ("linear_attention", "full_attention", "linear_attention", "linear_attention")
HIDDEN, FF, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 32
MTP_GAIN = np.float32(20)
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 16, 24


def hybrid_config(**changes: Any) -> dict[str, Any]:
    """The language model's keys; a change to None drops the key."""
    config = {
        "model_type": "qwen3_5_text", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "intermediate_size": FF, "num_hidden_layers": len(LAYERS), "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS, "linear_key_head_dim": KEY_DIM,
        "linear_value_head_dim": VALUE_DIM, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25,
            "mrope_interleaved": True, "mrope_section": [2, 1, 1],
        },
        "tie_word_embeddings": False, "max_position_embeddings": 512, "layer_types": list(LAYERS),
        "attn_output_gate": True, "hidden_act": "silu", "mtp_num_hidden_layers": 1, "dtype": "float32",
        "attention_bias": False, "mamba_ssm_dtype": "float32", "output_gate_type": "swish",
        "mtp_use_dedicated_embeddings": False, "eos_token_id": 0,
    }  # fmt: skip
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None}


def hybrid_tensors(seed: int = 0, prefix: str = NESTED_PREFIX) -> dict[str, NDArray[np.float32]]:
    """float32 tensors by the folder's names."""
    random = np.random.default_rng(seed)

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> NDArray[np.float32]:
        return random.normal(0, gain / np.sqrt(inputs), (outputs, inputs)).astype(np.float32)

    def norm(size: int, around: float = 0.0) -> NDArray[np.float32]:
        return (around + random.uniform(-0.2, 0.2, size)).astype(np.float32)

    def attention_layer(name: str) -> dict[str, NDArray[np.float32]]:
        keys, queries = KV_HEADS * HEAD_DIM, HEADS * HEAD_DIM
        return {
            f"{name}.self_attn.q_proj.weight": matrix(2 * queries, HIDDEN, 2.0),
            f"{name}.self_attn.k_proj.weight": matrix(keys, HIDDEN, 2.0),
            f"{name}.self_attn.v_proj.weight": matrix(keys, HIDDEN, 2.0),
            f"{name}.self_attn.o_proj.weight": matrix(HIDDEN, queries, 0.2),
            f"{name}.self_attn.q_norm.weight": norm(HEAD_DIM),
            f"{name}.self_attn.k_norm.weight": norm(HEAD_DIM),
        }

    def delta_layer(name: str) -> dict[str, NDArray[np.float32]]:
        values = VALUE_HEADS * VALUE_DIM
        channels = 2 * KEY_HEADS * KEY_DIM + values
        return {
            f"{name}.linear_attn.in_proj_qkv.weight": matrix(channels, HIDDEN, 2.0),
            f"{name}.linear_attn.in_proj_z.weight": matrix(values, HIDDEN, 2.0),
            f"{name}.linear_attn.in_proj_b.weight": matrix(VALUE_HEADS, HIDDEN, 2.0),
            f"{name}.linear_attn.in_proj_a.weight": matrix(VALUE_HEADS, HIDDEN, 2.0),
            f"{name}.linear_attn.conv1d.weight": matrix(channels, 4).reshape(channels, 1, 4),
            f"{name}.linear_attn.A_log": random.normal(-2, 1, VALUE_HEADS).astype(np.float32),
            f"{name}.linear_attn.dt_bias": random.normal(0, 1, VALUE_HEADS).astype(np.float32),
            f"{name}.linear_attn.norm.weight": norm(VALUE_DIM, 1.0),
            f"{name}.linear_attn.out_proj.weight": matrix(HIDDEN, values, 0.2),
        }

    def rest_of_layer(name: str) -> dict[str, NDArray[np.float32]]:
        return {
            f"{name}.input_layernorm.weight": norm(HIDDEN),
            f"{name}.post_attention_layernorm.weight": norm(HIDDEN),
            f"{name}.mlp.gate_proj.weight": matrix(FF, HIDDEN, 2.0),
            f"{name}.mlp.up_proj.weight": matrix(FF, HIDDEN, 2.0),
            f"{name}.mlp.down_proj.weight": matrix(HIDDEN, FF, 0.1),
        }

    embedding = matrix(VOCABULARY, HIDDEN, np.sqrt(HIDDEN))
    tensors = {f"{prefix}embed_tokens.weight": embedding, f"{prefix}norm.weight": norm(HIDDEN)}
    for index, kind in enumerate(LAYERS):
        name = f"{prefix}layers.{index}"
        tensors |= rest_of_layer(name)
        tensors |= delta_layer(name) if kind == "linear_attention" else attention_layer(name)
    # the likeliest token after t is its neighbour in a ring of ten, padding rows included
    previous = [t - t % 10 + (t - 1) % 10 for t in range(VOCABULARY)]
    tensors["lm_head.weight"] = 0.2 * embedding[previous]
    tensors |= rest_of_layer("mtp.layers.0") | attention_layer("mtp.layers.0")
    # its module draws on the token it is given, so it is often right, and on all rows before, so not always
    tensors["mtp.layers.0.self_attn.o_proj.weight"] *= MTP_GAIN
    tensors["mtp.fc.weight"] = matrix(HIDDEN, 2 * HIDDEN) + np.eye(HIDDEN, 2 * HIDDEN, dtype=np.float32)
    for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{part}.weight"] = norm(HIDDEN)
    return tensors


def write_tiny_hybrid(
    folder: Path,
    *,
    seed: int = 0,
    nested: bool = True,
    dtype: str | None = "F32",
    tokenizer: bool = True,
    shards: int = 1,
    tensors: dict[str, NDArray[np.float32]] | None = None,
    **changes: Any,
) -> Path:
    """Write the folder and return its path; `changes` go into the language model's keys."""
    folder.mkdir(exist_ok=True)
    text = hybrid_config(**changes)
    if nested:
        config = {
            "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
            "text_config": text,
            "vision_config": {"depth": 2, "anything": [1]}, "image_token_id": 5, "video_token_id": 6,
            "vision_start_token_id": 7, "vision_end_token_id": 8, "tie_word_embeddings": False,
            "transformers_version": "5.2.0",
        }  # fmt: skip
    else:
        config = {"architectures": ["Qwen3_5ForCausalLM"], **text}
    put_json(folder / "config.json", config)
    if tensors is None:
        tensors = hybrid_tensors(seed, NESTED_PREFIX if nested else TEXT_PREFIX)
        if nested:
            tensors["model.visual.blocks.0.attn.qkv.weight"] = np.ones((3, 4), np.float32)
    if tokenizer:
        put_json(folder / "tokenizer.json", tiny_tokenizer())
        settings = {"bos_token": None, "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
        put_json(folder / "tokenizer_config.json", settings)
        put_json(folder / "generation_config.json", {"eos_token_id": [2, 0], "pad_token_id": 0})
    _write_weights(folder, tensors, dtype, shards)
    return folder


def _write_weights(
    folder: Path, tensors: dict[str, NDArray[np.float32]], dtype: str | None, shards: int
) -> None:
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, dtype))
        return
    homes: dict[str, str] = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[shard::shards]}
        (folder / name).write_bytes(safetensors_bytes(part, dtype))
        homes |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
