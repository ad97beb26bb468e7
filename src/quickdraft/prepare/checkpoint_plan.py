"""What a checkpoint of a described model consists of: files, tensors as stored, and config.json.

Owns the layouts of the quantised formats: which modules are packed, into which tensors of which
shape, and what config.json says about it. Everything is known before a byte is made, so the plan
also tells the size. Knows no folder and makes no number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from quickdraft.models.describe import Description, Tensor
from quickdraft.prepare.random_values import Codes, Constant, Fill, Uniform

Format = Literal["bf16", "autoround", "compressed-tensors"]
FORMATS: Final[tuple[Format, ...]] = ("bf16", "autoround", "compressed-tensors")
GROUP: Final = 128
SHARD_BYTES: Final = 5 * 10**9  # as transformers cuts
SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
EXTRA: Final = "model_extra_tensors.safetensors"  # not in the index
_BYTES: Final = {"BF16": 2, "F16": 2, "I32": 4, "I64": 8}
_CODE_RMS: Final = math.sqrt(21.5)  # of the 16 codes -8..7
_GPTQ_ZEROS: Final = 0x77777777  # eight times zero point 8, stored less one
_MTP: Final = "mtp."


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file: dtype as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: Fill

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class File:
    """A safetensors file; `indexed` when the index names its tensors."""

    name: str
    tensors: tuple[Stored, ...]
    indexed: bool = True

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.tensors)


def planned_files(sizes: Description, form: Format, shard_bytes: int = SHARD_BYTES) -> tuple[File, ...]:
    """The files of a checkpoint; none is larger than `shard_bytes` unless one tensor is.

    compressed-tensors keeps the MTP layer in a file of its own that the index does not list, as
    checkpoints in use do.
    """
    tensors = [stored for tensor in sizes.tensors() for stored in _stored(tensor, sizes, form)]
    extra = [t for t in tensors if form == "compressed-tensors" and t.name.startswith(_MTP)]
    apart = {tensor.name for tensor in extra}
    shards: list[list[Stored]] = [[]]
    size = 0
    for tensor in tensors:
        if tensor.name in apart:
            continue
        if shards[-1] and size + tensor.bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.bytes
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    files = [File(name, tuple(shard)) for name, shard in zip(names, shards, strict=True)]
    return (*files, *([File(EXTRA, tuple(extra), indexed=False)] if extra else []))


def index_of(files: tuple[File, ...]) -> dict[str, Any] | None:
    """model.safetensors.index.json; None where one file holds all that an index would name."""
    indexed = [file for file in files if file.indexed]
    if len(indexed) == 1:
        return None
    homes = {tensor.name: file.name for file in indexed for tensor in file.tensors}
    return {"metadata": {"total_size": sum(file.bytes for file in indexed)}, "weight_map": homes}


def config_of(sizes: Description, form: Format) -> dict[str, Any]:
    """config.json, with the quantization_config of the format."""
    config = sizes.config()
    kept = [t.name.removesuffix(".weight") for t in sizes.tensors() if t.kind == "gate"]
    if form == "autoround":
        config["quantization_config"] = {
            "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4,
            "group_size": GROUP, "sym": True, "data_type": "int", "autoround_version": "0.16.1",
            "block_name_to_quantize": sizes.blocks,
            "extra_config": {name: {"bits": 16, "data_type": "fp"} for name in kept},
        }  # fmt: skip
    elif form == "compressed-tensors":
        weights = {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
            "actorder": None, "dynamic": False, "block_structure": None, "observer": "minmax",
        }  # fmt: skip
        group = {
            "targets": ["Linear"], "format": "pack-quantized", "input_activations": None,
            "output_activations": None, "weights": weights,
        }  # fmt: skip
        # the MTP layer is missing here, as it is in checkpoints in use
        gates = ["re:.*in_proj_a$", "re:.*in_proj_b$", "re:.*visual.*"] if kept else []
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "quantization_status": "compressed", "config_groups": {"group_0": group},
            "ignore": ["lm_head", *gates],
        }  # fmt: skip
    return config


def _stored(tensor: Tensor, sizes: Description, form: Format) -> Iterator[Stored]:
    packed = tensor.kind == "linear" and tensor.name.startswith(f"{sizes.blocks}.")
    if form == "bf16" or not packed:
        yield Stored(tensor.name, "BF16", tensor.shape, _fill(tensor))
        return
    module = tensor.name.removesuffix(".weight")
    outputs, inputs = tensor.shape
    usual = 1 / (_CODE_RMS * math.sqrt(inputs))
    scales = Uniform(0.75 * usual, 1.25 * usual, either_sign=True)
    if form == "autoround":
        yield Stored(f"{module}.qweight", "I32", (inputs // 8, outputs), Codes())
        yield Stored(f"{module}.scales", "F16", (inputs // GROUP, outputs), scales)
        zeros = (inputs // GROUP, outputs // 8)
        yield Stored(f"{module}.qzeros", "I32", zeros, Constant((_GPTQ_ZEROS,)))
    else:
        yield Stored(f"{module}.weight_packed", "I32", (outputs, inputs // 8), Codes())
        yield Stored(f"{module}.weight_scale", "BF16", (outputs, inputs // GROUP), scales)
        yield Stored(f"{module}.weight_shape", "I64", (2,), Constant((outputs, inputs)))


def _fill(tensor: Tensor) -> Fill:
    """Numbers that keep activations near 1: rows of matrices of norm 1, norms near the identity, decays of
    a fresh Gated-DeltaNet layer (A in 1..16, softplus(dt_bias) in 0.001..0.1)."""
    match tensor.kind:
        case "linear" | "gate" | "head":
            reach = math.sqrt(3 / tensor.shape[1])
            return Uniform(-reach, reach)
        case "embedding" | "codebook":
            return Uniform(-math.sqrt(3), math.sqrt(3))
        case "centred":
            return Uniform(-0.1, 0.1)
        case "scale":
            return Uniform(0.9, 1.1)
        case "convolution":
            return Uniform(-0.5, 0.5)
        case "decay":
            return Uniform(0.0, math.log(16))
        case "step":
            return Uniform(-6.9, -2.25)
