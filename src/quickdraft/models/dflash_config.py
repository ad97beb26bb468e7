"""DFlashConfig: what config.json of a DFlash (v1) or DFlash2 drafter says, read strictly.

Every key is used, or known not to change the numbers, or must have the value that means "off"; any other
key is an error that names it. Where files leave something out, the rules of the published loaders hold
(`read`). Knows no tensors, and of the target only what must agree with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.models.config import ModelConfig
from quickdraft.models.config_reader import Reader
from quickdraft.models.dflash_keys import dflash_keys

DEFAULT_BLOCK: Final = 16
DEFAULT_TOP_K: Final = 16  # v1: candidates of a row
MAX_TOP_K: Final = 32
MAX_BLOCK: Final = 64
CONV_TAPS: Final = 2
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Sizes and rules of a drafter. `causal` and `window` have an entry for each layer."""

    version: int  # 1 | 2
    block: int  # rows of a block at most, its anchor included
    block_lengths: tuple[int, ...]  # rows it was trained with, ascending; the last is `block`
    mask_id: int
    target_layers: tuple[int, ...]  # 0-based: the residual stream after these layers, in this order
    causal: tuple[bool, ...]  # whether a row of a block sees only the block's rows before it, and itself
    window: tuple[int | None, ...]  # a row at qp sees positions kp with qp - kp < window; None: all
    width: int  # C, the target's
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # D
    feed_forward: int  # F
    vocabulary_size: int  # V, the target's
    rope_theta: float
    eps: float
    conv_group: int = 0  # v2: channels that share a dynamic kernel
    conv_taps: int = 0
    rank: int = 0  # v2: of the selector's codebooks
    top_k: int = DEFAULT_TOP_K  # candidates of a row
    embedding_scale: float = 1.0  # of the rows of a block
    output_multiplier: float = 1.0  # of the logits
    softcap: float | None = None  # logits become softcap * tanh(logit / softcap)
    target_sha256: str | None = None  # of the only weight file it drafts for, where it says so

    @property
    def layers(self) -> int:
        return len(self.causal)

    @property
    def conv_kernel_width(self) -> int:
        """Dynamic numbers of one convolution: tap by tap, one for each group of channels; v1: 0."""
        return self.conv_taps * self.width // self.conv_group if self.conv_group else 0

    def rows_for(self, drafts: int) -> int:
        """Rows of the shortest block that drafts so many tokens; the longest where none does."""
        return next((rows for rows in self.block_lengths if rows > drafts), self.block)

    @property
    def longest_window(self) -> int | None:
        """Positions of context that any layer sees from the anchor; None: all of them."""
        windows = [window for window in self.window if window is not None]
        return max(windows) if len(windows) == self.layers else None

    @classmethod
    def read(cls, values: Mapping[str, Any], target: ModelConfig, where: str) -> DFlashConfig:
        """The config of a drafter for `target`; `values` is config.json, `where` its path.

        UnsupportedError or ModelFormatError names the key. Left out: block_size 16; target_layer_ids spread
        evenly between the second and the third layer from the end; causality from layer_types (a sliding
        layer is causal); no layer_types: full attention.
        """
        return _read(values, target, where)


def drafter_version(values: Mapping[str, Any]) -> int | None:
    """1 or 2 where `architectures` names a DFlash or DFlash2 drafter, else None."""
    names = values.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(name, str) or "DFlash" not in name:
        return None
    return 2 if "DFlash2" in name else 1


