"""The step times of one RTX 3090 (24 GB, 936 GB/s) that serves Qwen3.8-27B in W4A16, as a cost curve.

Nothing here was measured by quickdraft. The measured points are those that the authors of the fastest stacks
for this card published (syv-ai, HyperQwen; 250 W), and a step of r rows after c tokens is taken to be
base(r) + slope(r) * c. The roofline is arithmetic over the model's description (models/footprint.py). Each
assumption is a line of NOTES or ROOF_NOTES, which are printed beside every number that rests on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from quickdraft.models.footprint import Footprint
from quickdraft.models.known import QWEN_27B
from quickdraft.speculate.cost_curve import StepTimes
from quickdraft.types import MAX_ROWS

# Published, milliseconds of a step.
PLAIN_MS: Final = 21.7  # 1 row, short context
MTP_MS: Final = 24.8  # 5 rows, four chained drafts of the MTP module included
DFLASH2_MS, DFLASH2_PASS_MS = 26.5, 3.0  # 8 rows, and the drafter's part of it
AT_25K_MS: Final = {8: 30.0, 16: 39.5, 19: 47.8, 21: 47.2}  # after 25,000 tokens, drafter included
AT_50K_16_MS: Final = 48.2
ROW_AT_25K_MS: Final = 1.0  # attention of a further row after 25,000 tokens
ROW_GFLOP: Final = 48.7
REACHABLE_BYTES, REACHABLE_FLOPS = 914e9, 71e12  # of the card, a second

TILE_ROWS: Final = 16  # the weight kernel computes rows in groups of so many
FAR: Final = 25_000

NOTES: Final = (
    "published: 1 row 21.7 ms and 8 rows with DFlash2 26.5 ms near context 0, 5 rows with four MTP drafts "
    "24.8; at 25k tokens 8, 16, 19, 21 rows with DFlash2 30, 39.5, 47.8, 47.2; 16 rows at 50k 48.2",
    "DFlash2's 3 ms are taken off these; an MTP draft is what is left of 24.8 ms over 5 interpolated rows",
    "linear in the context: through two points each for 8 and 16 rows, between them for others; one row by "
    "the bytes of its keys and values alone; 112k is far beyond anything measured",
    "beyond 16 rows: 1 ms of attention a row at 25k; the second group of 16 rows as the mean of what is "
    "left of 19 and 21 rows, further groups by as much again, but never under the arithmetic of whole "
    "groups (48.7 GFLOP a row, 71 TFLOP/s) and the 5.4 ms a plain step takes beyond its bytes",
)
ROOF_NOTES: Final = (
    "a step takes the longer of its bytes at 914 GB/s and its arithmetic at 71 TFLOP/s, and nothing else: "
    "no launch, no host, no tile that is half empty; keys and values in int8",
    "a pass of a drafter takes its bytes at 914 GB/s",
)


def measured_times() -> StepTimes:
    """The curve through the published points, by NOTES; of 1, 5 and 8 rows and both ends of each group."""
    bases = {1: PLAIN_MS, 8: DFLASH2_MS - DFLASH2_PASS_MS}
    slopes = {1: _kv_slope_ms(), 8: (AT_25K_MS[8] - DFLASH2_PASS_MS - bases[8]) / FAR}
    slopes[16] = (AT_50K_16_MS - AT_25K_MS[16]) / FAR
    bases[16] = AT_25K_MS[16] - DFLASH2_PASS_MS - slopes[16] * FAR
    slope = ROW_AT_25K_MS / FAR
    slopes |= {rows: slopes[16] + slope * (rows - 16) for rows in (17, 19, 21, 32, 33, 48, 49, MAX_ROWS)}
    beyond = [AT_25K_MS[rows] - DFLASH2_PASS_MS - slopes[rows] * FAR for rows in (19, 21)]
    rise = sum(beyond) / len(beyond) - bases[16]
    rows = (1, 8, 16, 17, 32, 33, 48, 49, MAX_ROWS)
    for count in rows[3:]:
        bases[count] = _group_base_ms(count, bases[16], rise)
    mtp = (MTP_MS - (bases[1] + (bases[8] - bases[1]) * 4 / 7)) / 4
    return StepTimes(
        rows,
        (0, FAR),
        tuple(tuple((bases[r] + slopes[r] * c) / 1000 for r in rows) for c in (0, FAR)),
        {"mtp": mtp / 1000, "dflash2": DFLASH2_PASS_MS / 1000},
    )


def roofline_times(contexts: Sequence[int]) -> StepTimes:
    """What the card needs at least after these contexts, by ROOF_NOTES."""
    served, rows = Footprint(QWEN_27B, "int8"), tuple(range(1, MAX_ROWS + 1))

    def line(context: int) -> tuple[float, ...]:
        moved = served.step_bytes(context) / REACHABLE_BYTES
        arithmetic = 2 * served.step_macs(context, 1) / REACHABLE_FLOPS  # of a row
        return tuple(max(moved, count * arithmetic) for count in rows)

    passes = {"mtp": served.mtp_bytes(), "dflash2": served.draft_bytes()}
    return StepTimes(
        rows,
        tuple(contexts),
        tuple(map(line, contexts)),
        {source: size / REACHABLE_BYTES for source, size in passes.items()},
    )


def _kv_slope_ms() -> float:
    """Milliseconds a step of one row takes for the keys and values of one token."""
    return 1000 * Footprint(QWEN_27B, "int8").kv_bytes_per_token / REACHABLE_BYTES


def _group_base_ms(rows: int, first: float, rise: float) -> float:
    """Beyond one group of rows: by as much for each further group, but not under its arithmetic."""
    groups = math.ceil(rows / TILE_ROWS)
    whole = groups * TILE_ROWS * ROW_GFLOP * 1e9 / REACHABLE_FLOPS
    beyond_bytes = PLAIN_MS - 1000 * Footprint(QWEN_27B, "int8").step_bytes(0) / REACHABLE_BYTES
    return max(first + rise * (groups - 1), beyond_bytes + 1000 * whole)
