"""A tiny random model as a Hugging Face folder, byte by byte, so that tests can also write wrong ones.

The tensors are those of the GGUF files tests/support/tiny.py writes: qwen2 and qwen3 are the same
model in both forms (GGUF stores llama's q and k in another order).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.tiny import CHAT_TEMPLATE, CONTROL, tiny_tensors, vocabulary

VOCABULARY = 320
DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PARTS = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "token_embd": "model.embed_tokens",
    "output_norm": "model.norm", "output": "lm_head",
}  # fmt: skip


def folder_name(name: str) -> str:
    """blk.0.attn_q.weight -> model.layers.0.self_attn.q_proj.weight"""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{PARTS[parts[2]]}.{parts[3]}"
    return f"{PARTS[parts[0]]}.{parts[1]}"


def folder_tensors(architecture: str, head_dim: int | None = None) -> dict[str, np.ndarray]:
    """float32 tensors by the folder's names."""
    sizes = tiny_tensors(0, 2, 64, 4, 2, 96, VOCABULARY, architecture, head_dim)
    return {folder_name(name): values for name, values in sizes.items()}


def safetensors_bytes(tensors: dict[str, np.ndarray], dtype: str | None = "F32") -> bytes:
    """A whole file, all tensors in one type or (None) each in its own; the header is padded to 8 bytes with
    spaces, as the package does."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    own = {np.dtype(kind): name for name, kind in (*DTYPES.items(), ("I32", np.int32), ("I64", np.int64))}
    for name, values in tensors.items():
        kind = dtype or own[values.dtype]
        raw = values.tobytes() if dtype is None else values.astype(DTYPES[dtype]).tobytes()
        header[name] = {
            "dtype": kind,
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    return with_header(header, data)


def with_header(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def tiny_config(architecture: str, **changes: Any) -> dict[str, Any]:
    """config.json as transformers 4 wrote it; a change to None drops the key."""
    config = {
        "architectures": [CLASSES[architecture]], "model_type": architecture, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": VOCABULARY, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_theta": 10000, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float32",
        "bos_token_id": 1, "eos_token_id": 2, "use_cache": True, "transformers_version": "4.51.0",
    }  # fmt: skip
    if architecture == "qwen3":
        config["head_dim"] = 24
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None or key == "rope_scaling"}


def tiny_tokenizer(**changes: Any) -> dict[str, Any]:
    """tokenizer.json: the vocabulary of tests/support/tiny.py, digits split, one user-defined token."""
    tokens, merges = vocabulary(VOCABULARY - 8)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": i, "content": text, "special": True, **flags} for i, text in enumerate(CONTROL)]
    added.append({"id": VOCABULARY - 8, "content": "<tool_call>", "special": False, **flags})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    steps = [{"type": "Digits", "individual_digits": True}, byte_level]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(tokens)}, "merges": merges,
        },
        **changes,
    }  # fmt: skip


def write_tiny_folder(
    folder: Path,
    architecture: str = "qwen3",
    *,
    dtype: str | None = "F32",
    shards: int = 1,
    tied: bool = False,
    tensors: dict[str, np.ndarray] | None = None,
    **changes: Any,
) -> Path:
    """Write the folder and return its path; `changes` go into config.json."""
    folder.mkdir(exist_ok=True)
    config = tiny_config(architecture, tie_word_embeddings=tied, **changes)
    tensors = dict(tensors or folder_tensors(architecture, config.get("head_dim")))
    if tied:
        tensors.pop("lm_head.weight", None)
    put_json(folder / "config.json", config)
    put_json(folder / "tokenizer.json", tiny_tokenizer())
    eos = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}
    settings = {"bos_token": "<|im_start|>", "eos_token": eos}
    put_json(folder / "tokenizer_config.json", {**settings, "chat_template": CHAT_TEMPLATE})
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, dtype))
        return folder
    homes = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[shard::shards]}
        (folder / name).write_bytes(safetensors_bytes(part, dtype))
        homes |= dict.fromkeys(part, name)
    put_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": homes})
    return folder


def put_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
