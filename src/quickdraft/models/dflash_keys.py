"""Which keys config.json of a DFlash drafter may have, and where: each is used, without effect, or off.

Knows names and places only; what the keys mean, dflash_config says.
"""

from __future__ import annotations

from typing import Any, Final

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.models.config_reader import HARMLESS, HINTS, Reader

INNER: Final = "dflash_config"
_USED: Final = {
    "architectures", "attention_bias", INNER, "head_dim", "hidden_act", "hidden_size", "intermediate_size",
    "is_causal", "layer_types", "model_type", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "num_target_layers", "quantization_config", "rms_norm_eps", "rope_parameters",
    "rope_scaling", "rope_theta", "sliding_window", "target_sha256", "training",
    "use_sliding_window", "vocab_size",
}  # fmt: skip
_WITHOUT_EFFECT: Final = {"max_position_embeddings", "tie_word_embeddings"}  # the drafter has no embedding
_OFF: Final = {"mlp_bias", "is_encoder_decoder", "add_cross_attention"}  # understood only when false
# stated in dflash_config or, as in older files, at the top level
_EITHER: Final = {
    "block_lengths", "block_size", "conv_group_size", "conv_kernel_size", "final_logit_softcapping",
    "input_embedding_scale", "mask_token_id", "output_multiplier", "sample_from_anchor", "selector_rank",
    "selector_top_k",
    "target_layer_ids",
}  # fmt: skip
_INNER_OFF: Final = {"use_swa", "swa_window_size", "attention_sink_bias", "attention_value_scale"}


def dflash_keys(outer: Reader) -> tuple[Reader, Reader]:
    """(the keys of dflash_config, those of _EITHER wherever they are); errors name a key that is not
    understood, has a value nothing here can do, or is stated twice, differently."""
    inner = _inner(outer)
    _check_keys(outer, inner)
    return inner, _drafting(outer, inner)


def _inner(outer: Reader) -> Reader:
    inner, where = outer.values.get(INNER), outer.where
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
