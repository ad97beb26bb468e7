"""Descriptions of hybrid models (Qwen3_5) and of the DFlash2 drafter of one.

Gated-DeltaNet layers with a full attention layer after every few, a multi-token-prediction layer
(`mtp.*`) beside them, and no vision tower. Names, shapes and keys are those of the checkpoints
Qwen/Qwen3.8-27B and z-lab/Qwen3.8-27B-DFlash2. See describe.py for what a description is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from quickdraft.models.describe import Kind, Tensor, block_norms, feed_forward
from quickdraft.ops.interface import KVDtype
from quickdraft.state.spec import PagedKV, Recurrent

_MTP: Final = "mtp"


@dataclass(frozen=True, slots=True)
class DFlash2Sizes:
    """A block drafter; keys and values of its context are kept for a window of positions."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    taps: int  # layers of the target whose outputs it reads
    block: int
    window: int
    rank: int  # of its candidate selector
    conv_group: int
    conv_taps: int = 2

    def tensors(self) -> Iterator[Tensor]:
        """Embedding and head are the target's and not here."""
        yield Tensor("fc.weight", (self.width, self.taps * self.width), "linear", "dflash2")
        for name in ("hidden_norm", "norm"):
            yield Tensor(f"{name}.weight", (self.width,), "scale", "dflash2 vectors")
        for layer in range(self.layers):
            yield from self._layer(f"layers.{layer}.")
        for name in ("predecessor", "successor"):
            shape = (self.vocabulary, self.rank)
            yield Tensor(f"candidate_selector.{name}_codebook", shape, "codebook", "dflash2 selector")
        shape = (self.rank, self.width)
        yield Tensor("candidate_selector.hidden_projection.weight", shape, "gate", "dflash2 selector")

    def _layer(self, prefix: str) -> Iterator[Tensor]:
        yield from block_norms(prefix, self.width, "scale", "dflash2 vectors")
        yield from attention(prefix, self, self.heads * self.head_dim, "scale", "dflash2", "dflash2 vectors")
        yield from feed_forward(prefix, self.width, self.feed_forward, "dflash2")
        projected = 2 * self.conv_taps * self.width // self.conv_group
        for name in ("attention_conv", "mlp_conv"):
            kernel = (2, self.conv_taps, self.width)
            yield Tensor(f"{prefix}{name}.base_kernel", kernel, "convolution", "dflash2 vectors")
            shape = (projected, self.width)
            yield Tensor(f"{prefix}{name}.kernel_projection.weight", shape, "gate", "dflash2 convolutions")

    def kept(self, dtype: KVDtype) -> list[PagedKV]:
        """Keys and values of the context, each for at most `window` positions."""
        return [PagedKV(self.kv_heads, self.head_dim, dtype)] * self.layers


