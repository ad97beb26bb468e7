"""The roofline's arithmetic, what is counted of a file, and that the peak loops do what they count."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from quickdraft.bench import limits
from quickdraft.bench.machine import FLOAT, NARROW, WIDE, Peak, measure_peaks, rates
from quickdraft.bench.roofline import CARDS, Rates, model_work, nearly_free_rows, roof_seconds
from quickdraft.errors import ConfigError
from quickdraft.models.loading.folder import ModelFolder
from quickdraft.models.loading.gguf import GGUFFile
from quickdraft.ops.cpu import _cpu
from tests.support.quant_folder import FORMATS, quantised_hybrid
from tests.support.tiny import write_tiny_llama
from tests.support.tiny_folder import VOCABULARY
from tests.support.tiny_hybrid import HIDDEN, VALUE_HEADS, hybrid_tensors


def test_every_peak_loop_does_the_multiply_adds_it_counts() -> None:
    loops = _cpu.peak_loops()
    assert {(name, integer) for name, _, integer, _ in loops} >= {(WIDE, True), (FLOAT, False)}
    for index, (name, instructions, _, macs) in enumerate(loops):
        assert _cpu.count_peak(index, 1234) == 1234 * macs, (name, instructions)
    with pytest.raises(ValueError, match="no peak loop"):
        _cpu.count_peak(len(loops), 1)


def test_rates_are_those_of_the_kernels_not_of_wider_instructions() -> None:
    measured = measure_peaks(1, pass_ms=0.01, repeats=1)
    assert len(measured) == len(_cpu.peak_loops()) and all(peak.macs_per_second > 0 for peak in measured)
    peaks = [
        Peak(WIDE, "avx512-vnni", 1, 9.0),
        Peak(NARROW, "avx2", 1, 4.0),
        Peak(WIDE, "avx2", 1, 3.0),
        Peak(FLOAT, "avx2", 1, 2.0),
        Peak(WIDE, "plain C++", 1, 1.0),
        Peak(FLOAT, "plain C++", 1, 0.5),
    ]
    assert rates(7.0, peaks) == Rates(7.0, 4.0, 3.0, 2.0)
    assert rates(7.0, peaks[4:]) == Rates(7.0, 1.0, 1.0, 0.5)
    assert (peaks[3].value, peaks[3].unit, peaks[0].unit) == (4e-9, "GFLOP/s", "GMAC/s")


def test_formulas() -> None:
    assert nearly_free_rows(35.5e12, 936e9, 18 / 32) == pytest.approx(21.33, abs=0.01)
    assert CARDS[0].macs_per_second == 35.5e12
    assert roof_seconds(100, 10, 50, 10) == 2.0
    assert roof_seconds(100, 40, 50, 10) == 4.0


@pytest.mark.parametrize("tied", [False, True])
def test_work_of_a_file(tmp_path: Path, tied: bool) -> None:
    """2 layers of width 64, 4 query and 2 kv heads of 16, feed-forward 96, 320 tokens; the head is Q8_0."""
    path = write_tiny_llama(
        tmp_path / "tiny.gguf", tied=tied, quantisation="Q4_0",
        other_quantisation={"token_embd.weight" if tied else "output.weight": "Q8_0"},
    )  # fmt: skip
    work = model_work(GGUFFile(path).tensors.items())
    body = 2 * (64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96)
    head = 320 * 64
    assert work.macs_per_row == {"Q4_0": body, "Q8_0": head}
    assert work.step_bytes == body * 18 // 32 + head * 34 // 32 + 5 * 64 * 4  # and five norms
    machine = Rates(1000.0, 1e6, 5e5, 1e3)
    row = body / 1e6 + head / 5e5
    assert work.row_seconds(machine) == pytest.approx(row)
    assert work.longest_gain(machine) == pytest.approx(work.step_bytes / 1000 / row)
    assert work.longest_gain(Rates(1e12, 1e6, 5e5, 1e3)) == 1.0


def test_work_of_a_quantised_hybrid_folder(tmp_path: Path) -> None:
    """The head as it is held, the MTP module not at all, and linears of 8 bits at the rate of bytes."""
    form = FORMATS["gptq 8 bits"]
    folder = ModelFolder(quantised_hybrid(tmp_path / "m", form))
    work = model_work(folder.held.items())
    body = sum(math.prod(values.shape) for name, values in hybrid_tensors().items()
               if values.ndim == 2 and ".layers." in name and not name.startswith("mtp.")
               and "in_proj_a" not in name and "in_proj_b" not in name)  # fmt: skip
    gates, head = 3 * 2 * VALUE_HEADS * HIDDEN, VOCABULARY * HIDDEN
    assert work.macs_per_row == {"BF16": gates, "gptq int8 g32": body, "Q8_0": head}
    assert work.step_bytes < body * 1.3 + head * 34 // 32 + 2 * gates + 10_000
    machine = Rates(1.0, 1e6, 5e5, 1e3)
    assert work.row_seconds(machine) == pytest.approx((body + head) / 5e5 + gates / 1e3)


def test_json_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "read_bandwidth", lambda threads: 1e9 * threads)
    monkeypatch.setattr(
        limits,
        "measure_peaks",
        lambda threads: [Peak(WIDE, "avx2", threads, 2e9), Peak(FLOAT, "avx2", threads, 1e9)],
    )
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    result = limits.run(model, tmp_path / "out.json", threads=3)
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["schema"] == "quickdraft-machine-1" and data["threads"] == 3
    assert data["read_bytes_per_second"] == {"1": 1e9, "3": 3e9}
    assert [(p["threads"], p["unit"], p["value"]) for p in data["peaks"]] == [
        (1, "GMAC/s", 2.0), (1, "GFLOP/s", 2.0), (3, "GMAC/s", 2.0), (3, "GFLOP/s", 2.0),
    ]  # fmt: skip
    here = [b["nearly_free_rows"] for b in data["balance"] if b["machine"] == limits.HERE]
    assert here == [round(2 / 3 * 18 / 32, 2), round(2 / 3 * 34 / 32, 2)]
    assert data["model"]["plain_roof_tokens_per_second"] == pytest.approx(
        3e9 / data["model"]["step_bytes"], abs=1e-3
    )
    buffer = io.StringIO()
    limits.print_result(result, Console(file=buffer, width=120))
    assert "rows nearly free" in buffer.getvalue() and "plain decoding, at most" in buffer.getvalue()
    with pytest.raises(ConfigError, match="no folder"):
        limits.run(None, tmp_path / "none" / "out.json")
    with pytest.raises(ConfigError, match="threads"):
        limits.run(None, threads=100_000)
