"""Projected step times of Qwen3.8-27B on an RTX 3090, as a curve for the simulator; nothing was measured.

Run as `python -m quickdraft.bench.card_projection CURVE PAGE` (`make kernels` does): from the bytes, the
arithmetic and the kernel starts of every op (card_steps.py) come the seconds of a step per rows and
context. Every assumption is a line of NOTES, which lie in the file and are printed beside what is counted
with it. What was hoped for stands beside what comes out. Needs torch and triton, the file it writes does not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from quickdraft.bench import card_steps
from quickdraft.bench.card_steps import DRAFTERS, EFFICIENCY, START_SECONDS, pass_works, step_works
from quickdraft.engine.measured_costs import SCHEMA

ROWS: Final = (1, 2, 4, 8, 10, 11, 16, 17, 21, 22, 32, 33, 48, 64)  # both ends of the stairs
CONTEXTS: Final = (0, 2048, 25_000, 64_000, 112_000)
DRAFT_CONTEXT: Final = 2048  # behind which a pass is counted for the curve
NOTES: Final = (
    "projected, nothing measured: every op takes the longer of its bytes at 914 GB/s and its arithmetic (of "
    f"whole tiles) at 71 TFLOP/s, divided by {EFFICIENCY}, an assumed efficiency",
    f"every kernel start takes {START_SECONDS * 1e6:g} us more, assumed, in a captured graph; host time is 0",
    "the program that serves, one sequence, in the shape it is captured in (rows filled up to 1, 2, 4, .. "
    "64); keys and values in bfloat16, read from memory once by all tiles of a start; all rows but the first "
    "are drafts, half as many are replayed",
    "a pass of a drafter with the whole head, the MTP layer in 16 bits, DFlash2's linears in 4, behind "
    f"{DRAFT_CONTEXT} tokens; what follows the text between passes is not counted",
)
GREETING: Final = """# Qwen3.8-27B on one RTX 3090, projected

Written by `make kernels`. **Every time on this page is projected, none was measured**: it is what
quickdraft's CUDA kernels would take by their bytes, arithmetic and starts ([kernels](kernels.md)). The
simulator has it as `quickdraft bench policy --curve rtx3090-projected`.
"""
COMPARED: Final = """## Beside what others published

Steps of the fastest stacks for this card, measured by their authors at 250 W, the drafter's part included.
Their MTP drafts read a smaller head than the whole one that is counted here.
"""
# ms that others published for this card, at 250 W: rows, context, drafter's part of a step included
PUBLISHED: Final = (
    (1, 0, 0, "off", 21.7), (5, 0, 4, "mtp", 24.8), (8, 0, 1, "dflash2", 26.5),
    (8, 25_000, 1, "dflash2", 30.0),
    (16, 25_000, 1, "dflash2", 39.5), (19, 25_000, 1, "dflash2", 47.8), (21, 25_000, 1, "dflash2", 47.2),
    (16, 50_000, 1, "dflash2", 48.2),
)  # fmt: skip


# hoped for
PLAIN_TOKENS: Final = 50  # a second
BLOCK_MS: Final = 24.0  # of 16 rows behind 25,000 tokens
COPYING_TOKENS: Final = 600  # a second
HOPED: Final = """## What was hoped for, and what comes out

A roof is divided by the assumed efficiency, and starts are added; *needed* is the efficiency at which the
number would be reached with as many starts. Copying: every drafted token is kept, and drafting (a look-up)
takes no time, so a step of n rows gives n tokens; the best of the row counts above.
"""


def step_seconds(rows: int, context: int) -> float:
    """A step of the target, drafting not included."""
    return card_steps.seconds(step_works(rows, context))


def pass_seconds(source: str, context: int = DRAFT_CONTEXT) -> float:
    """One pass of a drafter."""
    return card_steps.seconds(pass_works(source, context))


def curve() -> dict[str, Any]:
    """The file's object, as engine/measured_costs.py writes one, and its notes."""
    return {
        "schema": SCHEMA,
        "notes": list(NOTES),
        "rows": list(ROWS),
        "contexts": list(CONTEXTS),
        "seconds": [[round(step_seconds(rows, context), 7) for rows in ROWS] for context in CONTEXTS],
        "passes": {source: round(pass_seconds(source), 7) for source in DRAFTERS},
    }


