"""Projected step times of Qwen3.8-27B on an RTX 3090, as a curve for the simulator; nothing was measured.

Run as `python -m quickdraft.bench.card_projection CURVE PAGE` (`make kernels` does): from the bytes, the
arithmetic and the kernel starts of every op (ops/cuda/work.py) come the seconds of a step per rows and
context. Every assumption is a line of NOTES, which lie in the file and are printed beside what is counted
with it. Needs torch and triton, the file it writes does not.
"""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from quickdraft.engine.measured_costs import SCHEMA
from quickdraft.models.footprint import Footprint
from quickdraft.models.known import QWEN_27B
from quickdraft.ops.cuda import work

ROWS: Final = (1, 2, 4, 8, 10, 11, 16, 17, 21, 22, 32, 33, 48, 64)  # both ends of the stairs
CONTEXTS: Final = (0, 2048, 25_000, 64_000, 112_000)
DRAFT_STARTS: Final = {"mtp": 30, "dflash2": 130}  # kernels of a pass, counted by hand from the layers' ops
NOTES: Final = (
    "projected, nothing measured: every op takes the longer of its bytes at 914 GB/s and its arithmetic (of "
    f"whole tiles) at 71 TFLOP/s, divided by {work.EFFICIENCY}, an assumed efficiency",
    f"every kernel start takes {work.START_SECONDS * 1e6:g} us more, assumed, in a captured graph; "
    "host time is 0",
    "keys and values in bfloat16, read from memory once by all tiles of a step; one sequence; all rows but "
    "the first are drafts, half of the last ones are replayed",
    "a pass of a drafter, with the whole head and the MTP layer in 16 bits: its bytes by the model's "
    "description at the same rates, and, estimated, "
    + ", ".join(f"{count} starts for {name}" for name, count in DRAFT_STARTS.items()),
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


@lru_cache
def step_seconds(rows: int, context: int, kv_dtype: str = "bfloat16") -> float:
    """A step of the target, drafting not included."""
    return sum(op.calls * op.projected_s for op in work.whole_step(rows, context, kv_dtype))


def pass_seconds(source: str) -> float:
    """One pass of a drafter."""
    served = Footprint(QWEN_27B)
    moved = {"mtp": served.mtp_bytes, "dflash2": served.draft_bytes}[source]()
    return moved / work.REACHABLE_BYTES / work.EFFICIENCY + DRAFT_STARTS[source] * work.START_SECONDS


def curve() -> dict[str, Any]:
    """The file's object, as engine/measured_costs.py writes one, and its notes."""
    return {
        "schema": SCHEMA,
        "notes": list(NOTES),
        "rows": list(ROWS),
        "contexts": list(CONTEXTS),
        "seconds": [[round(step_seconds(rows, context), 7) for rows in ROWS] for context in CONTEXTS],
        "passes": {source: round(pass_seconds(source), 7) for source in DRAFT_STARTS},
    }


def page() -> str:
    """The page of the projection: assumptions, step times, and the published points beside them."""
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
    passes = ", ".join(f"{name} {1e3 * one:.1f} ms" for name, one in made["passes"].items())
    lines += ["", f"A pass of a drafter, projected: {passes}.", "", COMPARED]
    lines.append("| rows | context | drafter | published, ms | projected, ms |")
    lines.append("|---|---|---|---|---|")
    return "\n".join([*lines, *comparison()]) + "\n"


def comparison() -> list[str]:
    """A table row for each published point."""
    lines = []
    for rows, context, passes, source, published in PUBLISHED:
        drafting = passes * pass_seconds(source) if passes else 0.0
        ours = 1e3 * (step_seconds(rows, context) + drafting)
        lines.append(f"| {rows} | {context} | {source} | {published:.1f} | {ours:.1f} |")
    return lines


def main(curve_path: Path, page_path: Path) -> int:
    curve_path.write_text(json.dumps(curve()) + "\n", "ascii")
    page_path.write_text(page(), "utf-8")
    print("\n".join([*NOTES, *comparison()]))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
