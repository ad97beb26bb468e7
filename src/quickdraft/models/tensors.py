"""Which tensors a decoder has: names and shapes by config, without any weights.

What models/llama.py and models/qwen3_5.py take from an Inventory, as a list; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator

from quickdraft.models.config import ModelConfig
from quickdraft.models.hf_hybrid import NESTED

OPTIONAL = ("output.weight", "rope_freqs.weight")


def decoder_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(GGUF name, shape [outputs, inputs]) of every tensor, the OPTIONAL ones last."""
    width, ff, head = config.width, config.feed_forward, config.head_dim
    queries, keys = config.heads * head, config.kv_heads * head
    gated = 2 if config.architecture == NESTED else 1  # a gate beside each query
    recurrent = config.recurrent.indices if config.recurrent else ()
    yield "token_embd.weight", (config.vocabulary_size, width)
    yield "output_norm.weight", (width,)
    for index in range(config.layers):
        prefix = f"blk.{index}."
        yield f"{prefix}attn_norm.weight", (width,)
        yield f"{prefix}ffn_norm.weight", (width,)
        yield f"{prefix}ffn_gate.weight", (ff, width)
        yield f"{prefix}ffn_up.weight", (ff, width)
        yield f"{prefix}ffn_down.weight", (width, ff)
        if index in recurrent:
            yield from _recurrent_tensors(config, f"{prefix}linear_attn_")
            continue
        for part, size in (("q", gated * queries), ("k", keys), ("v", keys)):
            yield f"{prefix}attn_{part}.weight", (size, width)
            if config.qkv_bias:
                yield f"{prefix}attn_{part}.bias", (size,)
            if config.head_norm and part != "v":
                yield f"{prefix}attn_{part}_norm.weight", (head,)
        yield f"{prefix}attn_output.weight", (width, queries)
    yield "output.weight", (config.vocabulary_size, width)
    yield "rope_freqs.weight", (config.rotary_dim // 2,)


def _recurrent_tensors(config: ModelConfig, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    found, width = config.recurrent, config.width
    assert found is not None, "only a config with recurrent layers has them"
    values, channels = found.value_heads * found.value_dim, found.state.channels
    yield f"{prefix}qkv.weight", (channels, width)
    yield f"{prefix}z.weight", (values, width)
    yield f"{prefix}b.weight", (found.value_heads, width)
    yield f"{prefix}a.weight", (found.value_heads, width)
    yield f"{prefix}conv.weight", (channels, 1, found.window + 1)
    yield f"{prefix}a_log", (found.value_heads,)
    yield f"{prefix}dt_bias", (found.value_heads,)
    yield f"{prefix}norm.weight", (found.value_dim,)
    yield f"{prefix}output.weight", (width, values)
