"""A tiny random llama, qwen2 or qwen3 in the exact real file format, written through gguf.GGUFWriter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.k_quants import quantised

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)
K_SHAPE: dict[str, Any] = {"hidden": 256, "ff": 256}  # blocks of K-quants are 256 inputs
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def written_as(quantisation: str) -> dict[str, Any]:
    """Arguments of write_tiny_llama for a type, or for "mixed": types that differ within a layer."""
    if quantisation != "mixed":
        return {"quantisation": quantisation} | (K_SHAPE if quantisation.endswith("K") else {})
    other = {f"blk.0.{name}.weight": "Q6_K" for name in ("attn_v", "ffn_down")}
    other |= {"output.weight": "Q6_K", "blk.1.ffn_up.weight": "Q5_0", "blk.1.attn_k.weight": "F16"}
    return {"quantisation": "Q4_K", "other_quantisation": other} | K_SHAPE


def byte_characters() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE, by byte value."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(shifted)) for byte in range(256)]


def vocabulary(size: int) -> tuple[list[str], list[str]]:
    """(tokens, merges): control tokens, all bytes, then merges of neighbours of a small text."""
    tokens, merges = CONTROL + byte_characters(), []
    letters = "etaoinshrdlu"
    for first in letters:
        for second in letters:
            if len(tokens) < size:
                tokens.append(first + second)
                merges.append(f"{first} {second}")
    assert len(tokens) == size, f"vocabulary of {size}; expected at most {len(tokens)}"
    return tokens, merges


def tiny_tensors(
    seed: int,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ff: int,
    rows: int,
    architecture: str = "llama",
    head_dim: int | None = None,
) -> dict[str, np.ndarray]:
    """float32 tensors by GGUF name, scaled so that text is peaked and periodic, but not constant."""
    random = np.random.default_rng(seed)
    dim = head_dim or hidden // heads

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> np.ndarray:
        return (random.normal(0, gain / np.sqrt(inputs), (outputs, inputs))).astype(np.float32)

    tensors = {"token_embd.weight": matrix(rows, hidden, np.sqrt(hidden))}
    for index in range(layers):
        shapes = {
            "attn_q": (heads * dim, hidden), "attn_k": (kv_heads * dim, hidden),
            "attn_v": (kv_heads * dim, hidden), "attn_output": (hidden, heads * dim),
            "ffn_gate": (ff, hidden), "ffn_up": (ff, hidden),
            "ffn_down": (hidden, ff),
        }  # fmt: skip
        for name, shape in shapes.items():
            # layers weigh little beside the token itself, so that the planted cycles below show
            gain = 0.1 if name in ("attn_output", "ffn_down") else 2.0
            tensors[f"blk.{index}.{name}.weight"] = matrix(*shape, gain)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{index}.{name}.weight"] = random.uniform(0.8, 1.2, hidden).astype(np.float32)
    tensors["output_norm.weight"] = random.uniform(0.8, 1.2, hidden).astype(np.float32)
    # the likeliest token after t is its neighbour in a ring of ten: periodic text, work for lookup
    previous = [t - t % 10 + (t - 1) % 10 for t in range(rows)]
    tensors["output.weight"] = 0.2 * tensors["token_embd.weight"][previous]
    for index in range(layers):
        if architecture == "qwen2":
            for part, size in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * dim)):
                tensors[f"blk.{index}.attn_{part}.bias"] = random.normal(0, 0.5, size).astype(np.float32)
        if architecture == "qwen3":
            for part in "qk":
                values = random.uniform(0.5, 1.5, dim).astype(np.float32)
                tensors[f"blk.{index}.attn_{part}_norm.weight"] = values
    return tensors


def write_tiny_llama(
    path: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    ff: int = 96,
    vocabulary_size: int = 320,
    quantisation: str = "F32",
    context: int = 512,
    tokenizer: bool = True,
    architecture: str = "llama",
    head_dim: int | None = None,
    tied: bool = False,
    rope_factors: np.ndarray | None = None,
    other_quantisation: dict[str, str] | None = None,
) -> Path:
    """Write the file and return its path. The same arguments give the same bytes.

    `rope_factors` become the tensor rope_freqs.weight; `other_quantisation` overrides single tensors.
    K-quants need `hidden` and `ff` in multiples of 256 (K_SHAPE).
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ff)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(head_dim or hidden // heads)
    if head_dim is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    if tokenizer:
        tokens, merges = vocabulary(vocabulary_size)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
        writer.add_token_merges(merges)
        writer.add_eos_token_id(2)
        writer.add_bos_token_id(1)
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHAT_TEMPLATE)
    tensors = tiny_tensors(seed, layers, hidden, heads, kv_heads, ff, vocabulary_size, architecture, head_dim)
    if tied:
        del tensors["output.weight"]
    if rope_factors is not None:
        tensors["rope_freqs.weight"] = rope_factors.astype(np.float32)
    for name, values in tensors.items():
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            type_name = (other_quantisation or {}).get(name, quantisation)
            kind = gguf.GGMLQuantizationType[type_name]
            writer.add_tensor(name, quantised(values, type_name), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
