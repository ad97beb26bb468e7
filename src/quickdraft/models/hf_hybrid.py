"""ModelConfig of a Qwen3.5 hybrid (Gated DeltaNet and gated attention layers) from config.json.

The released checkpoints nest the language model's keys in `text_config` beside a vision tower, which
is not read; text-only exports have them at the top. As strict as hf_config: every key is used, or
known not to change the numbers of text, or must have the one value that is implemented.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.models.config import ModelConfig, RecurrentLayers, check_heads
from quickdraft.models.config_reader import HARMLESS, HINTS, Reader

NESTED: Final = "qwen3_5"
TEXT: Final = "qwen3_5_text"
HYBRID_TYPES: Final = (NESTED, TEXT)
_CLASSES: Final = {NESTED: "Qwen3_5ForConditionalGeneration", TEXT: "Qwen3_5ForCausalLM"}
_OUTER: Final = {  # beside text_config; what belongs to images is not read
    "architectures", "image_token_id", "model_type", "quantization_config", "text_config",
    "tie_word_embeddings", "video_token_id", "vision_config", "vision_end_token_id", "vision_start_token_id",
}  # fmt: skip
_USED: Final = {
    "architectures", "full_attention_interval", "head_dim", "hidden_size", "intermediate_size", "layer_types",
    "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim",
    "max_position_embeddings", "model_type", "mtp_num_hidden_layers", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "partial_rotary_factor", "quantization_config",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings", "vocab_size",
}  # fmt: skip
_HARMLESS: Final = HARMLESS | {"chunk_size_feed_forward"}
_ONLY: Final[dict[str, tuple[Any, ...]]] = {  # other values are not implemented; absent means the first
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "hidden_act": ("silu",),
    "is_encoder_decoder": (False,),
    "linear_conv_kernel_dim": (4,),
    "mamba_ssm_dtype": ("float32",),
    "mtp_use_dedicated_embeddings": (False,),
    "output_gate_type": ("swish", "silu"),
}
_ROPE: Final = {
    "mrope_interleaved", "mrope_section", "partial_rotary_factor", "rope_theta", "rope_type", "type",
}  # fmt: skip
_WINDOW: Final = 3  # linear_conv_kernel_dim - 1


def hybrid_config(values: Mapping[str, Any], where: str) -> tuple[ModelConfig, bool]:
    """The config, and whether the head is the embedding. `values` is config.json, `where` its path."""
    outer = Reader(values, where)
    read = _text_part(outer)
    _check_keys(read)
    key_heads, value_heads = read.size("linear_num_key_heads"), read.size("linear_num_value_heads")
    indices = _recurrent_layers(read)
    if len(indices) == read.size("num_hidden_layers"):
        raise UnsupportedError(f"{read.where}: layer_types", got="no full_attention", expected="at least one")
    recurrent = RecurrentLayers(
        indices=indices,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=read.size("linear_key_head_dim"),
        value_dim=read.size("linear_value_head_dim"),
        window=_WINDOW,
    )
    head_dim = read.size("head_dim", 256)
    base, share = _rope(read)
    config = ModelConfig(
        architecture=NESTED,
        layers=read.size("num_hidden_layers"),
        width=read.size("hidden_size"),
        heads=read.size("num_attention_heads"),
        kv_heads=read.size("num_key_value_heads"),
        head_dim=head_dim,
        feed_forward=read.size("intermediate_size"),
        vocabulary_size=read.size("vocab_size"),
        context_length=read.size("max_position_embeddings"),
        rotary_dim=int(head_dim * share),
        rope_base=base,
        rope_style="half",
        norm_eps=read.real("rms_norm_eps"),
        head_norm=True,
        recurrent=recurrent if recurrent.indices else None,
        mtp_layers=_mtp_layers(read),
    )
    check_heads(config, where)
    _check_recurrent(recurrent, where)
    return config, _tied(outer, read)


def text_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the language model, wherever config.json has them; top-level ones win."""
    inner = values.get("text_config")
    return {**inner, **values} if isinstance(inner, dict) else values


def _text_part(outer: Reader) -> Reader:
    values, where = outer.values, outer.where
    kind = values["model_type"]
    if values.get("architectures") not in (None, [_CLASSES[kind]]):
        got = repr(values["architectures"])[:80]
        raise UnsupportedError(f"{where}: architectures", got=got, expected=f"[{_CLASSES[kind]!r}]")
    if kind == TEXT:
        return outer
    _refuse_strange(outer, _OUTER | _HARMLESS)
    inner = values.get("text_config")
    if not isinstance(inner, dict):
        raise ModelFormatError(f"{where}: text_config", got=repr(inner)[:80], expected="an object")
    if inner.get("model_type", TEXT) != TEXT:
        got = repr(inner["model_type"])[:80]
        raise UnsupportedError(f"{where}: text_config: model_type", got=got, expected=repr(TEXT))
    return Reader(inner, f"{where}: text_config")