@dataclass(frozen=True, slots=True)
class HybridSizes:
    """Sizes of a Qwen3_5 text model; attention layers stand at every `interval`-th place."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    context: int
    eos_ids: tuple[int, ...]  # the last one is config.json's own
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    mrope_section: tuple[int, int, int]
    interval: int = 4
    conv_taps: int = 4
    drafter: DFlash2Sizes | None = None
    byte_tokenizer: bool = False
    blocks: str = "model.language_model.layers"

    @property
    def fewest_layers(self) -> int:
        return self.interval

    @property
    def layer_types(self) -> list[str]:
        return [
            "linear_attention" if (layer + 1) % self.interval else "full_attention"
            for layer in range(self.layers)
        ]

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v of a recurrent layer side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def paged(self, dtype: KVDtype) -> list[PagedKV]:
        """What the attention layers keep."""
        count = self.layer_types.count("full_attention")
        return [PagedKV(self.kv_heads, self.head_dim, dtype)] * count

    def mtp_paged(self, dtype: KVDtype) -> PagedKV:
        """What the MTP layer keeps."""
        return PagedKV(self.kv_heads, self.head_dim, dtype)

    def recurrent(self) -> list[Recurrent]:
        """What the recurrent layers keep."""
        each = Recurrent(self.value_heads, self.key_dim, self.value_dim, self.channels, self.conv_taps - 1)
        return [each] * self.layer_types.count("linear_attention")

    def tensors(self) -> Iterator[Tensor]:
        """In the order of the layers, `mtp.*` last."""
        outer = self.blocks.removesuffix("layers")
        table = (self.vocabulary, self.width)
        yield Tensor(f"{outer}embed_tokens.weight", table, "embedding", "embedding")
        for layer, kind in enumerate(self.layer_types):
            prefix = f"{self.blocks}.{layer}."
            yield from block_norms(prefix, self.width, "centred")
            if kind == "full_attention":
                yield from attention(prefix, self, 2 * self.heads * self.head_dim, "centred")
            else:
                yield from self._delta(f"{prefix}linear_attn.")
            yield from feed_forward(prefix, self.width, self.feed_forward)
        yield Tensor(f"{outer}norm.weight", (self.width,), "centred", "vectors")
        yield Tensor("lm_head.weight", table, "head", "head")
        yield from self._mtp()

    def _delta(self, prefix: str) -> Iterator[Tensor]:
        values, part = self.value_heads * self.value_dim, "gated delta net"
        yield Tensor(f"{prefix}in_proj_qkv.weight", (self.channels, self.width), "linear", part)
        yield Tensor(f"{prefix}in_proj_z.weight", (values, self.width), "linear", part)
        for name in ("in_proj_b", "in_proj_a"):
            yield Tensor(f"{prefix}{name}.weight", (self.value_heads, self.width), "gate", f"{part} gates")
        shape = (self.channels, 1, self.conv_taps)
        yield Tensor(f"{prefix}conv1d.weight", shape, "convolution", "vectors")
        yield Tensor(f"{prefix}A_log", (self.value_heads,), "decay", "vectors")
        yield Tensor(f"{prefix}dt_bias", (self.value_heads,), "step", "vectors")
        yield Tensor(f"{prefix}norm.weight", (self.value_dim,), "scale", "vectors")
        yield Tensor(f"{prefix}out_proj.weight", (self.width, values), "linear", part)

    def _mtp(self) -> Iterator[Tensor]:
        """One full attention layer; embedding and head are the model's."""
        yield Tensor(f"{_MTP}.fc.weight", (self.width, 2 * self.width), "linear", _MTP)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            yield Tensor(f"{_MTP}.{name}.weight", (self.width,), "centred", f"{_MTP} vectors")
        prefix = f"{_MTP}.layers.0."
        yield from block_norms(prefix, self.width, "centred", f"{_MTP} vectors")
        yield from attention(prefix, self, 2 * self.heads * self.head_dim, "centred", _MTP, f"{_MTP} vectors")
        yield from feed_forward(prefix, self.width, self.feed_forward, _MTP)

    def config(self) -> dict[str, Any]:
        """config.json, without a vision tower and its tokens."""
        text = {
            "vocab_size": self.vocabulary, "hidden_size": self.width,
            "intermediate_size": self.feed_forward, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads, "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim, "linear_conv_kernel_dim": self.conv_taps,
            "rms_norm_eps": 1e-6, "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                "mrope_interleaved": True, "mrope_section": list(self.mrope_section),
            },
            "tie_word_embeddings": False, "max_position_embeddings": self.context,
            "layer_types": self.layer_types, "full_attention_interval": self.interval,
            "attn_output_gate": True, "attention_bias": False, "hidden_act": "silu",
            "output_gate_type": "swish", "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False, "model_type": "qwen3_5_text", "dtype": "bfloat16",
            "eos_token_id": self.eos_ids[-1],
        }  # fmt: skip
        return {
            "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
            "text_config": text, "tie_word_embeddings": False,
        }  # fmt: skip

    def changed(self, *, layers: int | None, context: int | None) -> Self:
        """The same with other layers or another context; None leaves it."""
        return replace(self, layers=layers or self.layers, context=context or self.context)


def attention(
    prefix: str,
    sizes: HybridSizes | DFlash2Sizes,
    query_rows: int,
    norms: Kind,
    part: str = "attention",
    vectors: str = "vectors",
) -> Iterator[Tensor]:
    """q, k, v, o and the norms of each head; `query_rows` counts the output gate where q_proj holds one."""
    keys = sizes.kv_heads * sizes.head_dim
    for name, rows in (("q", query_rows), ("k", keys), ("v", keys)):
        yield Tensor(f"{prefix}self_attn.{name}_proj.weight", (rows, sizes.width), "linear", part)
    shape = (sizes.width, sizes.heads * sizes.head_dim)
    yield Tensor(f"{prefix}self_attn.o_proj.weight", shape, "linear", part)
    for name in ("q_norm", "k_norm"):
        yield Tensor(f"{prefix}self_attn.{name}.weight", (sizes.head_dim,), norms, vectors)
