"""load_mtp_folder: an MTP module trained for a target that has none of its own, from its own folder.

The folder holds config.json (docs/reference/drafter-folder.md) and the mtp.* tensors of a Qwen3.5 checkpoint,
in 16 or 32 bits or quantised by compressed-tensors. Heads and width must be the target's, whose KV
cache, embedding, head and rope table it shares; rope turns halves of its heads, whatever the target's
file does. Everything that does not fit is an error here, before anything runs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.models.config import ModelConfig
from quickdraft.models.config_reader import HARMLESS, Reader
from quickdraft.models.digest import weight_digests
from quickdraft.models.interface import LoadedModel
from quickdraft.models.loading.folder import CONFIG, ModelFolder
from quickdraft.models.loading.inventory import Inventory
from quickdraft.models.mtp import MTPForm, MTPModule
from quickdraft.ops.interface import Ops

ARCHITECTURE: Final = "LlamaMTP"
TARGET_KEY: Final = "target_sha256"
_USED: Final = {
    "architectures", "attention_gate", "head_dim", "hidden_size", "intermediate_size", "model_type",
    "norm_offset", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "qk_norm",
    "quantization_config", "rms_norm_eps", "rope_theta", TARGET_KEY, "training", "vocab_size",
}  # fmt: skip


def load_mtp_folder(path: Path, target: LoadedModel, ops: Ops) -> MTPModule:
    """The module in folder `path`, over a target that was loaded with `mtp_folder`.

    ModelFormatError, UnsupportedError or ConfigError says what does not fit the target or is missing.
    """
    folder = ModelFolder(path)
    config, form = _config(folder, target.model.config)
    _check_target(folder, target)
    folder.check_quantisation()
    inventory = Inventory(folder)
    module = MTPModule(config, inventory, ops, target.model.parts, form)
    inventory.finish()
    module.files = folder.files
    return module


def _config(folder: ModelFolder, target: ModelConfig) -> tuple[ModelConfig, MTPForm]:
    """The target's config with what is the module's own, and the module's form."""
    values, where = folder.config, str(folder.path / CONFIG)
    read = Reader(values, where)
    if values.get("architectures") != [ARCHITECTURE]:
        got = repr(values.get("architectures"))[:80]
        raise UnsupportedError(f"{where}: architectures", got=got, expected=f"[{ARCHITECTURE!r}]")
    if strange := sorted(set(values) - _USED - HARMLESS):
        raise UnsupportedError(f"{where}: a key that is not understood", got=repr(strange[0][:80]))
    for key, own in (
        ("hidden_size", target.width), ("vocab_size", target.vocabulary_size),
        ("num_attention_heads", target.heads), ("num_key_value_heads", target.kv_heads),
        ("head_dim", target.head_dim), ("num_hidden_layers", 1),
    ):  # fmt: skip
        found = read.size(key, own if key == "num_hidden_layers" else None)
        if found != own:
            what = own if key == "num_hidden_layers" else f"{own}, as the target has"
            raise ModelFormatError(f"{where}: {key}", got=found, expected=what)
    if read.real("rope_theta", target.rope_base) != target.rope_base:
        raise ModelFormatError(
            f"{where}: rope_theta",
            got=values["rope_theta"],
            expected=f"{target.rope_base}, as the target has",
        )
    offset = values.get("norm_offset", 0)
    if type(offset) is not int or offset not in (0, 1):
        raise ModelFormatError(f"{where}: norm_offset", got=repr(offset)[:80], expected="0 or 1")
    form = MTPForm(offset, read.flag("attention_gate"), read.flag("qk_norm", True))
    own_sizes: dict[str, Any] = {
        "feed_forward": read.size("intermediate_size"),
        "norm_eps": read.real("rms_norm_eps", target.norm_eps),
    }
    return replace(target, rope_style="half", **own_sizes), form


def _check_target(folder: ModelFolder, target: LoadedModel) -> None:
    """The folder may name the file it was made for: by the digest of the GGUF file, or of one of the weight
    files of a folder."""
    wanted = folder.config.get(TARGET_KEY)
    if wanted is None:
        return
    where = folder.path / CONFIG
    if not isinstance(wanted, str) or len(wanted) != 64:
        raise ModelFormatError(f"{where}: {TARGET_KEY}", got=repr(wanted)[:80], expected="64 hex digits")
    found = weight_digests(target.files)
    if wanted.lower() not in found:
        raise ModelFormatError(
            f"{where}: this drafter was made for another target", got=f"{target.tensors.path} ({found[0]})",
            expected=wanted,
        )  # fmt: skip
