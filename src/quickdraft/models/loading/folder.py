"""A Hugging Face model folder: config.json and safetensors files, as one inventory.TensorFile.

Tensors are known by their GGUF names, so that a model is written once; messages use the folder's
own names. The index of a sharded model must say exactly what the shards hold. Weights that are
Python pickles are refused by name: reading one runs its code. Knows neither tokenizers nor models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.models.loading.gguf import TensorInfo
from quickdraft.models.loading.safetensors import SafetensorsFile
from quickdraft.models.loading.strict_files import is_there, read_object
from quickdraft.ops.weights import Weight

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"
_SHARD: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}\.safetensors")
_PICKLES: Final = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_WHOLE: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER: Final = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    # GGUF has other names and other conventions for these (models/qwen3_5.py reads them as they are here)
    "linear_attn.in_proj_qkv": "linear_attn_qkv", "linear_attn.in_proj_z": "linear_attn_z",
    "linear_attn.in_proj_b": "linear_attn_b", "linear_attn.in_proj_a": "linear_attn_a",
    "linear_attn.conv1d": "linear_attn_conv", "linear_attn.norm": "linear_attn_norm",
    "linear_attn.out_proj": "linear_attn_output",
}  # fmt: skip
_BARE: Final = {"linear_attn.A_log": "linear_attn_a_log", "linear_attn.dt_bias": "linear_attn_dt_bias"}
_NESTED: Final = "model.language_model."  # instead of "model." where the model is a part of a larger one
_SKIPPED: Final = ("model.visual.",)  # a vision tower: not needed for text
MTP: Final = "mtp."  # a multi-token-prediction module: keeps its names
_LAYER_BACK: Final = {ours: theirs for theirs, ours in (_LAYER | _BARE).items()}
_WHOLE_BACK: Final = {ours: theirs for theirs, ours in _WHOLE.items()}


def gguf_name(name: str) -> str | None:
    """The GGUF name of a tensor of a folder; None for one that no model here has."""
    if name.startswith(MTP):
        return name
    if name.startswith(_NESTED):
        name = "model." + name.removeprefix(_NESTED)
    match = re.fullmatch(r"model\.layers\.(0|[1-9]\d{0,7})\.([A-Za-z0-9_.]+)", name, re.ASCII)
    if match is None:
        return _WHOLE.get(name)
    module, _, kind = match[2].rpartition(".")
    if match[2] in _BARE:
        return f"blk.{match[1]}.{_BARE[match[2]]}"
    part = _LAYER.get(module) if kind in ("weight", "bias") else None
    return None if part is None else f"blk.{match[1]}.{part}.{kind}"


class ModelFolder:
    """inventory.TensorFile over all weights of a folder; `config` is config.json as it stands."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_object(path / CONFIG)
        shards = list(self._shards())
        self.files = (path / CONFIG, *(shard.path for shard in shards))
        self.tensors: dict[str, TensorInfo] = {}
        self._homes: dict[str, tuple[SafetensorsFile, str]] = {}
        for shard in shards:
            for name, info in shard.tensors.items():
                if name.endswith(".rotary_emb.inv_freq"):  # old files store what config.json determines
                    continue
                if name.startswith(_SKIPPED):
                    continue
                ours = gguf_name(name) or f"unknown:{name}"  # a GGUF name is not the folder's own
                if ours in self.tensors:
                    raise ModelFormatError(
                        f"{shard.path}: tensor {name} is in another file of the folder too"
                    )
                self.tensors[ours] = replace(info, name=ours)
                self._homes[ours] = shard, name

    @property
    def tensor_bytes(self) -> int:
        return sum(info.bytes for info in self.tensors.values())

    def called(self, name: str) -> str:
        """See inventory.TensorFile."""
        if name in self._homes:
            return self._homes[name][1]
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)(\.weight|\.bias|)", name)
        if match is None or match[2] not in _LAYER_BACK:
            theirs = _WHOLE_BACK.get(name, name)
        else:
            theirs = f"model.layers.{match[1]}.{_LAYER_BACK[match[2]]}{match[3]}"
        nested = any(home.startswith(_NESTED) for _, home in self._homes.values())
        return _NESTED + theirs.removeprefix("model.") if nested and theirs.startswith("model.") else theirs

    def vector(self, name: str) -> NDArray[np.float32]:
        """A small tensor as float32, in its shape."""
        shard, theirs = self._homes[name]
        return shard.vector(theirs)

    def matrix(self, name: str) -> Weight:
        """A two-dimensional tensor [N, K] as a weight value."""
        shard, theirs = self._homes[name]
        return shard.matrix(theirs)

    def check_embedding(self, rows: int) -> None:
        """ModelFormatError unless the embedding has as many rows as config.json has tokens; whatever is
        made for each token can rely on the file's own size then."""
        info = self.tensors.get("token_embd.weight")
        if info is None or info.shape[:1] != (rows,):
            self._fail(
                f"tensor {self.called('token_embd.weight')}",
                got="nothing" if info is None else f"shape {info.shape}",
                expected=f"{rows} rows, as vocab_size in {CONFIG} says",
            )

    def check_head(self, tied: bool) -> None:
        """Make the tensors agree with tie_word_embeddings: drop a head that repeats the embedding,
        refuse one that does not, or none where the head is a tensor of its own."""
        if not tied and "output.weight" not in self.tensors:
            self._fail("tensor lm_head.weight is missing", hint="config.json says it is not the embedding")
        if tied and "output.weight" in self.tensors:
            embedding = self.tensors.get("token_embd.weight")
            if embedding is None or not self._same("token_embd.weight", "output.weight"):
                self._fail(
                    "tensor lm_head.weight differs from the embedding",
                    expected="the same values, as tie_word_embeddings is true",
                )
            del self.tensors["output.weight"]

    def _same(self, one: str, other: str) -> bool:
        first, second = (self._homes[name] for name in (one, other))
        return bool(np.array_equal(first[0].values(first[1]), second[0].values(second[1])))

    def _shards(self) -> Iterator[SafetensorsFile]:
        if is_there(self.path / SINGLE):
            yield SafetensorsFile(self.path / SINGLE)
        elif is_there(self.path / INDEX):
            yield from self._indexed()
        else:
            self._refuse_other_weights()

    def _indexed(self) -> Iterator[SafetensorsFile]:
        index = self.path / INDEX
        values = read_object(index)
        homes = values.get("weight_map")
        if not isinstance(homes, dict) or not homes:
            raise ModelFormatError(f"{index}: weight_map", expected="an object of tensor names to file names")
        by_file: dict[str, set[str]] = {}
        for tensor, name in homes.items():
            if not isinstance(name, str) or not _SHARD.fullmatch(name):
                raise ModelFormatError(
                    f"{index}: weight_map of {tensor[:200]!r}", got=repr(name)[:200],
                    expected="the plain name of a .safetensors file in the folder",
                )  # fmt: skip
            by_file.setdefault(name, set()).add(tensor)
        shards = {name: SafetensorsFile(self.path / name) for name in sorted(by_file)}
        for name, shard in shards.items():
            tensors = by_file[name]
            strange = tensors ^ set(shard.tensors)
            if strange:
                raise ModelFormatError(
                    f"{shard.path}: the tensors are not those {INDEX} names for this file",
                    got=", ".join(sorted(strange)[:5]),
                )
            yield shard

    def _refuse_other_weights(self) -> NoReturn:
        try:
            names = sorted(entry.name for entry in self.path.iterdir())
        except OSError as error:
            raise ModelFormatError(f"{self.path}: cannot be listed", got=error.strerror) from error
        pickles = [name for name in names if name.endswith(_PICKLES)]
        if pickles:
            raise UnsupportedError(
                f"{self.path / pickles[0]}: weights in a Python pickle are not read",
                expected=f"{SINGLE} or {INDEX}", hint="pickles are programs; save the model with safetensors",
            )  # fmt: skip
        ggufs = [name for name in names if name.endswith(".gguf")]
        hint = f"name the GGUF file itself: {self.path / ggufs[0]}" if ggufs else ""
        self._fail("no weights", expected=f"{SINGLE} or {INDEX}", hint=hint)

    def _fail(self, what: str, **details: Any) -> NoReturn:
        raise ModelFormatError(f"{self.path}: {what}", **details)
