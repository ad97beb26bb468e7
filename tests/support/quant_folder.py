"""Quantised model folders: random codes, packed here from the formats' descriptions, with the exact values.

One function makes the tensors of a linear in any format; `quantised_folder` writes a tiny llama, qwen2 or
qwen3 whose linears are of it, `quantised_hybrid` the tiny hybrid.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.support.tiny_folder import folder_tensors, write_tiny_folder
from tests.support.tiny_hybrid import hybrid_tensors, write_tiny_hybrid

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the columns of 8 that nibbles 0..7 of a word hold


@dataclass(frozen=True)
class Format:
    """A way to quantise linears. group 0: all inputs."""

    layout: str  # gptq, awq or compressed-tensors
    bits: int = 4
    group: int = 32
    symmetric: bool = True
    version: int = 1  # of GPTQ: 1 stores zero points less 1
    order: bool = False  # groups of inputs in a random order
    scales: str = "float16"  # or bfloat16, or "tiny bfloat16", which float16 does not hold exactly
    auto_round: bool = False

    def group_size(self, inputs: int) -> int:
        return self.group or inputs

    def config(self) -> dict[str, Any]:
        """quantization_config of a folder all of whose linears are so."""
        if self.layout == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": self.group or -1, "zero_point": True,
                    "version": "gemm", "modules_to_not_convert": ["visual"]}  # fmt: skip
        if self.layout == "compressed-tensors":
            weights = {
                "num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "dynamic": False,
                "strategy": "group" if self.group else "channel", "group_size": self.group or None,
                "actorder": "group" if self.order else None,
            }  # fmt: skip
            group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
            return {"quant_method": self.layout, "format": "pack-quantized", "ignore": ["lm_head"],
                    "config_groups": {"group_0": group}, "quantization_status": "compressed"}  # fmt: skip
        base = {"bits": self.bits, "group_size": self.group or -1, "sym": self.symmetric}
        if self.auto_round:
            packing = "auto_round:auto_gptq" if self.version == 1 else "auto_round"
            extra = {"model.layers.0.mlp.up_proj": {"bits": 16, "data_type": "fp"}}
            return {**base, "quant_method": "auto-round", "packing_format": packing, "data_type": "int",
                    "extra_config": extra}  # fmt: skip
        return {**base, "quant_method": "gptq", "desc_act": self.order,
                "checkpoint_format": "gptq" if self.version == 1 else "gptq_v2"}  # fmt: skip


FORMATS = {
    "gptq": Format("gptq"),
    "gptq asymmetric": Format("gptq", symmetric=False),
    "gptq v2 asymmetric, whole rows": Format("gptq", symmetric=False, version=2, group=0),
    "gptq in order": Format("gptq", order=True),
    "gptq v2 in order, asymmetric, 8 bits": Format("gptq", 8, 32, False, 2, True),
    "gptq 8 bits": Format("gptq", 8),
    "gptq v1 8 bits asymmetric": Format("gptq", 8, 32, False),
    "auto-round": Format("gptq", auto_round=True, group=64),
    "auto-round native": Format("gptq", version=2, auto_round=True),
    "awq": Format("awq", symmetric=False),
    "awq, whole rows": Format("awq", symmetric=False, group=0),
    "compressed-tensors": Format("compressed-tensors"),
    "compressed-tensors asymmetric": Format("compressed-tensors", symmetric=False, scales="bfloat16"),
    "compressed-tensors by channel": Format("compressed-tensors", group=0, scales="bfloat16"),
    "compressed-tensors tiny scales": Format("compressed-tensors", scales="tiny bfloat16"),
    "compressed-tensors 8 bits": Format("compressed-tensors", 8),
    "compressed-tensors 8 bits tiny scales": Format("compressed-tensors", 8, scales="tiny bfloat16"),
    "compressed-tensors 8 bits asymmetric by channel": Format("compressed-tensors", 8, 0, False),
    "compressed-tensors in order": Format("compressed-tensors", symmetric=False, order=True),
}  # fmt: skip


def words(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """[R, n] codes -> [R, ceil(n * bits / 32)] words, the first code in the lowest bits."""
    per_word = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word))).astype(np.uint32)
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    split = padded.reshape(len(codes), -1, per_word) << shifts
    return np.bitwise_or.reduce(split, axis=2).view(np.int32)


def quantised_linear(
    form: Format, outputs: int, inputs: int, seed: int = 0, size: float = 0.3
) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32]]:
    """(tensors by suffix, values [outputs, inputs] of about this size); half of the scales are negative."""
    rng = np.random.default_rng([seed, outputs, inputs])
    group = form.group_size(inputs)
    groups = -(-inputs // group)
    middle, largest = 1 << form.bits - 1, (1 << form.bits) - 1
    codes = rng.integers(0, largest + 1, (outputs, inputs))
    zeros = np.full((outputs, groups), middle)
    if not form.symmetric:
        lowest = 1 if form.version == 1 and form.layout == "gptq" else 0
        zeros = rng.integers(lowest, largest + 1 + lowest, (outputs, groups))
    spread = (rng.random((outputs, groups)) + 0.5) * rng.choice([-1, 1], (outputs, groups)) * size / middle
    scales = spread.astype(np.float16 if form.scales == "float16" else ml_dtypes.bfloat16)
    if form.scales == "tiny bfloat16":
        scales[::3] = (spread[::3] * 2.0**-18).astype(ml_dtypes.bfloat16)
    group_of = np.arange(inputs) // group
    if form.order:
        group_of = rng.permutation(group_of)
    values = (codes - zeros[:, group_of]) * scales.astype(np.float32)[:, group_of]
    return _tensors(form, codes, zeros, scales, group_of), values.astype(np.float32)


def _tensors(form: Format, codes: Any, zeros: Any, scales: Any, group_of: Any) -> dict[str, NDArray[Any]]:
    if form.layout == "compressed-tensors":
        tensors = {"weight_packed": words(codes, form.bits), "weight_scale": scales,
                   "weight_shape": np.array(codes.shape, np.int64)}  # fmt: skip
        if not form.symmetric:
            tensors["weight_zero_point"] = np.ascontiguousarray(words(zeros.T, form.bits).T)
        return tensors | ({"weight_g_idx": group_of.astype(np.int32)} if form.order else {})
    tensors = {"scales": np.ascontiguousarray(scales.T)}
    if form.layout == "awq":

        def mixed(columns: Any) -> Any:
            eights = columns.reshape(len(columns), -1, 8)[:, :, AWQ_COLUMNS]
            return words(eights.reshape(columns.shape), 4)

        return tensors | {"qweight": mixed(codes.T), "qzeros": mixed(zeros.T)}
    stored = zeros - 1 if form.version == 1 else zeros
    tensors["qweight"] = np.ascontiguousarray(words(codes, form.bits).T)
    tensors["qzeros"] = words(stored.T, form.bits)
    return tensors | ({} if form.auto_round else {"g_idx": group_of.astype(np.int32)})


def quantised_tensors(
    form: Format,
    architecture: str,
    head_dim: int | None = None,
    keep: tuple[str, ...] = (),
    size: float = 0.3,
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[np.float32]]]:
    """(tensors of the folder, the same as plain values): linears of layers in `form`, except those whose name
    holds one of `keep`; everything else in bfloat16. Inputs of 64 and 96 (a last group of 32 at group 64)."""
    tensors: dict[str, NDArray[Any]] = {}
    plain: dict[str, NDArray[np.float32]] = {}
    for seed, (name, values) in enumerate(folder_tensors(architecture, head_dim).items()):
        if values.ndim == 1 or not name.startswith("model.layers") or any(part in name for part in keep):
            tensors[name] = values.astype(ml_dtypes.bfloat16)
            plain[name] = tensors[name].astype(np.float32)
            continue
        outputs, inputs = values.shape
        parts, plain[name] = quantised_linear(form, outputs, inputs, seed, size)
        tensors |= {f"{name.removesuffix('.weight')}.{suffix}": part for suffix, part in parts.items()}
    return tensors, plain


def quantised_folder(
    folder: Path,
    form: Format,
    architecture: str = "llama",
    *,
    keep: tuple[str, ...] = (),
    shards: int = 1,
    size: float = 0.3,
    **changes: Any,
) -> dict[str, NDArray[np.float32]]:
    """Write the folder; returns the values of all its tensors."""
    head_dim = 24 if architecture == "qwen3" else None
    if head_dim:
        changes.setdefault("head_dim", 32)  # attention outputs in groups of 32
        head_dim = changes["head_dim"]
    tensors, plain = quantised_tensors(form, architecture, head_dim, keep, size)
    config = {"quantization_config": form.config(), **changes}
    write_tiny_folder(folder, architecture, dtype=None, shards=shards, tensors=tensors, **config)
    return plain


def hybrid_parts(form: Format) -> dict[str, NDArray[Any]]:
    """Tensors of the tiny hybrid as checkpoints in use have them: linears of layers in `form`, the gates
    (in_proj_a, in_proj_b), the MTP module and everything else in bfloat16."""
    tensors: dict[str, NDArray[Any]] = {}
    for seed, (name, values) in enumerate(hybrid_tensors().items()):
        kept = values.ndim != 2 or any(part in name for part in ("mtp.", "in_proj_a", "in_proj_b"))
        if kept or ".layers." not in name:
            tensors[name] = values.astype(ml_dtypes.bfloat16)
            continue
        quiet = any(part in name for part in ("o_proj", "out_proj", "down_proj"))
        parts, _ = quantised_linear(form, *values.shape, seed, 0.06 if quiet else 0.3)
        tensors |= {f"{name.removesuffix('.weight')}.{suffix}": part for suffix, part in parts.items()}
    return tensors


def quantised_hybrid(folder: Path, form: Format, tensors: dict[str, NDArray[Any]] | None = None) -> Path:
    """Write the folder and return its path."""
    parts = hybrid_parts(form) if tensors is None else tensors
    return write_tiny_hybrid(folder, dtype=None, tensors=parts, quantization_config=form.config())
