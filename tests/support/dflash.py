"""Drafters in tests: a loaded DFlash module run without an engine, and random drafter folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from quickdraft.models.dflash import FEATURE_ROWS, DFlashModule
from quickdraft.models.dflash_loading import DraftTarget, load_dflash
from quickdraft.models.interface import LoadedModel
from tests.support.ops_cases import fill_kv

Array = NDArray[Any]
MAX_TOKENS = 1024


def target_of(loaded: LoadedModel) -> DraftTarget:
    parts = loaded.model.parts
    return DraftTarget(loaded.model.config, parts.embedding, parts.head, parts.head_bias, loaded.tensors)


class DrafterSteps:
    """A module with a KV cache for `slots` sequences, whose blocks are numbered against their order."""

    def __init__(self, module: DFlashModule, ops: Any, kv: Any = "float32", slots: int = 2) -> None:
        self.module, self.slots = module, slots
        width = MAX_TOKENS // 16
        blocks = slots * width
        self.kv = module.kv_cache(blocks, kv)
        fill_kv(self.kv, np.nan)  # what was not written is never read
        self.tables = np.arange(blocks, dtype=np.int32)[::-1].reshape(slots, width).copy()
        vocabulary = module.config.vocabulary_size
        self._batch = ops.batch(FEATURE_ROWS, slots, width, blocks, vocabulary)
        self._context, self._block = (make(self._batch, self.kv) for make in (module.context, module.block))
        self.lengths = [0] * slots

    @classmethod
    def load(cls, folder: Path, loaded: LoadedModel, ops: Any, **options: Any) -> DrafterSteps:
        return cls(load_dflash(folder, target_of(loaded), ops), ops, **options)

    def append(self, features: Array, slot: int = 0) -> None:
        """Context rows [n, taps * C] behind what the sequence has."""
        for first in range(0, len(features), FEATURE_ROWS):
            part = features[first : first + FEATURE_ROWS]
            count, start = len(part), self.lengths[slot]
            self.module.features[:count] = part
            rows = (np.zeros(count), np.arange(start, start + count), [0, count])
            arrays = (*rows, self.tables[slot : slot + 1], [])
            self._batch.set(*(np.array(array, np.int32) for array in arrays))
            self._context.run()
            self.lengths[slot] += count

    def block(self, anchors: Sequence[int], rows: Sequence[int], seen_from: Any = None) -> list[Array]:
        """Blocks of the first sequences; y [rows, C] of each."""
        count = len(anchors)
        numbers = (anchors, self.lengths[:count], rows, self.tables[:count])
        first = None if seen_from is None else np.array(seen_from, np.int32)
        self.module.set_block(self._batch, *(np.array(each, np.int32) for each in numbers), first)
        self._block.run()
        ends = np.cumsum(rows)
        return [np.array(self.module.hidden[end - n : end]) for end, n in zip(ends, rows, strict=True)]

    def path(self, anchor: int, count: int, first: int = 0) -> list[int]:
        """Greedy choices of `count` rows of the last block, from wanted row `first` on."""
        tokens: list[int] = []
        candidates = self.module.candidates(first + count)
        for row in range(first, first + count):
            ids, scores = candidates.scores(row, tokens[-1] if tokens else anchor)
            tokens.append(int(ids[scores.argmax()]))
        return tokens


def drafter_config(version: int = 2, **changes: Any) -> dict[str, Any]:
    """Of a drafter for the golden target (8 layers, 64 channels, 101 tokens); None drops a key, and a dict
    changes the keys of a dict."""
    config: dict[str, Any] = {
        "architectures": ["DFlash2DraftModel" if version == 2 else "DFlashDraftModel"], "model_type": "qwen3",
        "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20,
        "num_target_layers": 8, "dtype": "float32", "max_position_embeddings": 2048,
        "dflash_config": {"block_size": 8, "mask_token_id": 5, "target_layer_ids": [1, 3, 5]},
    }  # fmt: skip
    if version == 2:
        config["is_causal"] = False
        config["dflash_config"] |= {
            "conv_group_size": 8, "conv_kernel_size": 2, "selector_rank": 24, "selector_top_k": 16
        }  # fmt: skip
    for key, value in changes.items():
        config[key] = config[key] | value if isinstance(config.get(key), dict) and value else value
    inner = config["dflash_config"]
    config["dflash_config"] = {key: value for key, value in inner.items() if value is not None}
    return {key: value for key, value in config.items() if value is not None}


def drafter_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Array]:
    """Random float32 tensors of the published layout."""
    random, version = np.random.default_rng(seed), 1 + ("DFlash2" in config["architectures"][0])
    inner, width, ff = config["dflash_config"], config["hidden_size"], config["intermediate_size"]
    dim = config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def matrix(*shape: int) -> Array:
        return random.normal(0, 1 / np.sqrt(shape[-1]), shape).astype(np.float32)

    def norm(size: int) -> Array:
        return random.uniform(0.7, 1.3, size).astype(np.float32)

    tensors = {
        "fc.weight": matrix(width, len(inner["target_layer_ids"]) * width),
        "hidden_norm.weight": norm(width), "norm.weight": norm(width),
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "input_layernorm.weight": norm(width), "post_attention_layernorm.weight": norm(width),
            "self_attn.q_proj.weight": matrix(queries, width), "self_attn.k_proj.weight": matrix(keys, width),
            "self_attn.v_proj.weight": matrix(keys, width), "self_attn.o_proj.weight": matrix(width, queries),
            "self_attn.q_norm.weight": norm(dim), "self_attn.k_norm.weight": norm(dim),
            "mlp.gate_proj.weight": matrix(ff, width), "mlp.up_proj.weight": matrix(ff, width),
            "mlp.down_proj.weight": matrix(width, ff),
        }  # fmt: skip
        for conv in ("attention_conv", "mlp_conv") if version == 2 else ():
            parts[f"{conv}.base_kernel"] = random.normal(0.5, 0.2, (2, 2, width)).astype(np.float32)
            parts[f"{conv}.kernel_projection.weight"] = matrix(4 * width // inner["conv_group_size"], width)
        tensors |= {f"layers.{layer}.{name}": value for name, value in parts.items()}
    if version == 2:
        rank = inner["selector_rank"]
        for name in ("predecessor_codebook", "successor_codebook"):
            tensors[f"candidate_selector.{name}"] = random.normal(0, 1, (101, rank)).astype(np.float32)
        tensors["candidate_selector.hidden_projection.weight"] = matrix(rank, width)
    return tensors


def write_drafter(folder: Path, config: dict[str, Any], tensors: dict[str, Array] | None = None) -> Path:
    """A drafter's folder; random tensors unless given."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = drafter_tensors(config) if tensors is None else tensors
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "model.safetensors")
    return folder
