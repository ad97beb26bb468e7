"""`bench card` over a tiny model in Triton's interpreter, and what it says where it cannot run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quickdraft.bench import card
from quickdraft.bench.card import SCHEMA, Plan, run
from quickdraft.bench.card_cases import Sizes
from quickdraft.bench.card_parity import Parity
from quickdraft.doctor import exactness
from quickdraft.doctor.card import CHECKS, HINT, promises
from quickdraft.doctor.check import Check
from quickdraft.models.describe_hybrid import HybridSizes
from quickdraft.ops.cuda.backend import CudaOps
from quickdraft.ops.cuda.measure import seconds_of
from quickdraft.types import Backend
from tests.support import interpreter as interpreter
from tests.support.fake_capture import capturing_card
from tests.support.ops_cases import random_weight, step_of
from tests.unit.test_cuda_backend import said

TINY = HybridSizes(
    width=128, layers=2, interval=2, heads=2, kv_heads=1, head_dim=64, feed_forward=128,
    vocabulary=320, context=512, eos_ids=(258, 256), byte_tokenizer=True,
    key_heads=1, value_heads=2, key_dim=64, value_dim=64, mrope_section=(3, 3, 2),
)  # fmt: skip
PLAN = Plan(
    TINY, rows=(17,), contexts=(16,), kernel_rows=(1,), prefix_tokens=17, repeats=1, steps=1,
    parity_rows=(3,), few_rows=(2,), many_rows=3, alike=Sizes(128, 64, 64, 20, 64, 300),
)  # fmt: skip


def test_a_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "card.json"
    kept = Check("batch", True, "answers alike")
    assert run(file, PLAN, lambda: [kept]).ok
    found = json.loads(file.read_text())
    assert (found["schema"], found["ok"], found["facts"]["card"]) == (SCHEMA, True, None)
    assert [(step["rows"], step["context"]) for step in found["steps"]] == [(17, 16)]
    assert all(step["seconds"] > 0 and step["predicted_seconds"]["rtx3090"] > 0.02 for step in found["steps"])
    assert {rate["kernel"].split()[0] for rate in found["rates"]} == {"linear", "attention"}
    head = next(rate for rate in found["rates"] if "head" in rate["kernel"])
    assert head["flops"] == 2 * 128 * 320 and head["bytes"] == 320 * (128 + 8) + 4 * (128 + 320)
    assert found["prefix"]["cached_tokens"] == 16 and found["weight_bytes"] > 0
    assert found["skipped"] == [] and found["captured_shapes"] == 0
    assert "the simulator says of an RTX 3090" in capsys.readouterr().out
    page = (Path(__file__).parents[2] / "docs" / "reference" / "bench-card.md").read_text()
    rows = {key for part in ("steps", "rates", "parity", "promises") for key in found[part][0]}
    assert not [key for key in {*found, *found["prefix"], *found["facts"], *rows} if f"`{key}`" not in page]


def test_a_kernel_that_differs_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaOps, "argmax", lambda self, rows, x, ids: ids.tensor.fill_(7))
    result = run(None, PLAN, lambda: pytest.fail("promises of kernels that are wrong"))
    assert [one.kernel for one in result.parity if not one.ok] == ["choices, 3 rows"]
    assert not result.ok and not result.rates and not result.steps


def test_rows_that_depend_on_their_number_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = CudaOps.rms_norm

    def leaning(self: CudaOps, rows: Any, x: Any, weight: Any, eps: float, out: Any) -> None:
        norm(self, rows, x, weight, eps * (1 + rows.count), out)

    monkeypatch.setattr(CudaOps, "rms_norm", leaning)
    result = run(None, PLAN)
    assert [one.kernel for one in result.parity if not one.ok] == [
        "norms, rope and gates, the same bits among few rows"
    ]
    assert not result.rates and not result.steps


def test_the_promises_of_a_small_hybrid(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU's backend: the interpreter would take minutes."""
    kept = list(promises(backend=Backend.CPU))
    assert [(check.name, check.ok, check.skipped) for check in kept] == [
        (name, True, False) for name, _ in CHECKS
    ]
    monkeypatch.setattr(exactness, "difference", lambda *runs: "token 0 differs")
    assert not any(check.ok for check in promises(backend=Backend.CPU))


def test_a_broken_promise_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("parities", "rows_alike"):
        monkeypatch.setattr(card, name, lambda *given: ())
    broken = Check("speculation", False, "token 3 is id 7, plain decoding gives 9", HINT)
    result = run(None, PLAN, lambda: [broken])
    assert not result.ok and not result.rates and result.to_dict()["promises"] == [broken.to_dict()]


def test_what_there_is_no_time_for_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part looks at the clock after each of its pieces; nothing is timed that was not compared."""
    now = [0.0]

    def ticking(seconds: float, *given: Any) -> Iterator[Parity]:
        for _ in range(5):
            now[0] += seconds
            yield Parity("attention", 0.0, 0.0)

    @contextmanager
    def opened(*given: Any) -> Iterator[Any]:
        program = SimpleNamespace(captured=0)
        yield SimpleNamespace(weight_bytes=0, runner=SimpleNamespace(program=program))

    monkeypatch.setattr(card.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(card, "opened_random", opened)
    for name in ("parities", "rows_alike"):
        monkeypatch.setattr(card, name, partial(ticking, 5.0))
    monkeypatch.setattr(card, "step_times", lambda *given: () if given[-1]() else pytest.fail("no time"))
    monkeypatch.setattr(card, "_print", lambda *given: None)
    monkeypatch.setattr(card, "prefix", lambda *given: pytest.fail("no time for prefixes"))
    result = run(None, replace(PLAN, seconds=60.0), lambda: pytest.fail("no time for promises"))
    assert len(result.parity) == 6 and result.ok and not result.rates and not result.steps
    assert len(result.skipped) == 1 and "run it again" in result.skipped[0]
    now[0] = 0.0
    monkeypatch.setattr(card, "rates", partial(ticking, 55.0))
    result = run(None, replace(PLAN, seconds=112.0), tuple)
    assert len(result.parity) == 10 and len(result.rates) == 1 and result.prefix is None
    said_of = [line.split(":")[0] for line in result.skipped]
    assert said_of == ["rates of kernels", "1 step shapes", "prefixes"]


def test_no_capture_is_timed_with_a_kernel() -> None:
    """A linear makes a copy of its input in its first run, is run once more with it, and captured then."""
    ops, capture = capturing_card()
    batch, x, out = ops.batch(2, 1, 8, 8, 50), ops.empty(2, 32), ops.empty(2, 16)
    weight = ops.pack(random_weight("float16", 16, 32))
    program = ops.record(lambda: ops.linear(batch.rows, x, weight, out))
    step_of([(0, 2)], 8).set_on(batch)
    captures = list[int]()

    def run() -> None:
        captures.append(len(capture.starts))
        program.run()

    seconds_of(ops, run, 3)
    assert captures[-3:] == [len(capture.starts)] * 3 == [1] * 3


def test_without_a_card_it_is_an_error() -> None:
    code = (
        "import torch\n"
        "torch.cuda.is_available = lambda: False\n"
        "from quickdraft.bench.card import run\n"
        "from quickdraft.errors import UnsupportedError\n"
        "try: run()\n"
        "except UnsupportedError as error: print(error)"
    )
    assert "found no card" in said(code)
