"""ModelConfig from a Hugging Face folder's config.json, strictly.

Every key is used, or known not to change the numbers, or must have the value that means "off";
any other key is an error that names it. Defaults are those of transformers for the architecture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.models.config import ModelConfig, check_heads
from quickdraft.models.config_reader import HARMLESS, HINTS, Reader
from quickdraft.models.hf_hybrid import HYBRID_TYPES, hybrid_config

_CLASSES: Final = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_USED: Final = {
    "architectures", "attention_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
    "layer_types", "max_position_embeddings", "model_type", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "partial_rotary_factor", "quantization_config", "rms_norm_eps",
    "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings", "vocab_size",
}  # fmt: skip
_OFF: Final = {  # understood only when false
    "add_cross_attention", "is_encoder_decoder", "mlp_bias", "rope_interleaved", "use_mrope",
    "use_sliding_window",
}  # fmt: skip
_LLAMA3_KEYS: Final = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def config_from_folder(values: Mapping[str, Any], where: str) -> tuple[ModelConfig, bool]:
    """The config, and whether the head is the embedding. `values` is config.json, `where` its path."""
    kind = values.get("model_type")
    if kind in HYBRID_TYPES:
        return hybrid_config(values, where)
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise UnsupportedError(
            f"{where}: unknown architecture: model_type", got=repr(kind)[:80],
            expected=" or ".join((*_CLASSES, *HYBRID_TYPES)),
        )  # fmt: skip
    read = Reader(values, where)
    _check_keys(read, kind)
    heads, width = read.size("num_attention_heads"), read.size("hidden_size")
    head_dim = read.size("head_dim", 128 if kind == "qwen3" else width // heads)
    config = ModelConfig(
        architecture=kind,
        layers=read.size("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=read.size("num_key_value_heads", heads if kind == "llama" else None),
        head_dim=head_dim,
        feed_forward=read.size("intermediate_size"),
        vocabulary_size=read.size("vocab_size"),
        context_length=read.size("max_position_embeddings"),
        rotary_dim=head_dim,
        rope_base=10000.0,
        rope_style="half",
        norm_eps=read.real("rms_norm_eps"),
        qkv_bias=kind == "qwen2",
        head_norm=kind == "qwen3",
    )
    check_heads(config, where)
    return _with_rope(config, read), read.flag("tie_word_embeddings")


def _check_keys(read: Reader, kind: str) -> None:
    values, where = read.values, read.where
    for key in values:
        if key not in _USED | HARMLESS | _OFF:
            raise UnsupportedError(
                f"{where}: a key that is not understood", got=repr(key[:80]), hint=HINTS.get(key, "")
            )
    for key in sorted(_OFF & set(values)):
        if values[key] not in (None, False):
            raise UnsupportedError(f"{where}: {key}", got=repr(values[key])[:80], expected="false")
    if values.get("architectures") not in (None, [_CLASSES[kind]]):
        got = repr(values["architectures"])[:80]
        raise UnsupportedError(f"{where}: architectures", got=got, expected=f"[{_CLASSES[kind]!r}]")
    # transformers gives q, k and v of qwen2 a bias whatever the key says
    if read.flag("attention_bias", kind == "qwen2") != (kind == "qwen2"):
        raise UnsupportedError(f"{where}: attention_bias", got=values["attention_bias"])
    if kind == "llama" and values.get("sliding_window") is not None:
        raise UnsupportedError(f"{where}: sliding_window", got=repr(values["sliding_window"])[:80])
    layers = values.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or set(map(str, layers)) - {"full_attention"}):
        raise UnsupportedError(f"{where}: layer_types", got=repr(layers)[:80], expected="full_attention only")
    if values.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"{where}: hidden_act", got=repr(values["hidden_act"])[:80], expected="'silu'")


def _with_rope(config: ModelConfig, read: Reader) -> ModelConfig:
    """Rope base and factors; both the older keys (rope_theta, rope_scaling) and rope_parameters."""
    where, outer = read.where, read.values
    given = [key for key in ("rope_scaling", "rope_parameters") if outer.get(key) is not None]
    if len(given) == 2:
        raise UnsupportedError(f"{where}: both rope_scaling and rope_parameters", expected="one of them")
    name = given[0] if given else "rope_scaling"
    inner = outer[name] if given else {}
    if not isinstance(inner, dict):
        raise ModelFormatError(f"{where}: {name}", got=repr(inner)[:80], expected="an object")
    rope = Reader(inner, f"{where}: {name}")
    rope_type = inner.get("rope_type", inner.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise UnsupportedError(
            f"{where}: {name}.rope_type", got=repr(rope_type)[:80], expected="default or llama3",
            hint="this kind of rope scaling is not supported",
        )  # fmt: skip
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    strange = set(inner) - known - (set(_LLAMA3_KEYS) if rope_type == "llama3" else set())
    if strange:
        raise UnsupportedError(f"{where}: {name}: a key that is not understood", got=repr(min(strange)[:80]))
    for reader in (read, rope):
        if reader.real("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedError(f"{reader.where}: partial_rotary_factor", expected=1.0)
    base = rope.real("rope_theta", read.real("rope_theta", 10000.0))
    if read.real("rope_theta", base) != base:
        raise ModelFormatError(f"{where}: rope_theta is stated twice, differently", got=outer["rope_theta"])
    config = replace(config, rope_base=base)
    if rope_type == "default":
        return config
    factor, low, high, trained = (rope.real(key) for key in _LLAMA3_KEYS)
    if low >= high:
        raise ModelFormatError(f"{where}: {name}.low_freq_factor", got=low, expected=f"below {high}")
    return replace(config, rope_factors=_llama3_factors(config, factor, low, high, trained))


def _llama3_factors(
    config: ModelConfig, factor: float, low: float, high: float, trained: float
) -> tuple[float, ...]:
    """What Llama 3.1 divides each frequency by (transformers, _compute_llama3_parameters).

    Waves longer than trained / low are stretched by `factor`, those shorter than trained / high stay,
    and between the two the frequency is interpolated.
    """
    factors = []
    for i in range(0, config.rotary_dim, 2):
        turns = trained * config.rope_base ** (-i / config.rotary_dim) / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1.0 / ((1.0 - share) / factor + share))
    return tuple(factors)
