"""`make kernels`: compiles every kernel start for every architecture and writes docs/reference/kernels.md.

Run as `python -m quickdraft.ops.cuda.kernels_page PAGE`, without TRITON_INTERPRET; no GPU is needed. Says
of every number that it is projected or compiled, not measured. Exits with 1 where a hot kernel spills or a
kernel does not fit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from itertools import product
from pathlib import Path

import torch

from quickdraft.ops.cuda import work
from quickdraft.ops.cuda.compile import ARCHITECTURES, Compiled, compile_start, source_of
from quickdraft.ops.cuda.launch import Started
from quickdraft.ops.cuda.variants import other_starts

SHARED_LIMIT_BYTES = 99 * 1024
HOT = ("grouped_linear", "attend_span", "delta_rule", "add_pieces")
STEPS = ((1, 2048), (4, 25_000), (16, 25_000), (32, 25_000), (64, 25_000))
PREFILL = (512, 8192)
HOME = 86
GREETING = """# Kernels of the CUDA backend

Written by `make kernels`, which compiles every kernel start below ahead of time, without a GPU. Registers and
spills are ptxas's, shared memory is Triton's. **Nothing on this page was measured on a card**: times are
*projected* from bytes and arithmetic, at the roof of an RTX 3090 (914 GB/s reachable, 71 TFLOP/s for float16
with float32 sums).
"""
STEPS_TEXT = f"""## Projected step times

Qwen3.8-27B, weights in 4 bits (groups of 128), head in 8. The roof takes each op's bytes and arithmetic (of
whole tiles) alone; *projected* divides by {work.EFFICIENCY}, an assumed efficiency, and adds
{work.START_SECONDS * 1e6:g} µs for each kernel start, assumed for a captured graph. More rows and contexts:
[projection](projection.md).
"""
WORK_TEXT = """## A step of 16 rows behind 25,000 tokens

From the second step on: norms and gates write the 16-bit copies that linears read. Bytes of linears and
attention are those of every argument, each read or written once; in truth small ones, such as the pieces of
a sum, stay in the card's cache. Ops that touch a part of their arguments (kv_write, causal_conv, gated_delta,
norms and gates) are given their formula's minimum, so their 1.00 says nothing.
"""
KERNELS_TEXT = f"""## Compiled for {", ".join(f"sm_{number}" for number in ARCHITECTURES)}