def page() -> str:
    """The page of the projection: assumptions, step times, hopes, and the published points beside them."""
    made = curve()
    lines = [
        GREETING,
        "## Assumptions\n",
        *(f"- {note}" for note in NOTES),
        "",
        "## Step times, projected, ms\n",
    ]
    lines.append("| context | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |")
    lines.append("|---" * (len(ROWS) + 1) + "|")
    for context, seconds in zip(CONTEXTS, made["seconds"], strict=True):
        lines.append(f"| {context} | " + " | ".join(f"{1e3 * one:.1f}" for one in seconds) + " |")
    passes = ", ".join(
        f"{source} {1e3 * pass_seconds(source):.1f} ms in "
        f"{card_steps.starts(pass_works(source, DRAFT_CONTEXT))} kernels"
        for source in DRAFTERS
    )
    lines += ["", f"A pass of a drafter behind {DRAFT_CONTEXT:,} tokens, projected: {passes}.", "", HOPED]
    lines += [*hopes(), "", *copying(), "", COMPARED]
    lines.append("| rows | context | drafter | published, ms | projected, ms |")
    lines.append("|---|---|---|---|---|")
    return "\n".join([*lines, *comparison()]) + "\n"


def hopes() -> list[str]:
    """A line for each number that was hoped for, with the arithmetic."""
    plain, fits = step_seconds(1, DRAFT_CONTEXT), step_seconds(16, 25_000)
    rate, rows = max((count / step_seconds(count, 25_000), count) for count in ROWS)
    short, _ = max((count / step_seconds(count, 25_000), count) for count in ROWS if count <= 16)
    return [
        f"- Plain, {PLAIN_TOKENS} tokens/s: {_verdict(1 / plain >= PLAIN_TOKENS)}, {1 / plain:.1f} behind "
        f"{DRAFT_CONTEXT:,} tokens: {_arithmetic(1, DRAFT_CONTEXT, 1 / PLAIN_TOKENS)}.",
        f"- A step of 16 rows behind 25,000 tokens in {BLOCK_MS:g} ms: {_verdict(1e3 * fits <= BLOCK_MS)}, "
        f"{1e3 * fits:.1f} ms: {_arithmetic(16, 25_000, BLOCK_MS / 1e3)}.",
        f"- Copying, {COPYING_TOKENS} tokens/s: behind 25,000 tokens {_verdict(rate >= COPYING_TOKENS)}, "
        f"{rate:.0f} with {rows} rows: {_arithmetic(rows, 25_000, rows / COPYING_TOKENS)}. With at most 16 "
        f"rows {_verdict(short >= COPYING_TOKENS)}, {short:.0f}.",
        f"- A best block length beyond 16: {_verdict(rows > 16)}, {rows} rows copy "
        f"{100 * (rate / short - 1):.0f} % faster than the best of at most 16.",
    ]


def _verdict(reached: bool) -> str:
    return "**reached in projection**" if reached else "**not reached in projection**"


def _arithmetic(rows: int, context: int, wanted: float) -> str:
    """How a step's projection comes about, and the efficiency at which it would take `wanted` seconds."""
    works = step_works(rows, context)
    roof, starts = card_steps.roof_seconds(works), card_steps.starts(works)
    started = starts * START_SECONDS
    needed = roof / (wanted - started)
    return (
        f"{1e3 * roof:.1f} ms at the roof, / {EFFICIENCY} = {1e3 * roof / EFFICIENCY:.1f}, and {starts} "
        f"starts of {START_SECONDS * 1e6:g} us = {1e3 * started:.1f}; needed {needed:.2f}"
    )


def copying() -> list[str]:
    """A table row for each context: the best number of rows for verbatim copying, and tokens a second."""
    lines = [
        "| context | best rows up to 16 | tokens/s | best rows | tokens/s | more |",
        "|---|---|---|---|---|---|",
    ]
    for context in CONTEXTS:
        rates = {count: count / step_seconds(count, context) for count in ROWS}
        short = max((count for count in ROWS if count <= 16), key=rates.__getitem__)
        best = max(ROWS, key=rates.__getitem__)
        more = 100 * (rates[best] / rates[short] - 1)
        lines.append(
            f"| {context} | {short} | {rates[short]:.0f} | {best} | {rates[best]:.0f} | {more:+.0f} % |"
        )
    return lines


def comparison() -> list[str]:
    """A table row for each published point."""
    lines = []
    for rows, context, passes, source, published in PUBLISHED:
        drafting = passes * pass_seconds(source, context) if passes else 0.0
        ours = 1e3 * (step_seconds(rows, context) + drafting)
        lines.append(f"| {rows} | {context} | {source} | {published:.1f} | {ours:.1f} |")
    return lines


def main(curve_path: Path, page_path: Path) -> int:
    curve_path.write_text(json.dumps(curve()) + "\n", "ascii")
    page_path.write_text(page(), "utf-8")
    print("\n".join([*NOTES, *hopes(), *comparison()]))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