def _refuse_strange(read: Reader, known: set[str]) -> None:
    for key in read.values:
        if key not in known:
            raise UnsupportedError(
                f"{read.where}: a key that is not understood", got=repr(key[:80]), hint=HINTS.get(key, "")
            )


def _check_keys(read: Reader) -> None:
    _refuse_strange(read, _USED | _HARMLESS | set(_ONLY))
    for key, allowed in _ONLY.items():
        value = read.values.get(key)
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            expected = " or ".join(map(repr, allowed))
            raise UnsupportedError(f"{read.where}: {key}", got=repr(value)[:80], expected=expected)


def _recurrent_layers(read: Reader) -> tuple[int, ...]:
    """Indices of linear_attention layers; both ways to say it must agree where both are there."""
    layers, types = read.size("num_hidden_layers"), read.values.get("layer_types")
    interval = read.size("full_attention_interval", 4)
    derived = tuple(i for i in range(layers) if (i + 1) % interval)
    if types is None:
        return derived
    known = ("linear_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise ModelFormatError(
            f"{read.where}: layer_types", got=repr(types)[:80],
            expected=f"{layers} of {known[0]} and {known[1]}",
        )  # fmt: skip
    stated = tuple(index for index, kind in enumerate(types) if kind == known[0])
    if read.values.get("full_attention_interval") is not None and stated != derived:
        raise ModelFormatError(f"{read.where}: layer_types and full_attention_interval contradict each other")
    return stated


def _rope(read: Reader) -> tuple[float, float]:
    """Base, and the share of a head that turns. Text has one position for all three axes of mrope, so
    its sections change nothing."""
    where, values = read.where, read.values
    given = [key for key in ("rope_parameters", "rope_scaling") if values.get(key) is not None]
    if len(given) == 2:
        raise UnsupportedError(f"{where}: both rope_scaling and rope_parameters", expected="one of them")
    inner = values[given[0]] if given else {}
    if not isinstance(inner, dict):
        raise ModelFormatError(f"{where}: {given[0]}", got=repr(inner)[:80], expected="an object")
    rope = Reader(inner, f"{where}: {given[0]}" if given else where)
    _refuse_strange(rope, _ROPE)
    for key in ("rope_type", "type"):
        if inner.get(key, "default") not in ("default", "mrope"):
            raise UnsupportedError(
                f"{rope.where}: {key}", got=repr(inner[key])[:80], expected="default",
                hint="this kind of rope scaling is not supported",
            )  # fmt: skip
    found = []
    for key, default in (("rope_theta", None), ("partial_rotary_factor", 0.25)):
        value = rope.real(key, read.real(key, default) if key in values or default else None)
        if read.real(key, value) != value:
            raise ModelFormatError(f"{where}: {key} is stated twice, differently", got=values[key])
        found.append(value)
    base, share = found
    if share > 1.0:
        raise ModelFormatError(f"{where}: partial_rotary_factor", got=share, expected="at most 1")
    return base, share


def _mtp_layers(read: Reader) -> int:
    value = read.values.get("mtp_num_hidden_layers")
    return 0 if value in (None, 0) and value is not False else read.size("mtp_num_hidden_layers")


def _tied(outer: Reader, read: Reader) -> bool:
    tied = read.flag("tie_word_embeddings", outer.flag("tie_word_embeddings"))
    if outer.flag("tie_word_embeddings", tied) != tied:
        raise ModelFormatError(f"{outer.where}: tie_word_embeddings is stated twice, differently")
    return tied


def _check_recurrent(recurrent: RecurrentLayers, where: str) -> None:
    if recurrent.value_heads % recurrent.key_heads:
        raise ModelFormatError(
            f"{where}: value heads that key heads cannot share",
            got=f"{recurrent.value_heads} and {recurrent.key_heads}", expected="a multiple",
        )  # fmt: skip
    for name, size in (
        ("linear_key_head_dim", recurrent.key_dim),
        ("linear_value_head_dim", recurrent.value_dim),
    ):
        if size % 8:
            raise UnsupportedError(f"{where}: {name}", got=size, expected="a multiple of 8")
