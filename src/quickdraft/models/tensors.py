"""Which tensors a dense decoder has: names and shapes by config, without any weights.

What models/llama.py takes from an Inventory, as a list; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterator

from quickdraft.models.config import ModelConfig

OPTIONAL = ("output.weight", "rope_freqs.weight")


def decoder_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(GGUF name, shape [outputs, inputs]) of every tensor, the OPTIONAL ones last."""
    width, ff, head = config.width, config.feed_forward, config.head_dim
    queries, keys = config.heads * head, config.kv_heads * head
    yield "token_embd.weight", (config.vocabulary_size, width)
    yield "output_norm.weight", (width,)
    for index in range(config.layers):
        prefix = f"blk.{index}."
        yield f"{prefix}attn_norm.weight", (width,)
        for part, size in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{prefix}attn_{part}.weight", (size, width)
            if config.qkv_bias:
                yield f"{prefix}attn_{part}.bias", (size,)
            if config.head_norm and part != "v":
                yield f"{prefix}attn_{part}_norm.weight", (head,)
        yield f"{prefix}attn_output.weight", (width, queries)
        yield f"{prefix}ffn_norm.weight", (width,)
        yield f"{prefix}ffn_gate.weight", (ff, width)
        yield f"{prefix}ffn_up.weight", (ff, width)
        yield f"{prefix}ffn_down.weight", (width, ff)
    yield "output.weight", (config.vocabulary_size, width)
    yield "rope_freqs.weight", (config.rotary_dim // 2,)