def _read(values: Mapping[str, Any], target: ModelConfig, where: str) -> DFlashConfig:
    version = drafter_version(values)
    if version is None:
        got = repr(values.get("architectures"))[:80]
        raise UnsupportedError(f"{where}: architectures", got=got, expected="DFlashDraftModel or DFlash2...")
    outer = Reader(values, where)
    _check_target(outer, target)
    inner, draft = dflash_keys(outer)
    layers = outer.size("num_hidden_layers")
    types = _layer_types(outer, layers)
    block = _whole(draft, "block_size", draft.values.get("block_size", DEFAULT_BLOCK), 2, MAX_BLOCK)
    capped = draft.values.get("final_logit_softcapping") is not None
    config = DFlashConfig(
        version=version,
        block=block,
        block_lengths=_block_lengths(draft, block),
        mask_id=_whole(
            draft, "mask_token_id", draft.values.get("mask_token_id"), 0, target.vocabulary_size - 1
        ),
        target_layers=_target_layers(outer, draft, layers, target),
        causal=_causality(outer, inner, types),
        window=_windows(outer, types),
        width=target.width,
        heads=outer.size("num_attention_heads"),
        kv_heads=outer.size("num_key_value_heads"),
        head_dim=outer.size("head_dim"),
        feed_forward=outer.size("intermediate_size"),
        vocabulary_size=target.vocabulary_size,
        rope_theta=_rope_theta(outer),
        eps=outer.real("rms_norm_eps"),
        embedding_scale=draft.real("input_embedding_scale", 1.0),
        output_multiplier=draft.real("output_multiplier", 1.0),
        softcap=draft.real("final_logit_softcapping") if capped else None,
        target_sha256=_digest(outer),
        **(_selector_keys(draft) if version == 2 else {}),
    )
    _check_sizes(config, where)
    return config


