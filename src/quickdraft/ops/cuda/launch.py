"""Launcher: the one place from which kernels start, so that a test or the compiler can look at every start.

A Triton kernel is started with its grid, its arguments by position and its compile-time numbers by name.
Knows no model and no op. `Started` values are what `make kernels` compiles ahead of time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
import triton

INTERPRETED: bool = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1 when triton was first imported
TILE_ROWS: Final = 64  # of the tallest tile of a matrix product


@dataclass(frozen=True, slots=True)
class Started:
    """One kernel start as it was asked for."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    numbers: dict[str, Any]  # compile-time arguments, by name
    options: dict[str, Any]  # warps, stages, and so on


class Launcher:
    """Starts kernels; `enable_fp_fusion` and the like are options of triton's."""

    def start(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *arguments: Any,
        warps: int = 4,
        stages: int = 2,
        registers: int | None = None,
        exact: bool = False,
        **numbers: Any,
    ) -> None:
        """`exact`: products and sums are rounded one by one, none is fused. `registers`: at most so many of
        a thread; without, ptxas may spill some so that more programs fit a multiprocessor."""
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": not exact}
        if registers is not None:
            options["maxnreg"] = registers
        self.begin(Started(kernel, grid, arguments, numbers, options))

    def begin(self, started: Started) -> None:
        options = {} if INTERPRETED else started.options
        started.kernel[started.grid](*started.arguments, **started.numbers, **options)


@dataclass
class Watching(Launcher):
    """Writes every start down instead of starting it."""

    seen: list[Started] = field(default_factory=list)

    def begin(self, started: Started) -> None:
        self.seen.append(started)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def ceil_divide(number: int, by: int) -> int:
    return -(-number // by)


def tallest_tile(device: torch.device) -> int:
    """Rows of the tallest tile. For 64 Triton takes other matrix instructions from compute capability 9 to 11
    than for fewer, which may add in another order; a row's bits must not follow from the rows beside it."""
    other = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10, 11)
    return TILE_ROWS // 2 if other else TILE_ROWS
