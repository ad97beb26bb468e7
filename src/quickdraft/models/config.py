"""ModelConfig: the numbers of an architecture, read strictly from a file's metadata.

A key of the architecture's own namespace that is not understood fails at load: better no answer
than a subtly wrong one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.ops.interface import KVDtype, RopeStyle
from quickdraft.ops.recurrent import key_heads_of
from quickdraft.state.spec import LayerState, PagedKV, Recurrent, bytes_per_block, bytes_per_sequence

# architecture -> (rope style of its GGUF files, bias on q, k and v, rms_norm of each q and k head).
# GGUF stores llama's q and k permuted, so that rope turns adjacent pairs.
_GGUF_KINDS: Final[dict[str, tuple[RopeStyle, bool, bool]]] = {
    "llama": ("interleaved", False, False),
    "qwen2": ("half", True, False),
    "qwen3": ("half", False, True),
}
ARCHITECTURES: Final = tuple(_GGUF_KINDS)
_KNOWN: Final = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base",
    "rope.dimension_count", "attention.layer_norm_rms_epsilon", "vocab_size",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RecurrentLayers:
    """Which layers keep a recurrent state instead of keys and values, and its sizes."""

    indices: tuple[int, ...]
    key_heads: int  # Hk
    value_heads: int  # Hv
    key_dim: int
    value_dim: int
    window: int  # inputs a convolution reads before the current one

    @property
    def state(self) -> Recurrent:
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return Recurrent(self.value_heads, self.key_dim, self.value_dim, channels, self.window)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a decoder. heads = query heads; rotary_dim elements of each head turn."""

    architecture: str
    layers: int
    width: int  # C
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # D
    feed_forward: int  # F
    vocabulary_size: int  # V
    context_length: int  # positions that are served: the model's own, or fewer if asked
    rotary_dim: int
    rope_base: float
    rope_style: RopeStyle
    norm_eps: float
    qkv_bias: bool = False
    head_norm: bool = False  # q and k are normalised per head before they turn
    rope_factors: tuple[float, ...] = ()  # frequency i is divided by factor i; empty: none
    recurrent: RecurrentLayers | None = None
    mtp_layers: int = 0  # layers of a multi-token-prediction module beside the model's own
    draft_kv_layers: int = 0  # of MTP modules that are loaded: the last layers of the KV cache

    def layer_states(self, dtype: KVDtype) -> tuple[LayerState, ...]:
        """What each layer keeps of a sequence."""
        paged = PagedKV(self.kv_heads, self.head_dim, dtype)
        found = self.recurrent
        if found is None:
            return (paged,) * (self.layers + self.draft_kv_layers)
        own = tuple(found.state if index in found.indices else paged for index in range(self.layers))
        return own + (paged,) * self.draft_kv_layers

    @property
    def kv_layers(self) -> int:
        """Layers with keys and values, without those of a drafter."""
        return self.layers - (len(self.recurrent.indices) if self.recurrent else 0)

    def kv_bytes_per_block(self, dtype: KVDtype) -> int:
        """Bytes of one block of keys and values over all layers."""
        return bytes_per_block(self.layer_states(dtype))

    @property
    def state_bytes(self) -> int:
        """Bytes of one recurrent state (a slot) over all layers; 0 without such layers."""
        return bytes_per_sequence(self.layer_states("float32"))

    @property
    def history_bytes(self) -> int:
        """Of one drafted row of one sequence, which leaves its inputs to be replayed: float32 inputs of the
        convolution, keys, values and two gates a head, in every recurrent layer."""
        found = self.recurrent
        if found is None:
            return 0
        shape = found.state
        all_keys = key_heads_of(shape) * shape.key_dim  # as many queries, which are not needed
        return 4 * len(found.indices) * (2 * shape.channels - all_keys + 2 * shape.heads)

    @property
    def qkv_width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def config_from_gguf(metadata: dict[str, Any], vocabulary_size: int, where: str) -> ModelConfig:
    """The config of a GGUF file; `vocabulary_size` is the rows of its embedding."""
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{where}: unknown architecture", got=repr(architecture), expected=" or ".join(ARCHITECTURES)
        )
    style, qkv_bias, head_norm = _GGUF_KINDS[architecture]
    prefix = f"{architecture}."
    strange = [k for k in metadata if k.startswith(prefix) and k.removeprefix(prefix) not in _KNOWN]
    if strange:
        raise UnsupportedError(f"{where}: metadata key that is not understood", got=strange[0])
    read = _Reader(metadata, prefix, where)
    heads, width = read.size("attention.head_count"), read.size("embedding_length")
    head_dim = read.size("attention.key_length", width // heads)
    config = ModelConfig(
        architecture=architecture,
        layers=read.size("block_count"),
        width=width,
        heads=heads,
        kv_heads=read.size("attention.head_count_kv", heads),
        head_dim=head_dim,
        feed_forward=read.size("feed_forward_length"),
        vocabulary_size=vocabulary_size,
        context_length=read.size("context_length"),
        rotary_dim=read.size("rope.dimension_count", head_dim),
        rope_base=read.real("rope.freq_base", 10000.0),
        rope_style=style,
        norm_eps=read.real("attention.layer_norm_rms_epsilon"),
        qkv_bias=qkv_bias,
        head_norm=head_norm,
    )
    if read.size("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(f"{where}: keys and values of different size")
    if read.size("vocab_size", vocabulary_size) != vocabulary_size:
        raise ModelFormatError(f"{where}: vocab_size", got=read.size("vocab_size"), expected=vocabulary_size)
    check_heads(config, where)
    return config


def check_heads(config: ModelConfig, where: str) -> None:
    """ModelFormatError when the sizes of heads contradict each other, UnsupportedError for a head size
    the kernels cannot do."""
    if config.heads % config.kv_heads:
        raise ModelFormatError(
            f"{where}: query heads that key heads cannot share",
            got=f"{config.heads} and {config.kv_heads}",
            expected="a multiple",
        )
    if config.rotary_dim % 2 or not 2 <= config.rotary_dim <= config.head_dim:
        raise ModelFormatError(
            f"{where}: rotary dimensions", got=config.rotary_dim,
            expected=f"an even number from 2 to the head size {config.head_dim}",
        )  # fmt: skip
    if config.head_dim % 8:
        raise UnsupportedError(f"{where}: head size", got=config.head_dim, expected="a multiple of 8")


class _Reader:
    def __init__(self, metadata: dict[str, Any], prefix: str, where: str) -> None:
        self.metadata, self.prefix, self.where = metadata, prefix, where

    def size(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(self.prefix + key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**24:
            raise ModelFormatError(f"{self.where}: {self.prefix}{key}", got=value, expected="1..2^24")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(self.prefix + key, default)
        if not isinstance(value, float) or not 0.0 < value < 1e12:
            raise ModelFormatError(
                f"{self.where}: {self.prefix}{key}", got=value, expected="a positive number"
            )
        return value
