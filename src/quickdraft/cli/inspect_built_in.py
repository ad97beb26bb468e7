"""`quickdraft inspect qwen3.8-27b`: memory and step times of a model that no file is needed for.

Step times are roofs (bench/roofline.py): the bytes and multiply-adds of models/footprint.py on the
two rates of a card's data sheet. No kernel is faster; how close one comes is not told here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from quickdraft.bench.roofline import CARDS, Card, roof_seconds
from quickdraft.cli.inspect_card import describe_card, lines_card
from quickdraft.config import check_range
from quickdraft.errors import ConfigError
from quickdraft.models.footprint import KEPT_CHECKPOINTS, KV_DTYPES, RESERVE_BYTES, Footprint
from quickdraft.models.known import QWEN_27B
from quickdraft.ops.interface import KVDtype

SCHEMA: Final = "quickdraft-inspect-1"
ROWS: Final = (1, 4, 8, 16, 32)
VERIFY_ROWS: Final = (8, 16)
CONTEXTS: Final = (2048, 25000, 112000)
CARD_NAMES: Final = ("RTX 3090", "RTX 4090", "RTX 5090")
DEFAULT_MEMORY_BYTES: Final = 24 << 30
_KV_NAMES: Final[dict[str, KVDtype]] = {"bf16": "bfloat16", "bfloat16": "bfloat16", "int8": "int8"}


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for, checked."""

    memory_bytes: int
    context: int | None
    footprint: Footprint
    card_gib: int | None = None

    @property
    def contexts(self) -> list[int]:
        return sorted({*CONTEXTS, *([self.context] if self.context is not None else [])})


def options_of(
    memory_bytes: int | None, context: int | None, kv_dtype: str | None, card_gib: int | None = None
) -> Options:
    """ConfigError for a context beyond the model's own or an unknown type of keys and values."""
    if context is not None:
        check_range("context", context, 1, QWEN_27B.context)
    name = "bf16" if kv_dtype is None else kv_dtype
    if name not in _KV_NAMES:
        raise ConfigError("bad value for 'kv_dtype'", got=repr(name[:80]), expected="bf16 or int8")
    footprint = Footprint(QWEN_27B, _KV_NAMES[name])
    return Options(memory_bytes or DEFAULT_MEMORY_BYTES, context, footprint, card_gib)


def step_ms(footprint: Footprint, card: Card, rows: int, context: int) -> float:
    """Least milliseconds of a step of the target: max(bytes / bandwidth, multiply-adds / peak), everything
    computed at the rate of fp16 tensor cores. What drafts cost is not in it."""
    moved, macs = footprint.step_bytes(context), footprint.step_macs(context, rows)
    return 1e3 * roof_seconds(moved, macs, card.gigabytes_per_second * 1e9, card.macs_per_second)


def describe_built_in(options: Options) -> dict[str, Any]:
    """The JSON shape `quickdraft-inspect-1`."""
    footprint = options.footprint
    card: dict[str, Any] = {}
    if options.card_gib is not None:
        card["card"] = describe_card(footprint, options.card_gib, options.context)
    return card | {
        "schema": SCHEMA,
        "parts": [{"name": p.name, "bytes": p.bytes, "format": p.format} for p in footprint.parts()],
        "kv_bytes_per_token": footprint.kv_bytes_per_token,
        "state_bytes_per_sequence": footprint.state_bytes_per_sequence,
        "checkpoint_bytes": footprint.checkpoint_bytes,
        "max_context": {
            str(rows): footprint.longest_context(options.memory_bytes, rows) for rows in VERIFY_ROWS
        },
        "step_ms": {
            card.name: {
                str(rows): {
                    str(context): round(step_ms(footprint, card, rows, context), 3)
                    for context in options.contexts
                }
                for rows in ROWS
            }
            for card in _cards()
        },
    }


def lines_built_in(options: Options) -> Iterator[str]:
    """The same for people, and what the numbers stand for."""
    footprint = options.footprint
    yield "model: qwen3.8-27b (built-in description; no weights are here)"
    yield f"weights as served, and the drafter's context: {_gb(footprint.part_bytes)}"
    for part in footprint.parts():
        yield f"  {part.name:<21}{_mb(part.bytes):>12}  {part.format}"
    yield (
        f"keys and values in {footprint.kv_dtype}: {footprint.kv_bytes_per_token} bytes per token, "
        f"and {footprint.mtp_kv_bytes_per_token} for the MTP layer"
    )
    yield (
        f"recurrent state, fp32: {_mb(footprint.state_bytes_per_sequence)} per sequence, "
        f"{_mb(footprint.checkpoint_bytes)} per checkpoint; a drafted row keeps "
        f"{_mb(footprint.history_bytes_per_row)}"
    )
    for kv_dtype in KV_DTYPES:
        other = Footprint(footprint.sizes, kv_dtype)
        fits = ", ".join(
            f"{other.longest_context(options.memory_bytes, rows):,} with {rows} verify rows"
            for rows in VERIFY_ROWS
        )
        yield f"longest context in {_gib(options.memory_bytes)}, {kv_dtype}: {fits}"
    if options.context is not None:
        needs = ", ".join(
            f"{_gib(footprint.bytes_at(options.context, rows))} with {rows} verify rows"
            for rows in VERIFY_ROWS
        )
        yield f"memory at {options.context:,} tokens, {footprint.kv_dtype}: {needs}"
    yield (
        f"  (one sequence, {KEPT_CHECKPOINTS} checkpoints, all of the above, "
        f"and {_gib(RESERVE_BYTES)} for the device's own)"
    )
    if options.card_gib is not None:
        yield from lines_card(footprint, options.card_gib, options.context)
    yield from _step_lines(options)


def _step_lines(options: Options) -> Iterator[str]:
    footprint = options.footprint
    yield f"least time of a step by the roofline, ms ({footprint.kv_dtype} keys and values):"
    for card in _cards():
        yield f"  {card.name}: {card.gigabytes_per_second:g} GB/s, {card.fp16_teraflops:g} TFLOP/s fp16"
        yield f"  {'rows':>8}" + "".join(f"{f'at {context:,}':>13}" for context in options.contexts)
        for rows in ROWS:
            times = (step_ms(footprint, card, rows, context) for context in options.contexts)
            yield f"  {rows:>8}" + "".join(f"{time:>13.1f}" for time in times)
        bandwidth = card.gigabytes_per_second * 1e6
        yield (
            f"    beside it, a dflash2 block {footprint.draft_bytes() / bandwidth:.1f}, "
            f"an mtp draft {footprint.mtp_bytes() / bandwidth:.1f}"
        )


def _cards() -> list[Card]:
    return [card for card in CARDS if card.name in CARD_NAMES]


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
