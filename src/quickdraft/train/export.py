"""Export: a checkpoint of training to a drafter folder that serving loads (docs/reference/drafter-folder.md).

Linears in 4, 8, 16 or 32 bits; norms, convolutions, the dynamic kernels' projection and the selector's are
never below 16. Tables of the selector are expanded to the ids a loader looks up. Knows no torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from quickdraft.errors import ConfigError
from quickdraft.models.draft_vocab import DraftVocab
from quickdraft.models.loading.folder import CONFIG, SINGLE
from quickdraft.train.form import DrafterForm
from quickdraft.train.packing import GROUP, quantised_linear, quantised_rows

Array = NDArray[Any]
BITS: Final = (4, 8, 16, 32)
DRAFT_VOCAB: Final = "draft_vocab.json"
PREFIX: Final = "weights."
_QUANTISED: Final = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_BOOKS: Final = ("predecessor_codebook", "successor_codebook")


def checkpoint_weights(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """(float32 weights by name, what the checkpoint says about itself). ConfigError names the file."""
    try:
        with safe_open(path, "numpy") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
            names = [name for name in file.keys() if name.startswith(PREFIX)]  # noqa: SIM118
            weights = {name.removeprefix(PREFIX): file.get_tensor(name) for name in names}
    except Exception as error:  # safetensors has an exception of its own, and OSErrors
        raise ConfigError(f"cannot read the checkpoint {path}", got=str(error)) from error
    if not weights:
        raise ConfigError(f"{path} is no checkpoint of training", expected="tensors weights.*")
    if broken := [name for name, value in weights.items() if not np.isfinite(value).all()]:
        raise ConfigError(
            f"{path}: weights that are not finite", got=broken[0], hint="train at a lower --rate"
        )
    return weights, about


def export(
    weights: Mapping[str, Array], form: DrafterForm, vocab: DraftVocab, out: Path, bits: int,
    training: Mapping[str, Any],
) -> int:  # fmt: skip
    """Write the folder `out` anew; bytes of it. `training` is noted in config.json and read by nobody."""
    if bits not in BITS:
        raise ConfigError("bad value for --bits", got=bits, expected=", ".join(map(str, BITS)))
    if vocab.vocabulary_size != form.vocabulary_size:
        raise ConfigError(
            "a draft vocabulary of another model", got=vocab.vocabulary_size, expected=form.vocabulary_size
        )
    tensors: dict[str, Array] = {}
    for name, value in weights.items():
        tensors |= _stored(name, value, form, vocab, bits)
    config = form.config() | {"dtype": "float32" if bits == 32 else "float16", "training": dict(training)}
    if bits < 16:
        config["quantization_config"] = _quantisation(bits, weights)
    new = out.with_name(out.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    (new / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, new / SINGLE)
    (new / SINGLE).chmod((new / CONFIG).stat().st_mode & 0o777)  # safetensors makes it the owner's alone
    vocab.save(new / DRAFT_VOCAB)
    if out.exists():
        if not (out / CONFIG).exists() and any(out.iterdir()):
            raise ConfigError("a folder that is no drafter's", got=str(out), expected="a new folder")
        shutil.rmtree(out)
    new.rename(out)
    return sum(path.stat().st_size for path in out.iterdir())


def _stored(name: str, value: Array, form: DrafterForm, vocab: DraftVocab, bits: int) -> dict[str, Array]:
    plain = np.dtype(np.float32 if bits == 32 else np.float16)
    if name.rpartition(".")[2] in _BOOKS:
        value = _book_rows(name, value, form, vocab)
        if bits >= 16:
            return {name: _plain(name, value, plain)}
        codes, scales = quantised_rows(value)
        return {name: codes, f"{name}_scale": scales}
    if bits < 16 and _is_quantised(name):
        module = name.removesuffix(".weight")
        return {f"{module}.{part}": tensor for part, tensor in quantised_linear(value, bits).items()}
    return {name: _plain(name, value, plain)}


def _plain(name: str, value: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):
        stored = np.ascontiguousarray(value.astype(dtype))
    if not np.isfinite(stored).all():
        raise ConfigError(f"{name} does not fit {dtype}", got=float(np.abs(value).max()))
    return stored


def _book_rows(name: str, table: Array, form: DrafterForm, vocab: DraftVocab) -> Array:
    """In training a table has a row per id of the vocabulary and one for all others."""
    if len(table) != len(vocab) + 1:
        raise ConfigError(
            f"{name} is of another draft vocabulary", got=f"{len(table) - 1} ids", expected=f"{len(vocab)}"
        )
    if name.endswith(_BOOKS[1]):
        return table[:-1]
    place = np.full(form.vocabulary_size, len(vocab))
    place[vocab.ids] = np.arange(len(vocab))
    every: Array = table[place]
    return every


def _is_quantised(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in _QUANTISED


def _quantisation(bits: int, weights: Mapping[str, Array]) -> dict[str, Any]:
    left = [
        name.removesuffix(".weight")
        for name, value in weights.items()
        if value.ndim == 2 and name.endswith(".weight") and not _is_quantised(name)
    ]
    scheme = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": left,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
    }  # fmt: skip
