"""DrafterForm: everything about a drafter that its weights need beside them, for training and for export.

It is written beside a checkpoint (recipe.json) and becomes config.json of the exported folder. Knows
no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from quickdraft.errors import ConfigError
from quickdraft.models.config import ModelConfig

RECIPE: Final = "recipe.json"
KINDS: Final = ("mtp", "dflash2")
MTP, DFLASH2 = KINDS
DEFAULT_BLOCK: Final = 8
DEFAULT_WINDOW: Final = 512
DEFAULT_LAYERS: Final = 2
TAPS: Final = 3
CONV_GROUP: Final = 16
RANK: Final = 64
TOP_K: Final = 16


@dataclass(frozen=True, slots=True)
class DrafterForm:
    """Sizes and rules of a drafter; those below `layers` are of DFlash2 alone."""

    kind: str
    target_sha256: str  # of the target's weight file
    target_layers: int
    vocabulary_size: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    theta: float
    eps: float
    layers: int = 1
    taps: tuple[int, ...] = ()  # layers of the target whose residual stream is read
    block: int = 0
    lengths: tuple[int, ...] = ()  # rows of blocks it is trained with; empty: `block` alone
    window: int = 0
    mask_id: int = 0
    conv_group: int = 0
    rank: int = 0
    top_k: int = TOP_K

    @classmethod
    def of(cls, kind: str, target: ModelConfig, sha256: str, **own: Any) -> Self:
        """A drafter with the target's own heads and sizes; `own` replaces what it names. ConfigError for a
        kind that is none, or a target that cannot have one."""
        if kind not in KINDS:
            raise ConfigError("a drafter of an unknown kind", got=repr(kind), expected=" or ".join(KINDS))
        if target.recurrent is not None:
            raise ConfigError(
                "a drafter for a model with recurrent layers",
                got=target.architecture,
                expected="a dense target",
            )
        values: dict[str, Any] = {
            "kind": kind, "target_sha256": sha256, "target_layers": target.layers,
            "vocabulary_size": target.vocabulary_size, "width": target.width,
            "feed_forward": target.feed_forward, "heads": target.heads, "kv_heads": target.kv_heads,
            "head_dim": target.head_dim, "theta": target.rope_base, "eps": target.norm_eps,
        }  # fmt: skip
        if kind == DFLASH2:
            values |= {
                "layers": DEFAULT_LAYERS, "taps": spread_taps(target.layers), "block": DEFAULT_BLOCK,
                "window": DEFAULT_WINDOW, "conv_group": CONV_GROUP, "rank": RANK,
            }  # fmt: skip
        return cls(**{**values, **own})

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "taps": list(self.taps), "lengths": list(self.lengths)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str) -> Self:
        """ConfigError names the file where it is not what `to_json` gave."""
        try:
            lists = {"taps": tuple(values["taps"]), "lengths": tuple(values.get("lengths", ()))}
            return cls(**{**values, **lists})
        except (TypeError, KeyError) as error:
            raise ConfigError(f"{where}: not the form of a drafter", got=str(error)) from error

    @classmethod
    def from_config(cls, values: Mapping[str, Any], target: ModelConfig, sha256: str) -> Self:
        """Of a folder that `config` was written to. ConfigError for one of another form."""
        inner, mtp = values.get("dflash_config", {}), "MTP" in values["architectures"][0]
        sizes = {
            "feed_forward": "intermediate_size", "heads": "num_attention_heads",
            "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "eps": "rms_norm_eps",
            "theta": "rope_theta",
        }  # fmt: skip
        try:
            own = {name: values[key] for name, key in sizes.items()}
            if not mtp:
                own |= {
                    "layers": values["num_hidden_layers"], "window": values["sliding_window"],
                    "block": inner["block_size"],
                    "lengths": tuple(inner.get("block_lengths", ())), "mask_id": inner["mask_token_id"],
                    "taps": tuple(inner["target_layer_ids"]), "conv_group": inner["conv_group_size"],
                    "rank": inner["selector_rank"], "top_k": inner["selector_top_k"],
                }  # fmt: skip
        except KeyError as error:
            raise ConfigError("a drafter of another form than training makes", got=f"no {error}") from error
        form = cls.of(MTP if mtp else DFLASH2, target, sha256, **own)
        for key, value in form.config().items():
            if values.get(key) != value and key != "target_sha256":
                raise ConfigError(
                    f"a drafter of another form than training makes: {key}",
                    got=values.get(key),
                    expected=value,
                )
        return form

    def config(self) -> dict[str, Any]:
        """config.json of a drafter folder (docs/reference/drafter-folder.md), but for its training note."""
        values: dict[str, Any] = {
            "architectures": ["LlamaMTP" if self.kind == MTP else "DFlash2DraftModel"],
            "target_sha256": self.target_sha256,
            "vocab_size": self.vocabulary_size, "hidden_size": self.width,
            "intermediate_size": self.feed_forward, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "rms_norm_eps": self.eps, "rope_theta": self.theta,
        }  # fmt: skip
        if self.kind == MTP:
            return values | {"norm_offset": 0, "attention_gate": False, "qk_norm": True}
        lengths = {"block_lengths": sorted({*self.lengths, self.block})} if self.lengths else {}
        return values | {
            "model_type": "qwen3", "num_target_layers": self.target_layers,
            "layer_types": ["sliding_attention"] * self.layers, "sliding_window": self.window,
            "is_causal": False,
            "dflash_config": {
                "block_size": self.block, "mask_token_id": self.mask_id, "target_layer_ids": list(self.taps),
                "conv_group_size": self.conv_group, "conv_kernel_size": 2, "selector_rank": self.rank,
                "selector_top_k": self.top_k, **lengths,
            },
        }  # fmt: skip


def spread_taps(layers: int) -> tuple[int, ...]:
    """Three layers spread evenly from the second to the third from the end (fewer where there are few)."""
    last = max(1, layers - 3)
    return tuple(dict.fromkeys(round(1 + i * (last - 1) / (TAPS - 1)) for i in range(TAPS)))


def form_of_weights(
    weights: Mapping[str, tuple[int, ...]], target: ModelConfig, sha256: str, **own: Any
) -> DrafterForm:
    """The form of a checkpoint that says none, from its tensors' shapes by name; `own` is what shapes do
    not tell. ConfigError where they are no drafter's."""
    try:
        if "mtp.fc.weight" in weights:
            ff = weights["mtp.layers.0.mlp.gate_proj.weight"][0]
            return DrafterForm.of(MTP, target, sha256, feed_forward=ff)
        first, width = "layers.0.", target.width
        dim = weights[f"{first}self_attn.q_norm.weight"][0]
        sizes = {
            "feed_forward": weights[f"{first}mlp.gate_proj.weight"][0], "head_dim": dim,
            "heads": weights[f"{first}self_attn.q_proj.weight"][0] // dim,
            "kv_heads": weights[f"{first}self_attn.k_proj.weight"][0] // dim,
            "layers": sum(name.endswith(".input_layernorm.weight") for name in weights),
            "conv_group": 4 * width // weights[f"{first}attention_conv.kernel_projection.weight"][0],
            "rank": weights["candidate_selector.hidden_projection.weight"][0],
        }  # fmt: skip
        form = DrafterForm.of(DFLASH2, target, sha256, **{**sizes, **own})
        taps = weights["fc.weight"][1] // width
    except KeyError as error:
        raise ConfigError("the checkpoint is of no drafter", got=f"no tensor {error}") from error
    if len(form.taps) != taps:
        raise ConfigError("a checkpoint of other taps", got=taps, expected=f"{len(form.taps)} layers")
    return form


def read_recipe(folder: Path) -> dict[str, Any] | None:
    """recipe.json of a training folder, None where there is none. ConfigError where it is damaged."""
    path = folder / RECIPE
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text())
        if not isinstance(values, dict) or not isinstance(values.get("form"), dict):
            raise ValueError("no form")
    except ValueError as error:
        raise ConfigError(f"{path} is not a recipe", got=str(error)) from error
    return values
