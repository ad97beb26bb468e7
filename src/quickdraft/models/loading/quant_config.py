"""quantization_config of a model folder: what it claims about the quantised linears.

What a linear *is*, its tensors say; ignore lists and patterns of names are not consulted, as they are
often incomplete or written for other prefixes. The config decides what tensors cannot tell (whether
stored zero points lack 1) and lists the schemes (bits, group size, symmetry) the tensors must be of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.models.loading.strict_files import is_there, read_object

KEY: Final = "quantization_config"
_OWN_FILES: Final = ("quantization_config.json", "quantize_config.json")  # older writers' places for it
_PACKED: Final = "pack-quantized"
# packing_format of AutoRound -> (tensor layout, what is to be added to stored zero points)
_PACKINGS: Final = {
    "auto_round:auto_gptq": ("gptq", 1), "auto_gptq": ("gptq", 1), "auto_round:gptq": ("gptq", 1),
    "auto_round": ("gptq", 0), "auto_round:gptqmodel": ("gptq", 0), "auto_round:auto_awq": ("awq", 0),
    "auto_round:awq": ("awq", 0),
}  # fmt: skip
_VERSIONS: Final = {None: 1, "gptq": 1, "gptq_v2": 0}  # checkpoint_format of GPTQ -> the same


@dataclass(frozen=True, slots=True)
class Scheme:
    """How linears may be quantised. `symmetric` None: not stated."""

    bits: int
    group_size: int  # -1: all inputs
    symmetric: bool | None

    def groups(self, inputs: int) -> int:
        return 1 if self.group_size == -1 else -(-inputs // self.group_size)


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """`layout` names the tensors' packing: gptq, awq or compressed-tensors."""

    where: str
    layout: str
    zero_offset: int
    schemes: tuple[Scheme, ...]
    needs_order: bool  # every linear must come with the groups of its inputs


def find_quant_config(folder: Path, config: Mapping[str, Any]) -> tuple[Path | None, dict[str, Any] | None]:
    """(its own file, the object): from config.json or its text_config (no own file) or, where they have none,
    from a file beside it; (None, None) when there is none. ModelFormatError for one that is no object."""
    text = config.get("text_config")
    values = config.get(KEY)
    if values is None and isinstance(text, dict):
        values = text.get(KEY)
    if values is not None:
        if not isinstance(values, dict):
            raise ModelFormatError(f"{folder / 'config.json'}: {KEY}", got=repr(values)[:80],
                                   expected="an object")  # fmt: skip
        return None, values
    for name in _OWN_FILES:
        if is_there(folder / name):
            return folder / name, read_object(folder / name)
    return None, None


def read_quant_config(values: Mapping[str, Any], where: str) -> QuantConfig:
    """UnsupportedError or ModelFormatError names the key that cannot be followed."""
    method = values.get("quant_method", "gptq")  # quantize_config.json of older GPTQ writers has none
    if method == "compressed-tensors":
        return _compressed_tensors(values, where)
    if method == "awq":
        if values.get("version", "gemm") not in ("gemm", "GEMM"):
            raise _unsupported(f"{where}: version", values["version"], "gemm")
        bits, group = _number(values, "bits", where), _number(values, "group_size", where)
        zero_point = _flag(values, "zero_point", where)
        scheme = Scheme(bits, group, None if zero_point is None else not zero_point)
        return QuantConfig(where, "awq", 0, (scheme,), False)
    if method == "gptq":
        version = values.get("checkpoint_format")
        if not isinstance(version, str | None) or version not in _VERSIONS:
            raise _unsupported(f"{where}: checkpoint_format", version, "gptq or gptq_v2")
        overrides = _override(values, "dynamic", where)
        layout, offset = "gptq", _VERSIONS[version]
    elif method in ("auto-round", "auto_round", "intel/auto-round"):
        packing = values.get("packing_format", "auto_round:auto_gptq")
        if not isinstance(packing, str) or packing not in _PACKINGS:
            raise _unsupported(f"{where}: packing_format", packing, " or ".join(_PACKINGS))
        if values.get("data_type", "int") != "int":
            raise _unsupported(f"{where}: data_type", values["data_type"], "int")
        overrides = _override(values, "extra_config", where)
        layout, offset = _PACKINGS[packing]
    else:
        raise _unsupported(f"{where}: quant_method", method, "auto-round, gptq, awq or compressed-tensors")
    base = {key: values[key] for key in ("bits", "group_size", "sym") if values.get(key) is not None}
    schemes = tuple(dict.fromkeys(_scheme({**base, **each}, where) for each in ({}, *overrides)))
    needs_order = _flag(values, "desc_act", where) is True
    return QuantConfig(where, layout, offset, schemes, needs_order)


def _compressed_tensors(values: Mapping[str, Any], where: str) -> QuantConfig:
    groups = values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelFormatError(f"{where}: config_groups", expected="an object that is not empty")
    for key in ("kv_cache_scheme", "sparsity_config"):
        if values.get(key):
            raise _unsupported(f"{where}: {key}", values[key], "null")
    schemes = [_group_scheme(group, values, f"{where}: config_groups.{name[:80]}")
               for name, group in groups.items()]  # fmt: skip
    return QuantConfig(where, "compressed-tensors", 0, tuple(dict.fromkeys(schemes)), False)


def _group_scheme(group: Any, values: Mapping[str, Any], where: str) -> Scheme:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise ModelFormatError(f"{where}.weights", expected="an object")
    form = group.get("format") or values.get("format")
    if form != _PACKED:
        raise _unsupported(f"{where}: format", form, _PACKED)
    for key in ("input_activations", "output_activations"):
        if group.get(key) is not None:
            raise _unsupported(f"{where}.{key}", group[key], "null: weights alone are quantised")
    if weights.get("type", "int") != "int":
        raise _unsupported(f"{where}.weights.type", weights["type"], "int")
    bits, strategy = _number(weights, "num_bits", where), weights.get("strategy")
    if strategy == "group":
        size = _number(weights, "group_size", where)
    elif strategy == "channel":
        size = -1
    else:
        raise _unsupported(f"{where}.weights.strategy", strategy, "group or channel")
    return Scheme(bits, size, _flag(weights, "symmetric", where))


def _override(values: Mapping[str, Any], key: str, where: str) -> Iterator[dict[str, Any]]:
    """What single modules have instead of the base, where they are quantised at all."""
    entries = values.get(key) or {}
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ModelFormatError(f"{where}: {key}", expected="an object of objects")
    for name, entry in entries.items():
        if not name.startswith("-:") and not (type(entry.get("bits")) is int and entry["bits"] >= 16):
            yield {key: entry[key] for key in ("bits", "group_size", "sym") if entry.get(key) is not None}


def _scheme(values: Mapping[str, Any], where: str) -> Scheme:
    return Scheme(
        _number(values, "bits", where), _number(values, "group_size", where), _flag(values, "sym", where)
    )


def _number(values: Mapping[str, Any], key: str, where: str) -> int:
    value = values.get(key)
    if type(value) is not int or not (1 <= value <= 2**24 or (key == "group_size" and value == -1)):
        got = repr(value)[:80]
        raise ModelFormatError(f"{where}: {key}", got=got, expected="a whole number")
    return value


def _flag(values: Mapping[str, Any], key: str, where: str) -> bool | None:
    value = values.get(key)
    if value is not None and type(value) is not bool:
        raise ModelFormatError(f"{where}: {key}", got=repr(value)[:80], expected="true or false")
    return value


def _unsupported(what: str, got: Any, expected: str) -> UnsupportedError:
    return UnsupportedError(what, got=repr(got)[:80], expected=expected)
