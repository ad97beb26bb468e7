"""A Hugging Face model folder: config.json and safetensors files, as one inventory.TensorFile.

Tensors are known by their GGUF names, so that a model is written once; messages use the folder's
own names. A quantised linear is one tensor here, whatever it is made of. The index of a sharded model must
say exactly what the shards hold; files of additional tensors beside it may be missing in it. Weights that
are Python pickles are refused by name: reading one runs its code. Knows neither tokenizers nor models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.models.loading.gguf import TensorInfo
from quickdraft.models.loading.head import GROUP, requantised
from quickdraft.models.loading.quantised import QuantisedLinear, collect, settle
from quickdraft.models.loading.safetensors import READABLE, SafetensorsFile
from quickdraft.models.loading.strict_files import is_there, read_object
from quickdraft.ops.weights import Weight

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"
_EXTRA: Final = "model_extra_tensors*.safetensors"  # where quantisers keep what they left alone
_TABLE: Final = "token_embd.weight"
_HEADS: Final = (_TABLE, "output.weight")
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
    """inventory.TensorFile over all weights of a folder; `config` is config.json as it stands.

    `head_bits` 8 makes embedding and head int8 groups as they are read, 16 leaves them as they are; None: 8
    where they are of 16 bits and linears are quantised. `notes` then says what that changed.
    """

    def __init__(self, path: Path, head_bits: int | None = None) -> None:
        self.path, self._head_bits = path, head_bits
        self.config = read_object(path / CONFIG)
        shards = [*self._shards(), *self._extra_files]
        self.files: tuple[Path, ...] = (path / CONFIG, *(shard.path for shard in shards))
        self.notes: list[str] = []
        self.tensors: dict[str, TensorInfo] = {}
        self._homes: dict[str, tuple[SafetensorsFile | QuantisedLinear, str]] = {}
        plain, self._linears = collect(shards, _SKIPPED)
        for shard, info in plain:
            # old files store the rope frequencies, which config.json determines
            if not info.name.endswith(".rotary_emb.inv_freq"):
                self._add(info.name, info, shard)
        for linear in self._linears:
            self._add(f"{linear.module}.weight", linear.info, linear)

    def _add(self, name: str, info: TensorInfo, home: SafetensorsFile | QuantisedLinear) -> None:
        ours = gguf_name(name) or f"unknown:{name}"  # a GGUF name is not the folder's own
        if ours in self.tensors:
            raise ModelFormatError(f"{self.path}: tensor {name} is there under another name too")
        self.tensors[ours] = replace(info, name=ours)
        self._homes[ours] = home, info.name

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
        assert isinstance(shard, SafetensorsFile)  # a quantised linear is a matrix
        return shard.vector(theirs)

    def matrix(self, name: str) -> Weight:
        """A two-dimensional tensor [N, K] as a weight value."""
        home, theirs = self._homes[name]
        if isinstance(home, QuantisedLinear):
            return home.matrix(ordered=name != _TABLE)
        if name not in _HEADS or not self._in_eight_bits(name):
            return home.matrix(theirs)
        was = self.tensors[name].type_name

        def report(error: float) -> None:
            self.notes.append(f"{theirs}: {was} in the file, int8 here, relative rms error {error:.2e}")

        return requantised(home, theirs, report)

    @property
    def held(self) -> dict[str, TensorInfo]:
        """`tensors` with embedding and head as they are once read: Q8_0 where 8 bits hold them."""
        held = dict(self.tensors)
        for name in _HEADS:
            if name in held and self._in_eight_bits(name):
                size = math.prod(held[name].shape) // GROUP * (GROUP + 2)
                held[name] = replace(held[name], type_name="Q8_0", bytes=size)
        return held

    @property
    def quantised_types(self) -> frozenset[str]:
        """The type names quantised linears have in `tensors`."""
        return frozenset(linear.info.type_name for linear in self._linears)

    def check_quantisation(self) -> None:
        """Settle with the config what the quantised linears are; to be called before they are read.
        UnsupportedError or ModelFormatError names the key, or the tensor that contradicts the config."""
        own_file = settle(self.path, self.config, self._linears)
        if own_file is not None:
            self.files = (*self.files, own_file)

    def _in_eight_bits(self, name: str) -> bool:
        info = self.tensors[name]
        fits = info.type_name in READABLE and info.shape[1] % GROUP == 0
        if self._head_bits is None:
            return fits and bool(self._linears) and info.type_name != "F32"
        if self._head_bits == 8 and not fits:
            raise UnsupportedError(
                f"{self.path}: tensor {self.called(name)} cannot be held in 8 bits",
                got=f"{info.type_name} {info.shape}", expected=f"a multiple of {GROUP} inputs",
            )  # fmt: skip
        return self._head_bits == 8

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
        (first, name), (second, another) = (self._homes[name] for name in (one, other))
        if isinstance(first, SafetensorsFile) and isinstance(second, SafetensorsFile):
            return bool(np.array_equal(first.values(name), second.values(another)))
        return False

    def _shards(self) -> Iterator[SafetensorsFile]:
        self._extra_files = [SafetensorsFile(path) for path in sorted(self.path.glob(_EXTRA))]
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
        extra = {shard.path.name for shard in self._extra_files}
        for name, shard in shards.items():
            tensors, held = by_file[name], set(shard.tensors)
            strange = tensors - held if name in extra else tensors ^ held
            if strange:
                raise ModelFormatError(
                    f"{shard.path}: the tensors are not those {INDEX} names for this file",
                    got=", ".join(sorted(strange)[:5]),
                )
            if name not in extra:
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
