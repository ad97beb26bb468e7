"""`bench machine`: what this machine can do at most, and what that means for a model.

Measures read bandwidth and arithmetic peaks, puts them beside known graphics cards, and derives the
roofs of a model from its file's header. No model is loaded and nothing is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from quickdraft.bench.machine import Peak, commit, measure_peaks, rates, read_bandwidth
from quickdraft.bench.report import check_json_folder, write_json
from quickdraft.bench.roofline import (
    BYTES_PER_WEIGHT,
    CARDS,
    ModelWork,
    Rates,
    model_work,
    nearly_free_rows,
)
from quickdraft.config import MAX_THREADS, cached_model, check_range, usable_cores
from quickdraft.models.loading.folder import ModelFolder
from quickdraft.models.loading.gguf import GGUFFile

SCHEMA: Final = "quickdraft-machine-1"
HERE: Final = "this machine"


@dataclass(frozen=True, slots=True)
class Balance:
    """Rows that are nearly free on one machine, for weights of so many bits."""

    machine: str
    bits: int
    bytes_per_second: float
    macs_per_second: float

    @property
    def rows(self) -> float:
        return nearly_free_rows(self.macs_per_second, self.bytes_per_second, BYTES_PER_WEIGHT[self.bits])

    def to_dict(self) -> dict[str, object]:
        return {
            "machine": self.machine,
            "weight_bits": self.bits,
            "bytes_per_weight": BYTES_PER_WEIGHT[self.bits],
            "bytes_per_second": self.bytes_per_second,
            "macs_per_second": self.macs_per_second,
            "nearly_free_rows": round(self.rows, 2),
        }


@dataclass(frozen=True, slots=True)
class MachineResult:
    """One run of `bench machine`; `model` and `work` are None when no model was named."""

    threads: int
    commit: str | None
    bandwidth: dict[int, float]  # by threads
    peaks: tuple[Peak, ...]
    rates: Rates  # with all threads
    model: str | None
    work: ModelWork | None

    @property
    def balance(self) -> list[Balance]:
        """Here first, then cards by their data sheets."""
        macs = {4: self.rates.narrow_macs_per_second, 8: self.rates.wide_macs_per_second}
        here = [Balance(HERE, bits, self.rates.bytes_per_second, macs[bits]) for bits in BYTES_PER_WEIGHT]
        return here + [
            Balance(card.name, bits, card.gigabytes_per_second * 1e9, card.macs_per_second)
            for card in CARDS
            for bits in BYTES_PER_WEIGHT
        ]

    def to_dict(self) -> dict[str, object]:
        """The JSON shape of `--json`."""
        return {
            "schema": SCHEMA,
            "threads": self.threads,
            "commit": self.commit,
            "read_bytes_per_second": {str(threads): round(rate) for threads, rate in self.bandwidth.items()},
            "peaks": [
                {"name": p.name, "instructions": p.instructions, "threads": p.threads, "unit": p.unit,
                 "value": round(p.value, 3)}
                for p in self.peaks
            ],
            "balance": [balance.to_dict() for balance in self.balance],
            "model": self._model(),
        }  # fmt: skip

    def _model(self) -> dict[str, object] | None:
        if self.work is None:
            return None
        work, rates = self.work, self.rates
        return {
            "name": self.model,
            "step_bytes": work.step_bytes,
            "macs_per_row": work.total_macs_per_row,
            "plain_roof_tokens_per_second": round(rates.bytes_per_second / work.step_bytes, 3),
            "row_ms": round(work.row_seconds(rates) * 1000, 6),
            "longest_gain": round(work.longest_gain(rates), 3),
        }


def run(
    model: str | Path | None = None, json_path: Path | None = None, threads: int | None = None
) -> MachineResult:
    """Measure with `threads` threads (default: all usable cores) and with one, print, write `json_path`."""
    check_json_folder(json_path)
    name, work = (None, None) if model is None else _counted(model)
    threads = usable_cores() if threads is None else threads
    check_range("threads", threads, 1, MAX_THREADS)
    counts = sorted({1, threads})
    bandwidth = {count: read_bandwidth(count) for count in counts}
    peaks = [peak for count in counts for peak in measure_peaks(count)]
    all_threads = [peak for peak in peaks if peak.threads == threads]
    result = MachineResult(
        threads, commit(), bandwidth, tuple(peaks), rates(bandwidth[threads], all_threads), name, work
    )
    print_result(result, Console())
    if json_path is not None:
        write_json(json_path, result.to_dict())
    return result


def _counted(model: str | Path) -> tuple[str, ModelWork]:
    name, path = cached_model(model)
    tensors = ModelFolder(path).held if path.is_dir() else GGUFFile(path).tensors
    return name, model_work(tensors.items())


def print_result(result: MachineResult, console: Console) -> None:
    """Tables of rates and balances, and two lines about the model."""
    table = Table(title="measured now", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in ("", "instructions", *(f"{t} thread{'s' * (t > 1)}" for t in result.bandwidth), "unit"):
        table.add_column(column, justify="left" if column in ("", "instructions", "unit") else "right")
    table.add_row("read bandwidth", "", *(f"{rate / 1e9:.1f}" for rate in result.bandwidth.values()), "GB/s")
    for first in (peak for peak in result.peaks if peak.threads == next(iter(result.bandwidth))):
        key = (first.name, first.instructions)
        same = [peak for peak in result.peaks if (peak.name, peak.instructions) == key]
        table.add_row(*key, *(f"{peak.value:.1f}" for peak in same), first.unit)
    console.print(table)
    balances = Table(
        title="rows nearly free = MAC rate / (bandwidth / bytes per weight)",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    balances.add_column("")
    for column in ("weights", "GB/s", "TMAC/s", "rows"):
        balances.add_column(column, justify="right")
    for one in result.balance:
        balances.add_row(
            one.machine, f"{one.bits}-bit", f"{one.bytes_per_second / 1e9:.1f}",
            f"{one.macs_per_second / 1e12:.3f}", f"{one.rows:.1f}",
        )  # fmt: skip
    console.print(balances)
    for line in _model_lines(result):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _model_lines(result: MachineResult) -> list[str]:
    if result.work is None:
        return []
    work, here = result.work, result.rates
    return [
        f"{result.model}: a step reads {work.step_bytes / 1e6:.1f} MB, a row takes "
        f"{work.total_macs_per_row / 1e6:.1f} MMAC near context 0",
        f"plain decoding, at most {here.bytes_per_second / work.step_bytes:.0f} tokens/s "
        f"({here.bytes_per_second / 1e9:.1f} GB/s / {work.step_bytes / 1e6:.1f} MB)",
        f"long verify blocks, at most {work.longest_gain(here):.2f} x plain "
        f"({work.plain_seconds(here) * 1000:.2f} ms a plain step / {work.row_seconds(here) * 1000:.3f} ms "
        "of arithmetic a row)",
    ]
