"""`make kernels`: compiles every kernel start for every architecture and writes docs/reference/kernels.md.

Run as `python -m quickdraft.bench.kernels_page PAGE`, without TRITON_INTERPRET; no GPU is needed. Says
of every number that it is projected or compiled, not measured. Exits with 1 where a hot kernel spills or a
kernel does not fit. The page carries a digest of what was compiled, so that a test sees without compiling
whether it is out of date.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Final

from quickdraft.bench import card_steps
from quickdraft.bench.card_steps import Work
from quickdraft.ops.cuda.compile import (
    ARCHITECTURES,
    Compiled,
    compile_start,
    compiler,
    digest,
    key_of,
    label,
)
from quickdraft.ops.cuda.launch import Started
from quickdraft.ops.cuda.variants import other_starts
from quickdraft.ops.interface import KVDtype

SHARED_LIMIT_BYTES: Final = 99 * 1024
ROOMY: Final = (80, 90)  # architectures with more
HOT: Final = ("grouped_linear", "attend_span", "delta_rule", "add_pieces")
KINDS: Final[tuple[KVDtype, ...]] = ("bfloat16", "int8")
STEPS: Final = ((1, 2048), (4, 25_000), (16, 25_000), (32, 25_000), (64, 25_000))
PREFILL: Final = (512, 8192)
DRAFT_CONTEXT: Final = 2048
HOME: Final = 86
MOST_BEYOND: Final = 1.1  # of the minimum
GREETING: Final = """# Kernels of the CUDA backend

Written by `make kernels`, which compiles every kernel start below ahead of time, without a GPU. Registers and
spills are ptxas's, shared memory is Triton's. **Nothing on this page was measured on a card**: times are
*projected* from bytes and arithmetic, at the roof of an RTX 3090 (914 GB/s reachable, 71 TFLOP/s for float16
with float32 sums).
"""
STEPS_TEXT: Final = f"""## Projected step times

Qwen3.8-27B, weights in 4 bits (groups of 128), head in 8. The roof takes each op's bytes and arithmetic (of
whole tiles) alone; *projected* divides by {card_steps.EFFICIENCY}, an assumed efficiency, and adds
{card_steps.START_SECONDS * 1e6:g} µs for each kernel start, assumed for a captured graph. More rows and
contexts: [projection](projection.md).
"""
WORK_TEXT: Final = """## A step of 16 rows behind 25,000 tokens

