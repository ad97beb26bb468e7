"""`quickdraft inspect qwen3.8-27b --card 24`: the memory of a card, part by part, and the context that fits.

Shows models/card_plan.py for every drafter and both types of keys and values; decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from quickdraft.config import DEFAULT_MAX_SEQUENCES
from quickdraft.errors import ConfigError
from quickdraft.models.card_plan import CARD_DRAFTERS, CardPlan
from quickdraft.models.footprint import KV_DTYPES, Footprint

PLAN_ROWS: Final = 32  # what engine/memory_sizes.py takes on a card
PLAN_CONTEXT: Final = 65_536


def plans(footprint: Footprint, card_gib: int, context: int | None) -> list[CardPlan]:
    """Of each drafter, with the asked context or 64k."""
    memory, wanted = card_gib << 30, context or PLAN_CONTEXT
    return [CardPlan(footprint, drafter, memory, PLAN_ROWS, wanted) for drafter in CARD_DRAFTERS]


def describe_card(footprint: Footprint, card_gib: int, context: int | None) -> list[dict[str, Any]]:
    """The JSON of `card`: one object per drafter; ConfigError where the model does not fit at all."""
    return [
        {
            "drafter": plan.drafter,
            "memory_bytes": plan.memory_bytes,
            "kv_dtype": plan.footprint.kv_dtype,
            "verify_rows": plan.rows,
            "sequences": plan.sequences,
            "parts": [{"name": s.name, "bytes": s.bytes, "assumed": s.assumed} for s in plan.shares()],
            "kv_bytes": plan.pool_bytes,
            "context": plan.tokens,
            "most_context": min(plan.room_tokens, plan.footprint.sizes.context),
            "free_bytes": plan.free_bytes,
            "note": plan.note,
        }
        for plan in plans(footprint, card_gib, context)
    ]


def lines_card(footprint: Footprint, card_gib: int, context: int | None) -> Iterator[str]:
    """The same for people."""
    yield (
        f"memory plan for a card of {card_gib} GiB, one conversation, {PLAN_ROWS} verify rows (projected, "
        "not measured; checkpoints lie in the host's memory):"
    )
    for plan in plans(footprint, card_gib, context):
        yield f"  drafter {plan.drafter}, keys and values in {footprint.kv_dtype}"
        for share in plan.shares():
            yield f"    {share.name:<26}{_mib(share.bytes):>12}{'  assumed' if share.assumed else ''}"
        yield f"    {f'{plan.tokens:,} tokens of context':<26}{_mib(plan.pool_bytes):>12}"
        yield f"    {'free':<26}{_mib(plan.free_bytes):>12}"
        if plan.note:
            yield f"    {plan.note}"
        yield f"    longest context: {', '.join(_longest(plan, card_gib, 1))}"
        several = ", ".join(_longest(plan, card_gib, DEFAULT_MAX_SEQUENCES))
        yield f"    with {DEFAULT_MAX_SEQUENCES} conversations at a time: {several}"


def _longest(plan: CardPlan, card_gib: int, sequences: int) -> Iterator[str]:
    for kv_dtype in KV_DTYPES:
        other = Footprint(plan.footprint.sizes, kv_dtype)
        try:
            fits = CardPlan(
                other, plan.drafter, card_gib << 30, plan.rows, other.sizes.context, sequences
            ).tokens
        except ConfigError:
            fits = 0
        yield f"{fits:,} in {kv_dtype}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