A program may have 99 KB of shared memory and 255 registers a thread on a 3090.
"""


@lru_cache
def starts() -> tuple[Started, ...]:
    """Every kernel start that differs from the others in machine code."""
    found: dict[str, Started] = {}
    steps = [(*step, True) for step in STEPS] + [(*PREFILL, False)]
    for rows, context, drafted in steps:
        for kind in ("bfloat16", "int8"):
            for op in work.whole_step(rows, context, kind, drafted=drafted):
                _add(found, op.starts)
    _add(found, other_starts())
    return tuple(found[key] for key in sorted(found))


def _add(found: dict[str, Started], new: Iterable[Started]) -> None:
    for start in new:
        source = source_of(start)
        numbers = {name: str(value) for name, value in source.constants.items()}
        key = f"{start.kernel.__name__} {numbers} {source.signature} {source.attrs} {start.options}"
        found.setdefault(key, start)


def compiled(task: tuple[int, int]) -> Compiled:
    """Start number `task[0]` for sm_`task[1]`; in a process of its own."""
    return compile_start(starts()[task[0]], task[1])


def label(start: Started) -> str:
    """The numbers that tell one configuration of a kernel from another."""
    hidden = ("OFFSET", "WIDE", "N")
    numbers = [f"{n} {getattr(v, 'name', v)}" for n, v in start.numbers.items() if n not in hidden]
    given = dict(zip(start.kernel.arg_names, start.arguments, strict=False))
    optional = ("offsets", "minimums", "residual", "order")
    numbers += [name for name in optional if given.get(name) is not None]
    for name in ("values", "keys", "scales"):
        if isinstance(given.get(name), torch.Tensor):
            numbers.append(f"{name} {given[name].dtype}".replace("torch.", ""))
    return ", ".join([*numbers, f"{start.options['num_warps']} warps"])


def kernel_rows(results: dict[tuple[int, int], Compiled]) -> list[str]:
    """A table row per start: sm_86, then the worst of the others."""
    rows = []
    for index, start in enumerate(starts()):
        home = results[index, HOME]
        every = [results[index, architecture] for architecture in ARCHITECTURES]
        spills = ", ".join(
            f"sm_{a}: {c.spill_bytes}" for a, c in zip(ARCHITECTURES, every, strict=True) if c.spill_bytes
        )
        rows.append(
            f"| `{start.kernel.__name__}` | {label(start)} | {home.registers} "
            f"| {max(c.registers for c in every)} "
            f"| {spills or 'none'} | {home.shared_bytes / 1024:.1f} |"
        )
    return rows


def work_rows(rows: int, context: int, kv_dtype: str) -> list[str]:
    works = work.whole_step(rows, context, kv_dtype)
    lines = [
        f"| {op.name} | {op.calls} | {len(op.starts)} | {op.bytes_moved / 1e6:.2f} "
        f"| {op.bytes_moved / op.least_bytes:.2f} | {op.flops / 1e9:.2f} | {op.roof_s * 1e6:.0f} "
        f"| {op.calls * op.roof_s * 1e3:.2f} |"
        for op in works
    ]
    total = sum(op.calls * op.roof_s for op in works)
    kernels = sum(op.calls * len(op.starts) for op in works)
    lines.append(f"| **a step** | | {kernels} | | | | | **{total * 1e3:.1f}** |")
    return lines


def step_rows() -> list[str]:
    lines = []
    for kind, (rows, context) in product(("bfloat16", "int8"), STEPS):
        works = work.whole_step(rows, context, kind)
        roof, projected = (sum(op.calls * t for op, t in zip(works, times, strict=True)) for times in (
            [op.roof_s for op in works], [op.projected_s for op in works]
        ))  # fmt: skip
        lines.append(f"| {rows} | {context} | {kind} | {roof * 1e3:.1f} | {projected * 1e3:.1f} |")
    return lines


def page(results: dict[tuple[int, int], Compiled]) -> str:
    """The whole page."""
    steps = [
        "| rows | context | keys and values | roof, ms | projected, ms |",
        "|---|---|---|---|---|",
        *step_rows(),
    ]
    head = "| op | calls | kernels a call | MB a call | of the minimum | GFLOP | roof, µs | all calls, ms |"
    works = [head, "|---|---|---|---|---|---|---|---|", *work_rows(16, 25_000, "bfloat16")]
    kernels = [
        "| kernel | configuration | registers, sm_86 | most registers | spilled bytes | shared KB, sm_86 |",
        "|---|---|---|---|---|---|",
        *kernel_rows(results),
    ]
    parts = [GREETING, STEPS_TEXT, "\n".join(steps), WORK_TEXT, "\n".join(works), KERNELS_TEXT]
    return "\n\n".join(part.strip() for part in [*parts, "\n".join(kernels)]) + "\n"


def faults(results: dict[tuple[int, int], Compiled]) -> list[str]:
    """What must not be: a hot kernel that spills, or one that does not fit a 3090."""
    found = []
    for (index, architecture), result in results.items():
        name = starts()[index].kernel.__name__
        if result.spill_bytes and name in HOT and architecture == HOME:
            found.append(f"{name} spills {result.spill_bytes} bytes: {label(starts()[index])}")
        if result.shared_bytes > SHARED_LIMIT_BYTES and architecture == HOME:
            found.append(
                f"{name} takes {result.shared_bytes} bytes of shared memory: {label(starts()[index])}"
            )
    return found


def main(path: Path) -> int:
    tasks = [(index, number) for index in range(len(starts())) for number in ARCHITECTURES]
    with ProcessPoolExecutor(max(os.cpu_count() or 1, 1)) as pool:
        results = dict(zip(tasks, pool.map(compiled, tasks, chunksize=5), strict=True))
    path.write_text(page(results))
    wrong = faults(results)
    print("\n".join([f"{len(tasks)} kernels compiled", *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