The model's own program, recorded over tensors without memory by the loader and the model that serve, and run
twice: from the second step on norms and gates write the 16-bit copies that linears read. Bytes are distinct
ones that each kernel start reads or writes, by formulas that a test holds equal to what the kernels touch in
Triton's interpreter; the minimum is every input of the op read once and every output written once. Beyond it
are rows that fill up a tile, pieces of a sum or spans that one kernel writes and the next reads (most of it
stays in the card's cache), and pending rows that are read again to be kept. Arithmetic is of whole tiles.
"""
PASSES_TEXT: Final = f"""## A pass of a drafter, behind {DRAFT_CONTEXT:,} tokens

Recorded likewise: one chained token of the MTP module (16 bits, as checkpoints have it), one block of DFlash2
(linears in 4 bits). The target's whole head is read each time.
"""
KERNELS_TEXT: Final = f"""## Compiled for {", ".join(f"sm_{number}" for number in ARCHITECTURES)}

A program may have 99 KB of shared memory and 255 registers a thread on a 3090.
"""
WORK_HEAD: Final = (
    "| op | shape | calls | kernels a call | MB a call | of the minimum | GFLOP a call | of the minimum "
    "| roof, µs | all calls, ms |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


@lru_cache
def starts() -> tuple[Started, ...]:
    """Every kernel start that differs from the others in machine code."""
    found: dict[str, Started] = {}
    steps = [(*step, True) for step in STEPS] + [(*PREFILL, False)]
    for kind, (rows, context, drafted) in product(KINDS, steps):
        _add(found, card_steps.step_works(rows, context, kind, drafted=drafted))
    for source in card_steps.DRAFTERS:
        _add(found, card_steps.pass_works(source, DRAFT_CONTEXT))
    for start in other_starts():
        found.setdefault(key_of(start), start)
    return tuple(found[key] for key in sorted(found))


def _add(found: dict[str, Started], works: Iterable[Work]) -> None:
    for work in works:
        for start in work.call.starts:
            found.setdefault(key_of(start), start)


def compiled(task: tuple[int, int]) -> Compiled:
    """Start number `task[0]` for sm_`task[1]`; in a process of its own."""
    return compile_start(starts()[task[0]], task[1])


def digest_line(version: str = "") -> str:
    """What the table of compiled kernels was made from; `version` of triton: the one that is installed."""
    version = version or compiler()
    return f"Compiled by triton {version} from sources and configurations `{digest(starts(), version)}`."


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


def work_rows(works: Iterable[Work], name: str) -> list[str]:
    """A table row for each kind of op, and one for all."""
    works = list(works)
    lines = [
        f"| {op.call.name} | {op.call.shape} | {op.calls} | {len(op.call.starts)} "
        f"| {op.call.traffic.moved / 1e6:.2f} | {op.call.traffic.moved / op.call.traffic.least:.2f} "
        f"| {_flops(op)} | {op.roof_s * 1e6:.0f} | {op.calls * op.roof_s * 1e3:.2f} |"
        for op in works
    ]
    moved, least = (
        sum(op.calls * part for op, part in zip(works, parts, strict=True))
        for parts in (
            [op.call.traffic.moved for op in works], [op.call.traffic.least for op in works]
        )
    )  # fmt: skip
    total = card_steps.roof_seconds(works) * 1e3
    lines.append(
        f"| **{name}** | | {sum(op.calls for op in works)} | {card_steps.starts(works)} in all "
        f"| {moved / 1e6:.0f} in all | {moved / least:.2f} | | | | **{total:.2f}** |"
    )
    return lines


def _flops(op: Work) -> str:
    """Of whole tiles, and beside those of the rows; nothing for ops that are all bytes."""
    call = op.call
    return f"{call.flops / 1e9:.2f} | {call.flops / call.least_flops:.2f}" if call.flops else " | "


def step_rows() -> list[str]:
    lines = []
    for kind, (rows, context) in product(KINDS, STEPS):
        works = card_steps.step_works(rows, context, kind)
        roof, projected = card_steps.roof_seconds(works), card_steps.seconds(works)
        lines.append(f"| {rows} | {context} | {kind} | {roof * 1e3:.1f} | {projected * 1e3:.1f} |")
    return lines


def projected_part() -> str:
    """All of the page that needs no compiler."""
    steps = [
        "| rows | context | keys and values | roof, ms | projected, ms |",
        "|---|---|---|---|---|",
        *step_rows(),
    ]
    works = [*WORK_HEAD, *work_rows(card_steps.step_works(16, 25_000), "a step")]
    passes = [*WORK_HEAD]
    for source in card_steps.DRAFTERS:
        passes += work_rows(card_steps.pass_works(source, DRAFT_CONTEXT), f"a pass of {source}")
    tables = "\n".join(steps), WORK_TEXT, "\n".join(works), PASSES_TEXT, "\n".join(passes)
    return "\n\n".join(part.strip() for part in (GREETING, STEPS_TEXT, *tables)) + "\n\n"


def page(results: dict[tuple[int, int], Compiled]) -> str:
    """The whole page."""
    kernels = [
        "| kernel | configuration | registers, sm_86 | most registers | spilled bytes | shared KB, sm_86 |",
        "|---|---|---|---|---|---|",
        *kernel_rows(results),
    ]
    parts = KERNELS_TEXT.strip(), digest_line(), "\n".join(kernels)
    return projected_part() + "\n\n".join(parts) + "\n"


def faults(results: dict[tuple[int, int], Compiled]) -> list[str]:
    """What must not be: a hot kernel that spills, or one that does not fit a 3090."""
    found = []
    for (index, architecture), result in results.items():
        name = starts()[index].kernel.__name__
        if result.spill_bytes and name in HOT and architecture == HOME:
            found.append(f"{name} spills {result.spill_bytes} bytes: {label(starts()[index])}")
        if result.shared_bytes > SHARED_LIMIT_BYTES and architecture not in ROOMY:
            found.append(
                f"{name} takes {result.shared_bytes} bytes of shared memory on sm_{architecture}: "
                f"{label(starts()[index])}"
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
