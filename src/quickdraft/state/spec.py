"""LayerState: what a layer keeps of a sequence, and how many bytes that takes. Pure arithmetic.

Paged keys and values grow with the tokens, by blocks; a recurrent state has one size per sequence.
Knows no model and no buffer: a model states its layers, budgets are computed from that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from quickdraft.ops.interface import BLOCK_TOKENS, KV_SCALE_BYTES, KVDtype

DTYPE_BYTES: Final[dict[KVDtype, int]] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
STATE_BYTES: Final = 4  # recurrent state and convolution window are kept in float32


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values [kv_heads, head_dim] per token, in blocks of 16 tokens."""

    kv_heads: int
    head_dim: int
    dtype: KVDtype

    @property
    def bytes_per_block(self) -> int:
        scale_bytes = KV_SCALE_BYTES if self.dtype == "int8" else 0
        head_bytes = self.head_dim * DTYPE_BYTES[self.dtype] + scale_bytes
        return 2 * self.kv_heads * head_bytes * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A state [heads, key_dim, value_dim] and the last `window` inputs of `channels` convolutions."""

    heads: int
    key_dim: int
    value_dim: int
    channels: int
    window: int

    @property
    def bytes_per_sequence(self) -> int:
        return STATE_BYTES * (self.heads * self.key_dim * self.value_dim + self.channels * self.window)


LayerState = PagedKV | Recurrent


def bytes_per_block(layers: Iterable[LayerState]) -> int:
    """Bytes of one KV block over all layers."""
    return sum(layer.bytes_per_block for layer in layers if isinstance(layer, PagedKV))


def bytes_per_sequence(layers: Iterable[LayerState]) -> int:
    """Bytes of one recurrent state (a slot, or a checkpoint) over all layers."""
    return sum(layer.bytes_per_sequence for layer in layers if isinstance(layer, Recurrent))
