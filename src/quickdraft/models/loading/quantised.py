"""Quantised linears of safetensors files: which tensors belong to one, and the weight they make.

A module is what its tensors' suffixes say, whatever the config's ignore list claims: `qweight` GPTQ or AWQ
(their shapes differ), `weight_packed` compressed-tensors, `weight` plain. Headers tell outputs, inputs, bits
and groups; quant_config says which of those may be. Tensors are read when the weight is packed, one linear
after the other. Knows neither folders nor models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from quickdraft.errors import ModelFormatError, UnsupportedError
from quickdraft.models.loading import packings
from quickdraft.models.loading.gguf import TensorInfo
from quickdraft.models.loading.quant_config import KEY, QuantConfig, find_quant_config, read_quant_config
from quickdraft.models.loading.safetensors import SafetensorsFile
from quickdraft.ops.weights import Blocks, Grouped, Part

Home = tuple[SafetensorsFile, TensorInfo]
# the tensor that makes a module quantised -> its companions, and whether there must be one
_COMPANIONS: Final = {
    "qweight": {"qzeros": True, "scales": True, "g_idx": False},
    "weight_packed": {
        "weight_scale": True, "weight_shape": True, "weight_zero_point": False, "weight_g_idx": False,
    },
}  # fmt: skip
_SUFFIXES: Final = {name: mark for mark, names in _COMPANIONS.items() for name in (mark, *names)}
_DTYPES: Final = {"scales": ("F16", "BF16", "F32"), "weight_scale": ("F16", "BF16", "F32"),
                  "weight_shape": ("I64", "I32")}  # fmt: skip
_INTEGERS: Final = ("I32",)
_WORD_BITS: Final = 32
_UNIT: Final = 32  # groups are of a multiple of so many inputs
BITS: Final = (4, 8)


def collect(
    shards: Iterable[SafetensorsFile], skipped: tuple[str, ...] = ()
) -> tuple[list[Home], list[QuantisedLinear]]:
    """(tensors that stand for themselves, quantised linears), without those whose names start with one of
    `skipped`. ModelFormatError for a tensor that is in two files, and for half a linear."""
    homes: dict[str, Home] = {}
    for shard in shards:
        for name, info in shard.tensors.items():
            if name in homes:
                raise ModelFormatError(f"{shard.path}: tensor {name} is in another file of the folder too")
            if not name.startswith(skipped):
                homes[name] = shard, info
    modules: dict[tuple[str, str], dict[str, Home]] = {}
    for name, home in homes.items():
        module, _, suffix = name.rpartition(".")
        if suffix in _SUFFIXES and f"{module}.weight" not in homes:
            modules.setdefault((module, _SUFFIXES[suffix]), {})[suffix] = home
    linears = [QuantisedLinear(module, mark, parts) for (module, mark), parts in modules.items()]
    taken = {info.name for parts in modules.values() for _, info in parts.values()}
    for (module, mark), parts in modules.items():
        if len({other for other in _COMPANIONS if (module, other) in modules}) > 1:
            shard, info = parts[mark]
            raise ModelFormatError(f"{shard.path}: tensor {info.name}: {module} is quantised in two ways")
    return [home for name, home in homes.items() if name not in taken], linears


def settle(folder: Path, config: Mapping[str, Any], linears: Sequence[QuantisedLinear]) -> Path | None:
    """Settle with a folder's config what its quantised linears are; the file that says it, where that is not
    config.json. UnsupportedError or ModelFormatError names the key, or the tensor that contradicts it."""
    own_file, values = find_quant_config(folder, config)
    if values is None:
        if linears:
            raise ModelFormatError(
                f"{folder}: tensor {linears[0].info.name} is quantised, but nothing says how",
                expected=f"{KEY} in config.json",
            )
        return None
    where = f"{folder / 'config.json'}: {KEY}" if own_file is None else str(own_file)
    claims = read_quant_config(values, where)
    for linear in linears:
        linear.agree(claims)
    return own_file


class QuantisedLinear:
    """One linear; `info` describes it as if it were a tensor [outputs, inputs]."""

    def __init__(self, module: str, mark: str, tensors: dict[str, Home]) -> None:
        self.module, self._mark, self._tensors = module, mark, tensors
        shard, _ = next(iter(tensors.values()))
        for suffix in (mark, *(name for name, needed in _COMPANIONS[mark].items() if needed)):
            if suffix not in tensors:
                raise ModelFormatError(f"{shard.path}: tensor {module}.{suffix} is missing")
        for suffix, (_, info) in tensors.items():
            if info.type_name not in _DTYPES.get(suffix, _INTEGERS):
                expected = " or ".join(_DTYPES.get(suffix, _INTEGERS))
                self._fail(suffix, "has a wrong type", got=info.type_name, expected=expected)
            dimensions = 1 if suffix in ("g_idx", "weight_g_idx", "weight_shape") else 2
            if len(info.shape) != dimensions or 0 in info.shape:
                self._fail(suffix, "has a wrong shape", got=info.shape, expected=f"{dimensions} dimensions")
        self._group_size = 0  # until `agree`
        self._offset = 0
        self._measure()
        self._check_shapes()
        _, info = tensors[mark]
        size = self.inputs if self.groups == 1 else -(-self.inputs // self.groups // _UNIT) * _UNIT
        self.info = TensorInfo(
            info.name, f"{self.layout} int{self.bits} g{size}", (self.outputs, self.inputs), info.offset,
            sum(part.bytes for _, part in tensors.values()),
        )  # fmt: skip

    def agree(self, config: QuantConfig) -> None:
        """Take from the config what the tensors cannot tell; ModelFormatError where the two contradict."""
        if config.layout != self.layout:
            self._fail(
                self._mark, f"is packed as {self.layout}", expected=f"{config.layout}, as {config.where} says"
            )
        fitting = [
            scheme for scheme in config.schemes
            if scheme.bits == self.bits and scheme.groups(self.inputs) == self.groups
        ]  # fmt: skip
        if not fitting:
            claimed = ", ".join(
                f"{scheme.bits} bits in groups of {scheme.group_size}" for scheme in config.schemes
            )
            self._fail(
                self._scale_name, f"is of no scheme {config.where} names",
                got=f"{self.bits} bits in {self.groups} groups of {self.inputs} inputs", expected=claimed,
            )  # fmt: skip
        sizes = [self.inputs if scheme.group_size == -1 else scheme.group_size for scheme in fitting]
        self._group_size, self._offset = min(sizes[0], self.inputs), config.zero_offset
        if self._group_size % _UNIT:
            self._unsupported(
                self._scale_name, f"groups of {self._group_size} inputs", f"a multiple of {_UNIT}"
            )
        symmetries = {scheme.symmetric for scheme in fitting}
        self._symmetric = symmetries.pop() if len(symmetries) == 1 else None
        if config.needs_order and "g_idx" not in self._tensors:
            self._fail("g_idx", f"is missing, and {config.where} says desc_act")
        if (
            self._mark == "weight_packed"
            and self._symmetric is False
            and "weight_zero_point" not in self._tensors
        ):
            self._fail("weight_zero_point", f"is missing, and {config.where} says it is not symmetric")

    def matrix(self, *, ordered: bool = True) -> Blocks:
        """The weight, read when it is packed, in the exact values of the file. `ordered` False: a table of
        rows, which cannot have an order of its inputs."""
        home, info = self._tensors[self._mark]

        def read() -> Grouped:
            weight = self._read()
            if weight.order is not None and not ordered:
                self._unsupported(self._order_name, "an embedding with an order of its inputs", "none")
            return weight

        return Blocks(None, self.inputs, (Part(home.open_file, info.offset, self.outputs, read),))

    @property
    def _scale_name(self) -> str:
        return "scales" if self._mark == "qweight" else "weight_scale"

    @property
    def _order_name(self) -> str:
        return "g_idx" if self._mark == "qweight" else "weight_g_idx"

    def _shape(self, suffix: str) -> tuple[int, ...]:
        return self._tensors[suffix][1].shape

    def _measure(self) -> None:
        """Layout, outputs, inputs, bits and groups from the shapes."""
        rows, columns = self._shape(self._mark)
        if self._mark == "weight_packed":
            self.layout = "compressed-tensors"
            shape = self._integers("weight_shape")
            if len(shape) != 2 or shape[0] != rows or shape[1] < 1:
                self._fail("weight_shape", "is wrong", got=shape.tolist(), expected=f"[{rows}, inputs]")
            self.outputs, self.inputs = rows, int(shape[1])
            self.groups = self._shape("weight_scale")[1]
            widths = {bits: _words(self.inputs, bits) for bits in (*BITS, 2, 3, 6)}
            self.bits = next((bits for bits, words in widths.items() if words == columns), 0)
        else:
            self.groups, self.outputs = self._shape("scales")
            words = self._shape("qzeros")[1]
            self.bits = next((bits for bits in (*BITS, 2, 3) if _words(self.outputs, bits) == words), 0)
            if columns not in (self.outputs, words):
                expected = f"{self.outputs} or {words} columns"
                self._fail("qweight", "has a wrong shape", got=(rows, columns), expected=expected)
            self.layout = "gptq" if columns == self.outputs else "awq"
            self.inputs = rows if self.layout == "awq" else rows * _WORD_BITS // max(self.bits, 1)
        readable = BITS if self.layout != "awq" else BITS[:1]
        if self.bits not in readable:
            suffix = "weight_packed" if self._mark == "weight_packed" else "qzeros"
            got = f"{self.bits} bits" if self.bits else f"shape {self._shape(suffix)}"
            self._unsupported(suffix, got, f"codes of {' or '.join(map(str, readable))} bits")
        if self.inputs % _UNIT:
            self._unsupported(self._mark, f"{self.inputs} inputs", f"a multiple of {_UNIT}")

    def _check_shapes(self) -> None:
        outputs, inputs, bits, groups = self.outputs, self.inputs, self.bits, self.groups
        expected: dict[str, tuple[int, ...]] = {"g_idx": (inputs,), "weight_g_idx": (inputs,)}
        expected["scales"] = groups, outputs
        expected["weight_scale"] = outputs, groups
        expected["qzeros"] = groups, _words(outputs, bits)
        expected["weight_zero_point"] = _words(outputs, bits), groups
        expected["weight_packed"] = outputs, _words(inputs, bits)
        gptq = self.layout == "gptq"
        expected["qweight"] = (
            (inputs * bits // _WORD_BITS, outputs) if gptq else (inputs, _words(outputs, bits))
        )
        for suffix in self._tensors:
            if suffix in expected and self._shape(suffix) != expected[suffix]:
                self._fail(suffix, "has a wrong shape", got=self._shape(suffix), expected=expected[suffix])

    def _read(self) -> Grouped:
        if not self._group_size:
            raise AssertionError("`agree` comes before reading")
        stored = self._tensors[self._scale_name][0].values(self._full(self._scale_name))
        scales = self._checked(self._scale_name, lambda: packings.exact_scales(stored))
        order = None
        if self._order_name in self._tensors:
            group_of = self._integers(self._order_name)
            size, groups = self._group_size, self.groups
            order = self._checked(self._order_name, lambda: packings.input_order(group_of, size, groups))
        weight = self._unpacked(scales, order)
        if self._symmetric is True and weight.zeros is not None and not packings.is_symmetric(weight):
            zeros = "qzeros" if self._mark == "qweight" else "weight_zero_point"
            self._fail(zeros, "holds zero points that are not symmetric, as the config says they are")
        return weight

    def _unpacked(self, scales: Any, order: Any) -> Grouped:
        size, codes = self._group_size, self._integers(self._mark)
        if self.layout == "compressed-tensors":
            has_zeros = "weight_zero_point" in self._tensors
            zeros = self._integers("weight_zero_point") if has_zeros else None
            return packings.pack_quantized(codes, scales, zeros, order, self.bits, size)
        zeros = self._integers("qzeros")
        if self.layout == "awq":
            return packings.awq(codes, zeros, scales, size)
        offset = self._offset
        if (
            self._symmetric is not False
        ):  # the words of symmetric files say by themselves whether 1 is missing
            offset = packings.symmetric_offset(zeros, self.bits, offset)
        return packings.gptq(codes, zeros, scales, order, self.bits, offset, size)

    def _checked(self, suffix: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except ValueError as error:
            self._fail(suffix, str(error))

    def _integers(self, suffix: str) -> Any:
        return self._tensors[suffix][0].integers(self._full(suffix))

    def _full(self, suffix: str) -> str:
        return f"{self.module}.{suffix}"

    def _where(self, suffix: str) -> str:
        home = self._tensors.get(suffix) or next(iter(self._tensors.values()))
        return f"{home[0].path}: tensor {self._full(suffix)}"

    def _fail(self, suffix: str, what: str, **details: Any) -> NoReturn:
        raise ModelFormatError(f"{self._where(suffix)} {what}", **details)

    def _unsupported(self, suffix: str, got: str, expected: str) -> NoReturn:
        raise UnsupportedError(f"{self._where(suffix)} cannot be used", got=got, expected=expected)


def _words(codes: int, bits: int) -> int:
    """Words of 32 bits that hold so many codes."""
    return -(-codes * bits // _WORD_BITS)
