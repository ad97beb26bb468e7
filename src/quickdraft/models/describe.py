"""Descriptions of models without a file: tensors, sizes and config.json.

One description serves `inspect`, which counts bytes with it, and `prepare random`, which writes a
checkpoint of it. A description lists every tensor by its Hugging Face name with its shape and what
its numbers are. It knows no array, no format of quantised weights and no folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol, Self

# linear: a matrix of the body, which a quantiser packs. gate: a matrix it leaves alone, as it is small.
# centred: a norm weight w used as 1 + w. scale: one used as it is.
Kind = Literal[
    "linear", "gate", "embedding", "head", "codebook", "centred", "scale", "convolution", "decay", "step",
]  # fmt: skip
MATRICES: Final = ("linear", "gate", "embedding", "head", "codebook")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a checkpoint before it is quantised; `part` is where `inspect` counts it."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    part: str


class Description(Protocol):
    """What is known of a model. `blocks` is the name of its list of layers, `byte_tokenizer` says that its
    tokens are those of a tokenizer of single bytes, and with fewer than `fewest_layers` a kind is missing."""

    @property
    def blocks(self) -> str: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def byte_tokenizer(self) -> bool: ...
    @property
    def fewest_layers(self) -> int: ...
    def tensors(self) -> Iterator[Tensor]: ...
    def config(self) -> dict[str, Any]: ...
    def changed(self, *, layers: int | None, context: int | None) -> Self: ...


def feed_forward(prefix: str, width: int, inner: int, part: str = "feed-forward") -> Iterator[Tensor]:
    """down(silu(gate x) * up x) below `prefix`."""
    for name in ("gate_proj", "up_proj"):
        yield Tensor(f"{prefix}mlp.{name}.weight", (inner, width), "linear", part)
    yield Tensor(f"{prefix}mlp.down_proj.weight", (width, inner), "linear", part)


def block_norms(prefix: str, width: int, kind: Kind, part: str = "vectors") -> Iterator[Tensor]:
    """The two norms of a decoder layer."""
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Tensor(f"{prefix}{name}.weight", (width,), kind, part)


@dataclass(frozen=True, slots=True)
class DenseSizes:
    """A decoder of the Llama kind."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    context: int
    eos_ids: tuple[int, ...]  # the last one is config.json's own
    byte_tokenizer: bool = False
    blocks: str = "model.layers"
    fewest_layers: int = 1

    def tensors(self) -> Iterator[Tensor]:
        """In the order of the layers."""
        yield Tensor("model.embed_tokens.weight", (self.vocabulary, self.width), "embedding", "embedding")
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            prefix = f"{self.blocks}.{layer}."
            yield from block_norms(prefix, self.width, "scale")
            for name, rows in (("q", queries), ("k", keys), ("v", keys)):
                yield Tensor(
                    f"{prefix}self_attn.{name}_proj.weight", (rows, self.width), "linear", "attention"
                )
            yield Tensor(f"{prefix}self_attn.o_proj.weight", (self.width, queries), "linear", "attention")
            yield from feed_forward(prefix, self.width, self.feed_forward)
        yield Tensor("model.norm.weight", (self.width,), "scale", "vectors")
        yield Tensor("lm_head.weight", (self.vocabulary, self.width), "head", "head")

    def config(self) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.width,
            "intermediate_size": self.feed_forward, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "rope_theta": 10000.0, "tie_word_embeddings": False, "dtype": "bfloat16",
            "eos_token_id": self.eos_ids[-1],
        }  # fmt: skip

    def changed(self, *, layers: int | None, context: int | None) -> Self:
        """The same with other layers or another context; None leaves it."""
        return replace(self, layers=layers or self.layers, context=context or self.context)
