"""The roofline of decoding: what a step costs at least, from bytes, multiply-adds and two measured rates.

Pure arithmetic after Williams, Waterman and Patterson, "Roofline: an insightful visual performance model
for multicore architectures", CACM 52(4), 2009: a kernel takes at least max(bytes / bandwidth,
operations / peak). Weights are read once a step however many rows it has; arithmetic grows with rows. So
rows are nearly free up to the ridge of that model, and beyond it a step costs its arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

BYTES_PER_WEIGHT: Final = {4: 18 / 32, 8: 34 / 32}  # Q4_0 and Q8_0: 32 codes and an fp16 scale
_HEAD, _EMBEDDING = "output.weight", "token_embd.weight"
_DRAFTER: Final = "mtp."
_FLOAT: Final = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does a second: bytes read, and multiply-adds by the kind of weight."""

    bytes_per_second: float
    narrow_macs_per_second: float  # int8 activations x weights below 8 bits: int16 sums hold for a while
    wide_macs_per_second: float  # int8 x int8: one product of two may fill an int16, so sums are int32
    float_macs_per_second: float

    def macs_per_second(self, type_name: str) -> float:
        """The rate for a weight of this type: GGUF's, or a quantised folder's, such as "gptq int8 g128"."""
        if type_name in _FLOAT:
            return self.float_macs_per_second
        wide = type_name == "Q8_0" or " int8 " in type_name
        return self.wide_macs_per_second if wide else self.narrow_macs_per_second


@dataclass(frozen=True, slots=True)
class Card:
    """Two numbers of a data sheet: GB/s, and dense fp16 tensor TFLOP/s with fp32 sums."""

    name: str
    gigabytes_per_second: float
    fp16_teraflops: float

    @property
    def macs_per_second(self) -> float:
        return self.fp16_teraflops * 1e12 / 2


CARDS: Final = (
    Card("RTX 3090", 936, 71),
    Card("RTX 4090", 1008, 165.2),
    Card("RTX 5090", 1792, 209.5),
    Card("A100 80GB SXM", 2039, 312),
    Card("H100 SXM", 3350, 989),
)


def nearly_free_rows(macs_per_second: float, bytes_per_second: float, bytes_per_weight: float) -> float:
    """Rows at which arithmetic takes as long as reading: MAC rate / (bandwidth / bytes per weight).

    A weight that is read once is multiplied with each row, so this is the ridge point of the roofline.
    """
    return macs_per_second / (bytes_per_second / bytes_per_weight)


def roof_seconds(bytes_read: float, macs: float, bytes_per_second: float, macs_per_second: float) -> float:
    """max(bytes / bandwidth, MACs / peak): no kernel that reads and computes that much is faster."""
    return max(bytes_read / bytes_per_second, macs / macs_per_second)


class Tensor(Protocol):
    """What is counted of a tensor in a file."""

    @property
    def type_name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What one step of a model does near context 0, counted from its file; attention is not in it."""

    step_bytes: int  # tensors a step reads, whatever its rows
    macs_per_row: Mapping[str, int]  # by type of the weight

    @property
    def total_macs_per_row(self) -> int:
        return sum(self.macs_per_row.values())

    def row_seconds(self, rates: Rates) -> float:
        """Arithmetic of one row at the peak of each type: what a row of a long block costs at least."""
        return sum(macs / rates.macs_per_second(name) for name, macs in self.macs_per_row.items())

    def plain_seconds(self, rates: Rates) -> float:
        """A step of one row at least."""
        return max(self.step_bytes / rates.bytes_per_second, self.row_seconds(rates))

    def longest_gain(self, rates: Rates) -> float:
        """Most that verifying ever longer blocks can gain over plain decoding, all drafts being right:
        seconds of a plain step / seconds of arithmetic per row. 1 where one row is bound by arithmetic."""
        return self.plain_seconds(rates) / self.row_seconds(rates)


def model_work(tensors: Iterable[tuple[str, Tensor]]) -> ModelWork:
    """Count a file's tensors: each matrix [N, K] is N K multiply-adds a row and is read once a step.

    A token embedding beside a head of its own is looked up and not read, so it is not counted; nor is an
    MTP module, which only drafts.
    """
    named = {name: tensor for name, tensor in tensors if not name.startswith(_DRAFTER)}
    if _HEAD in named:
        named.pop(_EMBEDDING, None)
    macs: dict[str, int] = {}
    for tensor in named.values():
        if len(tensor.shape) == 2:
            macs[tensor.type_name] = macs.get(tensor.type_name, 0) + tensor.shape[0] * tensor.shape[1]
    return ModelWork(sum(tensor.bytes for tensor in named.values()), macs)
