"""A random MTP module for the tiny llama of tests/support/tiny.py, as a drafter folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.tiny_folder import put_json, safetensors_bytes

WIDTH, HEADS, KV_HEADS, FEED_FORWARD = 64, 4, 2, 80
HEAD_DIM = WIDTH // HEADS
VOCABULARY = 320


def mtp_config(**changes: Any) -> dict[str, Any]:
    """config.json; a change to None drops the key."""
    config = {
        "architectures": ["LlamaMTP"], "hidden_size": WIDTH, "intermediate_size": FEED_FORWARD,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "num_hidden_layers": 1, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "norm_offset": 0, "attention_gate": False, "dtype": "float32",
    }  # fmt: skip
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None}


def mtp_tensors(seed: int = 0, *, head_norm: bool = True) -> dict[str, NDArray[np.float32]]:
    """float32 tensors: a module that draws on the token it is given, so it is often right, and on all rows
    before, so not always."""
    random = np.random.default_rng(seed)

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> NDArray[np.float32]:
        return random.normal(0, gain / np.sqrt(inputs), (outputs, inputs)).astype(np.float32)

    queries, keys, layer = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, "mtp.layers.0"
    tensors = {
        "mtp.fc.weight": matrix(WIDTH, 2 * WIDTH, 0.8) + np.eye(WIDTH, 2 * WIDTH, dtype=np.float32),
        f"{layer}.self_attn.q_proj.weight": matrix(queries, WIDTH, 2.0),
        f"{layer}.self_attn.k_proj.weight": matrix(keys, WIDTH, 2.0),
        f"{layer}.self_attn.v_proj.weight": matrix(keys, WIDTH, 2.0),
        f"{layer}.self_attn.o_proj.weight": matrix(WIDTH, queries, 2.5),
        f"{layer}.mlp.gate_proj.weight": matrix(FEED_FORWARD, WIDTH, 2.0),
        f"{layer}.mlp.up_proj.weight": matrix(FEED_FORWARD, WIDTH, 2.0),
        f"{layer}.mlp.down_proj.weight": matrix(WIDTH, FEED_FORWARD, 0.2),
    }
    norms = [(f"mtp.{part}", WIDTH) for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")]
    norms += [(f"{layer}.{part}", WIDTH) for part in ("input_layernorm", "post_attention_layernorm")]
    if head_norm:
        norms += [(f"{layer}.self_attn.{part}_norm", HEAD_DIM) for part in "qk"]
    for name, size in norms:
        tensors[f"{name}.weight"] = random.uniform(0.8, 1.2, size).astype(np.float32)
    return tensors


def write_mtp_folder(
    folder: Path,
    *,
    tensors: dict[str, NDArray[Any]] | None = None,
    dtype: str | None = "F32",
    **changes: Any,
) -> Path:
    """Write the folder and return its path; `changes` go into config.json."""
    folder.mkdir(exist_ok=True)
    put_json(folder / "config.json", mtp_config(**changes))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors or mtp_tensors(), dtype))
    return folder
