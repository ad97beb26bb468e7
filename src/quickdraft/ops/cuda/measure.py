"""What a benchmark of the card needs of torch: facts, times, memory, and weights drawn on the card.

Knows no model and no table. In the interpreter there is no card: facts say so, times are the host's and
memory is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import triton

from quickdraft.ops.cuda.backend import CudaOps
from quickdraft.ops.cuda.buffers import KV_TYPES
from quickdraft.ops.cuda.launch import ceil_divide
from quickdraft.ops.cuda.weights import AnyPacked, PackedGroups, splits_of
from quickdraft.ops.weights import Blocks, Int4Groups, Int8Groups, Stacked, Weight

DRIVER: Final = Path("/proc/driver/nvidia/version")
HEAD_GROUP: Final = 32
CODE_RMS: Final = {4: 4.61, 8: 73.9}  # of codes drawn evenly
DRAWN_GROUP: Final = 128
UNCOUNTED: Final = 4  # runs of a program: one makes copies, one has them, one is captured, one is replayed


class DrawnOps(CudaOps):
    """A card whose quantised weights are random numbers made on the card instead of those in the file, which
    are not read. `vocabulary` outputs: 8 bits in groups of 32, as embedding and head are; else 4 in groups of
    128."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self.weight_bytes = 0

    def pack(self, weight: Weight | Stacked) -> AnyPacked:
        if not isinstance(weight, Blocks | Int4Groups | Int8Groups):
            return super().pack(weight)
        outputs, inputs = weight.shape
        bits, group = (8, HEAD_GROUP) if outputs == self._vocabulary else (4, DRAWN_GROUP)
        packed = drawn(self.device, outputs, inputs, bits, group, KV_TYPES[self.activations][0])
        self.weight_bytes += packed.nbytes
        return packed


def drawn(
    device: torch.device,
    outputs: int,
    inputs: int,
    bits: int,
    group: int,
    factor: torch.dtype = torch.float16,
) -> PackedGroups:
    """Even codes and one scale that keeps the size of what passes through."""
    sub, per_word = 32, 16 // bits
    group = min(group, inputs)
    shape = ceil_divide(inputs, sub * per_word), outputs, sub
    words = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device)
    scale = 1.0 / (CODE_RMS[bits] * inputs**0.5)
    scales = torch.full((ceil_divide(inputs, group), outputs), scale, dtype=torch.float16, device=device)
    splits = splits_of(outputs, max(inputs // 128, 1))
    return PackedGroups(
        words, scales, None, None, 2.0 ** (bits - 1), bits, group, inputs, None, splits, factor
    )


def facts(ops: CudaOps) -> dict[str, Any]:
    """The card, its driver and the packages; None for what is not known."""
    found: dict[str, Any] = {
        "card": None, "compute_capability": None, "multiprocessors": None, "memory_bytes": None,
        "driver": None, "cuda": torch.version.cuda, "torch": torch.__version__, "triton": triton.__version__,
    }  # fmt: skip
    if ops.device.type == "cuda":
        its = torch.cuda.get_device_properties(ops.device)
        found |= {
            "card": its.name, "compute_capability": f"{its.major}.{its.minor}",
            "multiprocessors": its.multi_processor_count, "memory_bytes": its.total_memory,
        }  # fmt: skip
    if DRIVER.exists():
        found["driver"] = DRIVER.read_text().splitlines()[0].strip()
    return found


def seconds_of(ops: CudaOps, run: Callable[[], None], repeats: int) -> float:
    """Mean seconds of a call on the device, after some that are not counted; between two events of it."""
    for _ in range(UNCOUNTED):
        run()
    if ops.device.type != "cuda":
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - started) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(ops.device)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize(ops.device)
    return float(begin.elapsed_time(end)) / 1000 / repeats


def peak_bytes(ops: CudaOps) -> int | None:
    """The most that was allocated since the last call, and what is free goes back; None without a card."""
    if ops.device.type != "cuda":
        return None
    peak = int(torch.cuda.max_memory_allocated(ops.device))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(ops.device)
    return peak
