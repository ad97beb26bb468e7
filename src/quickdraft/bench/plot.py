"""The picture of `bench stages --plot`: tokens per second and per step, by workload and stage.

matplotlib is an extra and is imported when a picture is asked for, before anything is measured. Nothing is
drawn for a stage that was refused. The colours are those of Okabe and Ito, told apart with any colour vision.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from quickdraft.bench.report import BenchResult, StageResult, check_json_folder
from quickdraft.errors import ConfigError, UnsupportedError

SUFFIXES: Final = (".svg", ".png")
COLOURS: Final = ("#999999", "#56B4E9", "#E69F00", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#F0E442")
_BARS_WIDTH: Final = 0.86  # of the distance between two workloads
_DOTS_PER_INCH: Final = 150

Value = Callable[[StageResult], float | None]


def check_plot(path: Path | None) -> None:
    """ConfigError or UnsupportedError for a picture that could not be drawn."""
    if path is None:
        return
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError("bad value for --plot", got=repr(path.name[:80]), expected="a name in .svg or .png")
    check_json_folder(path)
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            "--plot needs matplotlib", got=str(error), hint="install it with `pip install 'quickdraft[plot]'`"
        ) from error


def draw(result: BenchResult, path: Path) -> None:
    """Write the picture; `check_plot` comes first."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(stage.stage for work in result.workloads for stage in work.stages))
    bars = len(result.workloads) * len(names)
    figure = Figure(figsize=(max(7.0, 2.0 + 0.26 * bars), 7.2), layout="constrained")
    speed, steps = figure.subplots(2, 1, sharex=True)
    line = _break_even_lines(steps, result, names)
    _panel(speed, result, names, lambda stage: stage.decode_tokens_per_second, "{:.0f}")
    _panel(steps, result, names, lambda stage: stage.tokens_per_step, "{:.1f}", _break_even)
    speed.set_ylabel("tokens/s")
    steps.set_ylabel("tokens per step")
    steps.set_xticks(range(len(result.workloads)), [work.name for work in result.workloads])
    figure.suptitle(f"{result.model}, {result.threads} threads: decoding by draft source", fontsize=11)
    handles, labels = speed.get_legend_handles_labels()
    if line is not None:
        handles, labels = [*handles, line], [*labels, "break-even of its steps"]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _panel(
    axes: Any, result: BenchResult, names: list[str], value: Value, text: str, line: Value | None = None
) -> None:
    """Bars of one number, each with its value above it and above the `line` across it."""
    for index, name in enumerate(names):
        places, heights = [], []
        for place, stage in _of(result, name):
            height = value(stage)
            places.append(place + _offset(index, len(names)))
            heights.append(height or 0.0)
            shown = "FAIL" if height is None else text.format(height)
            top = max(heights[-1], (line(stage) if line is not None else None) or 0.0)
            axes.annotate(
                shown, (places[-1], top), (0, 3), textcoords="offset points",
                ha="center", va="bottom", rotation=90, fontsize=7,
            )  # fmt: skip
        colour, again = COLOURS[index % len(COLOURS)], index // len(COLOURS)
        axes.bar(
            places, heights, _BARS_WIDTH / len(names), label=name,
            color=colour, edgecolor="white", linewidth=0.5, hatch="//" * again,
        )  # fmt: skip
    axes.margins(x=0.01, y=0.18)  # room for the values
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _break_even_lines(axes: Any, result: BenchResult, names: list[str]) -> Any:
    """A line across each bar of tokens per step: at it, the stage would be as fast as plain decoding."""
    line, half = None, _BARS_WIDTH / len(names) / 2
    for index, name in enumerate(names[1:], 1):
        for place, stage in _of(result, name):
            height = _break_even(stage)
            if height is not None:
                middle = place + _offset(index, len(names))
                line = axes.hlines(height, middle - half, middle + half, color="black", lw=1.6, zorder=3)
    return line


def _break_even(stage: StageResult) -> float | None:
    """Tokens per step at which its steps, as long as they took in this run, would gain nothing."""
    if stage.tokens_per_step is None or stage.relative_to_plain is None:
        return None
    return stage.tokens_per_step / stage.relative_to_plain


def _of(result: BenchResult, name: str) -> list[tuple[int, StageResult]]:
    """(place of the workload, stage) of all stages of this name."""
    return [(i, stage) for i, w in enumerate(result.workloads) for stage in w.stages if stage.stage == name]


def _offset(index: int, count: int) -> float:
    return ((index + 0.5) / count - 0.5) * _BARS_WIDTH
