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
from quickdraft.models.config_reader import HARMLESS, HINTS, Reader

INNER: Final = "dflash_config"
DEFAULT_BLOCK: Final = 16
DEFAULT_TOP_K: Final = 16  # v1: candidates of a row
MAX_TOP_K: Final = 32
MAX_BLOCK: Final = 64
CONV_TAPS: Final = 2
_SLIDING, _FULL = "sliding_attention", "full_attention"
_USED: Final = {
    "architectures", "attention_bias", INNER, "head_dim", "hidden_act", "hidden_size", "intermediate_size",
    "is_causal", "layer_types", "model_type", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "num_target_layers", "quantization_config", "rms_norm_eps", "rope_parameters",
    "rope_scaling", "rope_theta", "sliding_window", "target_sha256", "use_sliding_window", "vocab_size",
}  # fmt: skip
_WITHOUT_EFFECT: Final = {"max_position_embeddings", "tie_word_embeddings"}  # the drafter has no embedding
_OFF: Final = {"mlp_bias", "is_encoder_decoder", "add_cross_attention"}  # understood only when false
# stated in dflash_config or, as in older files, at the top level
_EITHER: Final = {
    "block_size", "conv_group_size", "conv_kernel_size", "final_logit_softcapping", "input_embedding_scale",
    "mask_token_id", "output_multiplier", "sample_from_anchor", "selector_rank", "selector_top_k",
    "target_layer_ids",
}  # fmt: skip
_INNER_OFF: Final = {"use_swa", "swa_window_size", "attention_sink_bias", "attention_value_scale"}


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Sizes and rules of a drafter. `causal` and `window` have an entry for each layer."""

    version: int  # 1 | 2
    block: int  # rows of a block at most, its anchor included
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
    outer, inner = Reader(values, where), _inner(values, where)
    _check_keys(outer, inner)
    draft = _drafting(outer, inner)
    layers = outer.size("num_hidden_layers")
    types = _layer_types(outer, layers)
    block = draft.values.get("block_size", DEFAULT_BLOCK)
    capped = draft.values.get("final_logit_softcapping") is not None
    config = DFlashConfig(
        version=version,
        block=_whole(draft, "block_size", block, 2, MAX_BLOCK),
        mask_id=_whole(
            draft, "mask_token_id", draft.values.get("mask_token_id"), 0, target.vocabulary_size - 1
        ),
        target_layers=_target_layers(outer, draft, layers, target),
        causal=_causality(outer, inner, types),
        window=_windows(outer, types),
        width=outer.size("hidden_size"),
        heads=outer.size("num_attention_heads"),
        kv_heads=outer.size("num_key_value_heads"),
        head_dim=outer.size("head_dim"),
        feed_forward=outer.size("intermediate_size"),
        vocabulary_size=outer.size("vocab_size"),
        rope_theta=_rope_theta(outer),
        eps=outer.real("rms_norm_eps"),
        embedding_scale=draft.real("input_embedding_scale", 1.0),
        output_multiplier=draft.real("output_multiplier", 1.0),
        softcap=draft.real("final_logit_softcapping") if capped else None,
        target_sha256=_digest(outer),
        **(_selector_keys(draft) if version == 2 else {}),
    )
    _check_sizes(config, target, where)
    return config


def _inner(values: Mapping[str, Any], where: str) -> Reader:
    inner = values.get(INNER)
    if not isinstance(inner, dict):
        raise ModelFormatError(f"{where}: {INNER}", got=repr(inner)[:80], expected="an object")
    return Reader(inner, f"{where}: {INNER}")


def _check_keys(outer: Reader, inner: Reader) -> None:
    known = _USED | HARMLESS | _WITHOUT_EFFECT | _OFF
    for reader, allowed in ((outer, known | _EITHER), (inner, _EITHER | _INNER_OFF | {"causal"})):
        for key in reader.values:
            if key not in allowed:
                raise UnsupportedError(
                    f"{reader.where}: a key that is not understood",
                    got=repr(key[:80]),
                    hint=HINTS.get(key, ""),
                )
    off = {"sample_from_anchor"}
    for reader, keys in ((outer, off | _OFF | {"attention_bias"}), (inner, off | _INNER_OFF)):
        for key in sorted(keys & set(reader.values)):
            if reader.values[key] not in (None, False):
                got = repr(reader.values[key])[:80]
                raise UnsupportedError(f"{reader.where}: {key}", got=got, expected="false")
    if outer.values.get("model_type", "qwen3") != "qwen3":
        got = repr(outer.values["model_type"])[:80]
        raise UnsupportedError(f"{outer.where}: model_type", got=got, expected="'qwen3'")
    if outer.values.get("hidden_act", "silu") != "silu":
        got = repr(outer.values["hidden_act"])[:80]
        raise UnsupportedError(f"{outer.where}: hidden_act", got=got, expected="'silu'")


def _drafting(outer: Reader, inner: Reader) -> Reader:
    """The keys of _EITHER; ModelFormatError where the two places differ."""
    found: dict[str, Any] = {}
    for key in sorted(_EITHER):
        stated = [reader.values[key] for reader in (inner, outer) if reader.values.get(key) is not None]
        if len(stated) == 2 and stated[0] != stated[1]:
            got = repr(stated)[:80]
            raise ModelFormatError(f"{outer.where}: {key} is stated twice, differently", got=got)
        if stated:
            found[key] = stated[0]
    return Reader(found, inner.where)


def _whole(reader: Reader, key: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        got = "nothing" if value is None else repr(value)[:80]
        raise ModelFormatError(f"{reader.where}: {key}", got=got, expected=f"{low}..{high}")
    return value


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
    numbers = {reader.real("rope_theta") for reader in (outer, *found) if "rope_theta" in reader.values}
    if len(numbers) != 1:
        got = sorted(numbers) or "nothing"
        raise ModelFormatError(f"{outer.where}: rope_theta", got=got, expected="one positive number")
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


def _check_sizes(config: DFlashConfig, target: ModelConfig, where: str) -> None:
    """Errors for another target, and for sizes that contradict each other or the kernels."""
    for key, got, expected in (
        ("hidden_size", config.width, target.width),
        ("vocab_size", config.vocabulary_size, target.vocabulary_size),
    ):
        if got != expected:
            raise ModelFormatError(
                f"{where}: {key} is not the target's", got=got, expected=expected,
                hint="this drafter was made for another model",
            )  # fmt: skip
    if config.heads % config.kv_heads:
        got = f"{config.heads} and {config.kv_heads}"
        raise ModelFormatError(f"{where}: query heads that key heads cannot share", got=got)
    if any(window is not None and window < config.block for window in config.window):
        raise UnsupportedError(
            f"{where}: sliding_window",
            got=min(filter(None, config.window)),
            expected=f"the block of {config.block} at least",
        )
    if config.head_dim % 8:
        raise UnsupportedError(f"{where}: head_dim", got=config.head_dim, expected="a multiple of 8")
    if config.version == 2 and config.width % config.conv_group:
        raise ModelFormatError(
            f"{where}: conv_group_size", got=config.conv_group, expected=f"a divisor of {config.width}"
        )
    if config.top_k > target.vocabulary_size:
        raise ModelFormatError(
            f"{where}: selector_top_k", got=config.top_k, expected=f"at most {target.vocabulary_size} tokens"
        )
