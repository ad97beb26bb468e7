"""What is planned for a card that is not here: its memory, and its step times."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quickdraft.bench import card_projection
from quickdraft.bench.curves import PROJECTED_FILE, at_context, open_curve
from quickdraft.cli.main import app
from quickdraft.errors import ConfigError
from quickdraft.models import card_plan
from quickdraft.models.card_plan import CardPlan
from quickdraft.models.footprint import Footprint
from quickdraft.models.known import QWEN_27B
from quickdraft.ops.cuda import attention, linear, weights
from quickdraft.ops.interface import KVDtype
from quickdraft.state.leases import places_for

LONG = 65_536
CARD = 24 << 30


def plan(
    drafter: card_plan.CardDrafter, kv: KVDtype, wanted: int, memory: int = CARD, rows: int = 32,
    sequences: int = 1,
) -> CardPlan:  # fmt: skip
    return CardPlan(Footprint(QWEN_27B, kv), drafter, memory, rows, wanted, sequences)


def test_the_card_is_what_torch_sees_of_a_3090() -> None:
    assert CARD - card_plan.DRIVER_BYTES == 24_268 << 20


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize(("drafter", "sequences"), [("mtp", 1), ("mtp", 8), ("dflash2", 1), ("dflash2", 4)])
def test_64k_in_bfloat16_fits_24_gib_beside_a_drafter(
    drafter: card_plan.CardDrafter, sequences: int, rows: int
) -> None:
    """What issue and guide promise: so many conversations that share the context."""
    found = plan(drafter, "bfloat16", LONG, rows=rows, sequences=sequences)
    assert (found.tokens, found.note) == (LONG, "") and found.free_bytes > 0
    if sequences == 1:
        assert found.free_bytes > 1 << 30


@pytest.mark.parametrize(("drafter", "rows", "thousands"), [
    ("mtp", 16, 208), ("mtp", 32, 206), ("dflash2", 16, 197), ("dflash2", 32, 195),
])  # fmt: skip
def test_int8_keys_and_values_about_double_the_context(
    drafter: card_plan.CardDrafter, rows: int, thousands: int
) -> None:
    found = plan(drafter, "int8", QWEN_27B.context, rows=rows)
    assert found.tokens // 1000 == thousands
    assert 1.9 < found.tokens / plan(drafter, "bfloat16", QWEN_27B.context, rows=rows).tokens < 2.05


def test_the_guide_has_the_figures_of_the_plan() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "card.md").read_text("utf-8")

    def thousands(drafter: card_plan.CardDrafter, sequences: int) -> str:
        kinds: list[KVDtype] = ["bfloat16", "int8"]
        longest = [plan(drafter, kv, QWEN_27B.context, sequences=sequences).tokens for kv in kinds]
        return " / ".join(f"{tokens // 1000},000" for tokens in longest)

    mtp, dflash2 = (plan(drafter, "bfloat16", LONG) for drafter in ("mtp", "dflash2"))
    for name, values in {
        "65,536 tokens of context in bfloat16": [
            f"{each.pool_bytes / 2**20:,.0f}" for each in (mtp, dflash2)
        ],
        "free": [f"{each.free_bytes / 2**20:,.0f}" for each in (mtp, dflash2)],
        "longest context, bfloat16 / int8 keys and values": [thousands("mtp", 1), thousands("dflash2", 1)],
        "the same with 8 conversations at a time, the default of `serve`": [
            thousands("mtp", 8), thousands("dflash2", 8),
        ],
    }.items():  # fmt: skip
        assert f"| {name} | {' | '.join(values)} |" in page


def test_checkpoints_take_nothing_of_the_card() -> None:
    names = [share.name for share in plan("mtp", "bfloat16", LONG).shares()]
    assert not any("checkpoint" in name for name in names)


def test_places_of_a_block_drafter_are_those_of_the_engine() -> None:
    window = QWEN_27B.drafter.window if QWEN_27B.drafter else 0
    for blocks, sequences in [(100, 1), (4096, 1), (4096, 8), (16384, 3)]:
        found = plan("dflash2", "bfloat16", LONG, sequences=sequences).places(blocks)
        assert found == places_for(window, blocks, sequences, card_plan.CHUNK_ROWS)


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
def test_a_context_that_does_not_fit_is_lowered_to_the_longest(kv: KVDtype) -> None:
    found = plan("mtp", kv, QWEN_27B.context)
    assert LONG < found.tokens < QWEN_27B.context and found.tokens % 16 == 0
    assert 0 <= found.free_bytes < found.block_bytes
    assert f"lowered from {QWEN_27B.context:,} to {found.tokens:,}" in found.note


def test_a_card_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit on the card"):
        _ = plan("dflash2", "int8", 16, 16 << 30).tokens


def test_what_the_plan_assumes_of_the_kernels() -> None:
    """Its bounds are those of ops/cuda, which it may not import."""
    assert card_plan.ATTENTION_PARTS_BYTES == attention.PART_BYTES
    assert card_plan.SPLIT_ROWS == linear.TILE_ROWS
    shapes = [(out, blocks) for out in (96, 5120, 14336, 16384, 34816) for blocks in (40, 48, 136)]
    columns = [out * weights.splits_of(out, blocks) for out, blocks in shapes]
    split = [c for c, (out, _) in zip(columns, shapes, strict=True) if c > out]  # the others need no pieces
    assert split and max(split) <= card_plan.SPLIT_COLUMNS


def test_inspect_tells_the_plan() -> None:
    def said(*more: str) -> str:
        done = CliRunner().invoke(app, ["inspect", "qwen3.8-27b", "--card", "24", *more])
        assert done.exit_code == 0, done.output
        return done.output

    cards = json.loads(said("--output", "json", "--context", "200000"))["card"]
    assert [card["drafter"] for card in cards] == list(card_plan.CARD_DRAFTERS)
    for card in cards:
        whole = sum(part["bytes"] for part in card["parts"]) + card["kv_bytes"] + card["free_bytes"]
        assert whole == card["memory_bytes"] and card["context"] == card["most_context"]
    text = said()
    assert "projected" in text and "65,536 tokens of context" in text and "assumed" in text


def test_the_projected_curve_is_what_the_kernels_make_of_it_and_says_so() -> None:
    """The shipped file and the page are remade; `make projection` where this fails."""
    curve = open_curve("rtx3090-projected", pytest.fail)
    text = resources.files("quickdraft.bench").joinpath("data", PROJECTED_FILE).read_text("ascii")
    assert json.loads(text) == json.loads(json.dumps(card_projection.curve()))
    assert any("projected, nothing measured" in note for note in curve.assumptions)
    page = Path(__file__).parents[2] / "docs" / "reference" / "projection.md"
    assert page.read_text("utf-8") == card_projection.page()
    roof = open_curve("rtx3090-roofline", pytest.fail)
    for context in (2_000, 25_000, 112_000):
        assert all(curve.row_seconds(n, context) > at_context(roof, context).base[n] for n in range(1, 65))


def test_the_guide_has_the_projected_times() -> None:
    """In whole milliseconds, near context 0, behind 25,000 and behind 64,000 tokens."""
    text = (Path(__file__).parents[2] / "docs" / "guides" / "card.md").read_text("utf-8")
    lines = []
    for rows in (1, 8, 16, 32):
        times = (card_projection.step_seconds(rows, context) for context in (0, 25_000, 64_000))
        lines.append(f"| {rows} rows | " + " | ".join(f"{1e3 * one:.0f} ms" for one in times) + " |")
    assert all(line in text for line in lines), "docs/guides/card.md should have\n" + "\n".join(lines)