def _whole(reader: Reader, key: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        got = "nothing" if value is None else repr(value)[:80]
        raise ModelFormatError(f"{reader.where}: {key}", got=got, expected=f"{low}..{high}")
    return value


def _block_lengths(draft: Reader, block: int) -> tuple[int, ...]:
    lengths = draft.values.get("block_lengths")
    if lengths is None:
        return (block,)
    whole = isinstance(lengths, list) and all(type(rows) is int and rows >= 2 for rows in lengths)
    if not whole or lengths != sorted(set(lengths)) or lengths[-1:] != [block]:
        raise ModelFormatError(
            f"{draft.where}: block_lengths", got=repr(lengths)[:80],
            expected=f"rows of blocks, increasing from 2 at least to block_size, {block}",
        )  # fmt: skip
    return tuple(lengths)


def _layer_types(outer: Reader, layers: int) -> list[str]:
    types = outer.values.get("layer_types")
    if types is None:
        return [_FULL] * layers
    if not isinstance(types, list) or len(types) != layers or set(map(str, types)) - {_SLIDING, _FULL}:
        raise ModelFormatError(
            f"{outer.where}: layer_types", got=repr(types)[:80],
            expected=f"{_SLIDING} or {_FULL} for each of {layers} layers",
        )  # fmt: skip
    return types


def _causality(outer: Reader, inner: Reader, types: list[str]) -> tuple[bool, ...]:
    for reader, key in ((outer, "is_causal"), (inner, "causal")):
        if reader.values.get(key) is not None:
            return (reader.flag(key),) * len(types)
    return tuple(kind == _SLIDING for kind in types)


def _windows(outer: Reader, types: list[str]) -> tuple[int | None, ...]:
    if _SLIDING not in types:
        return (None,) * len(types)
    if not outer.flag("use_sliding_window", True):
        raise ModelFormatError(
            f"{outer.where}: use_sliding_window is false, but layer_types names {_SLIDING}"
        )
    window = outer.size("sliding_window")
    return tuple(window if kind == _SLIDING else None for kind in types)


def _target_layers(outer: Reader, draft: Reader, layers: int, target: ModelConfig) -> tuple[int, ...]:
    count = outer.size("num_target_layers", target.layers)
    if count != target.layers:
        raise ModelFormatError(
            f"{outer.where}: num_target_layers", got=count, expected=f"{target.layers}, the target's layers"
        )
    ids = draft.values.get("target_layer_ids")
    if ids is None:
        if layers == 1:
            return (count // 2,)
        return tuple(round(1 + i * (count - 4) / (layers - 1)) for i in range(layers))
    if not isinstance(ids, list) or not 1 <= len(ids) <= target.layers:
        raise ModelFormatError(
            f"{draft.where}: target_layer_ids", got=repr(ids)[:80], expected="a list of layer numbers"
        )
    return tuple(_whole(draft, "target_layer_ids", layer, 0, count - 1) for layer in ids)


def _rope_theta(outer: Reader) -> float:
    """rope_theta of the top level or of rope_parameters; only plain rope."""
    found = []
    for name in ("rope_scaling", "rope_parameters"):
        rope = outer.values.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise ModelFormatError(f"{outer.where}: {name}", got=repr(rope)[:80], expected="an object")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            got = repr(kind)[:80]
            raise UnsupportedError(f"{outer.where}: {name}.rope_type", got=got, expected="default")
        strange = set(rope) - {"rope_type", "type", "rope_theta"}
        if strange:
            got = repr(min(strange)[:80])
            raise UnsupportedError(f"{outer.where}: {name}: a key that is not understood", got=got)
        found.append(Reader(rope, f"{outer.where}: {name}"))
    readers = [reader for reader in (outer, *found) if reader.values.get("rope_theta") is not None]
    numbers = {reader.real("rope_theta") for reader in readers}
    if len(numbers) != 1:
        raise ModelFormatError(
            f"{outer.where}: rope_theta", got=sorted(numbers) or "nothing", expected="one positive number"
        )
    return numbers.pop()


def _selector_keys(draft: Reader) -> dict[str, int]:
    keys = ("conv_group_size", "conv_kernel_size", "selector_rank", "selector_top_k")
    group, taps, rank, top_k = (draft.size(key) for key in keys)
    if taps != CONV_TAPS:
        raise UnsupportedError(f"{draft.where}: conv_kernel_size", got=taps, expected=CONV_TAPS)
    if top_k > MAX_TOP_K:
        raise UnsupportedError(f"{draft.where}: selector_top_k", got=top_k, expected=f"1..{MAX_TOP_K}")
    return {"conv_group": group, "conv_taps": taps, "rank": rank, "top_k": top_k}


def _digest(outer: Reader) -> str | None:
    digest = outer.values.get("target_sha256")
    fine = isinstance(digest, str) and len(digest) == 64 and not set(digest) - set("0123456789abcdef")
    if digest is not None and not fine:
        raise ModelFormatError(
            f"{outer.where}: target_sha256", got=repr(digest)[:80], expected="64 lowercase hex digits"
        )
    return digest


def _check_target(outer: Reader, target: ModelConfig) -> None:
    """ModelFormatError where the drafter's sizes are those of another target."""
    for key, expected in (("hidden_size", target.width), ("vocab_size", target.vocabulary_size)):
        got = outer.size(key)
        if got != expected:
            raise ModelFormatError(
                f"{outer.where}: {key} is not the target's", got=got, expected=expected,
                hint="this drafter was made for another model",
            )  # fmt: skip


def _check_sizes(config: DFlashConfig, where: str) -> None:
    """Errors for sizes that contradict each other, or that the kernels cannot do."""
    if config.heads % config.kv_heads:
        heads = f"{config.heads} and {config.kv_heads}"
        raise ModelFormatError(f"{where}: query heads that key heads cannot share", got=heads)
    smallest = min(filter(None, config.window), default=config.block)
    if smallest < config.block:
        raise UnsupportedError(
            f"{where}: sliding_window", got=smallest, expected=f"the block of {config.block} at least"
        )
    if config.head_dim % 8:
        raise UnsupportedError(f"{where}: head_dim", got=config.head_dim, expected="a multiple of 8")
    if config.version == 2 and config.width % config.conv_group:
        raise ModelFormatError(
            f"{where}: conv_group_size", got=config.conv_group, expected=f"a divisor of {config.width}"
        )
    if config.top_k > config.vocabulary_size:
        raise ModelFormatError(
            f"{where}: selector_top_k", got=config.top_k, expected=f"at most {config.vocabulary_size} tokens"
        )
