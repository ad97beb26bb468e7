"""Break-even by the cost curve, its table, and the picture."""

from __future__ import annotations

import builtins
import io
from pathlib import Path

import pytest
from rich.console import Console

from quickdraft.bench.break_even import BreakEven, print_break_even, shares
from quickdraft.bench.plot import check_plot, draw
from quickdraft.bench.report import BenchResult, StageResult, WorkloadResult
from quickdraft.errors import ConfigError, UnsupportedError
from quickdraft.speculate.costs import ConstantCosts
from quickdraft.types import Speculation

BREAK_EVEN = BreakEven(
    ConstantCosts(0.5, {"mtp": 0.1, "dflash2": 0.25}), ("lookup", "mtp", "dflash2"), {"mtp": 3, "dflash2": 7}
)


@pytest.mark.parametrize(
    ("stage", "needed"),
    [
        ("off", {}),
        ("lookup@16", {2: 1.5, 4: 2.5, 8: 4.5, 16: 8.5}),
        ("mtp", {2: 1.6, 4: 2.8}),  # a pass for each of 1 and 3 tokens; it drafts no more
        ("dflash2", {2: 1.75, 4: 2.75, 8: 4.75}),  # one pass for a block
        ("dflash2+lookup@16", {2: 1.75, 4: 2.75, 8: 4.75, 16: 8.75}),
        ("mtp+lookup@8", {2: 1.6, 4: 2.8, 8: 4.8}),  # the tail is not the module's
        ("auto", {2: 1.75, 4: 2.8, 8: 4.8, 16: 8.8}),  # the dearest of what may draft
    ],
)
def test_a_block_must_win_what_it_and_its_draft_cost(stage: str, needed: dict[int, float]) -> None:
    speculation = Speculation.parse(stage)
    rows = 1 if speculation.off else speculation.max_rows or 16
    assert BREAK_EVEN.needed(speculation, 100, rows) == pytest.approx(needed)


def test_shares_are_of_all_steps() -> None:
    assert shares([5, 0, 1, 1, 0, 0, 0, 1, *[0] * 50, 2]) == [0.5, 0.0, 0.2, 0.1, 0.2]
    assert shares([]) == []


def stage(name: str, speed: float | None) -> StageResult:
    numbers = (None,) * 7 if speed is None else (speed, speed / 100, 1.0, 2.0, 5.0, 9.0, speed / 40)
    needed = BREAK_EVEN.needed(Speculation.parse(name), 0, 16)
    failed = "other ids" if speed is None else None
    return StageResult(name, *numbers, 10, {}, {}, True, failed, 40, (5, 2, 0, 3), needed)


RESULT = BenchResult(
    "tiny",
    2,
    None,
    tuple(
        WorkloadResult(
            name, 9, 9, (stage("off", 100.0), stage("dflash2+lookup@16", speed), stage("mtp", None))
        )
        for name, speed in (("copy", 420.0), ("code-edit", 300.0))
    ),
    "cost of a row: 0.5",
)


def test_the_table_fits_80_columns_and_shows_needed_beside_reached() -> None:
    stream = io.StringIO()
    print_break_even(RESULT, Console(file=stream, width=80))
    lines = stream.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines) and lines[-1] == "cost of a row: 0.5"
    fused, module = (next(line.split() for line in lines if name in line) for name in ("dflash2+", "mtp"))
    assert fused == ["copy", "dflash2+", "10.50", "1.75", "2.75", "4.75", "8.75", "50", "20", "30", "0", "0"]
    assert module == ["mtp", "FAIL", "1.60", "2.80", "50", "20", "30", "0", "0"]
    assert not any(line.split()[:2] == ["copy", "off"] for line in lines), "plain decoding needs nothing"


def test_the_picture_holds_every_stage_and_no_speed_of_a_refused_one(tmp_path: Path) -> None:
    draw(RESULT, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text
        draw(RESULT, tmp_path / "out.svg")
    picture = (tmp_path / "out.svg").read_text()
    for text in ("dflash2+lookup@16", "mtp", "code-edit", "tokens per step", "420", "10.5", "break-even"):
        assert f">{text}" in picture, text
    assert picture.count(">FAIL<") == 4, "two workloads in both panels"


def test_a_picture_that_cannot_be_drawn_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_plot(None)
    check_plot(tmp_path / "out.SVG")
    for name in ("out.pdf", "out", "none/out.svg"):
        with pytest.raises(ConfigError):
            check_plot(tmp_path / name)
    real = builtins.__import__

    def without(name: str, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match=r"quickdraft\[plot\]"):
        check_plot(tmp_path / "out.svg")
