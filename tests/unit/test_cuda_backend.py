"""What the CUDA backend says where it cannot run, what it loads, and its kernels compiled ahead of time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quickdraft.errors import ConfigError, UnsupportedError
from quickdraft.ops import select as select_module
from quickdraft.ops.select import resolve, select

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "kernels.md"
PLAIN = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def said(code: str) -> str:
    """What a process without the interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], env=PLAIN, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_a_missing_package_is_named(package: str) -> None:
    code = (
        f"import sys; sys.modules['{package}'] = None\n"
        "from quickdraft.errors import UnsupportedError\n"
        "from quickdraft.ops.select import select\n"
        "try: select(backend='cuda')\n"
        "except UnsupportedError as error: print(error)"
    )
    assert package in said(code) and "quickdraft[cuda]" in said(code)


def test_a_missing_card_is_named() -> None:
    code = (
        "import torch\n"
        "torch.cuda.is_available = lambda: False\n"
        "from quickdraft.errors import UnsupportedError\n"
        "from quickdraft.ops.select import select\n"
        "try: select(backend='cuda')\n"
        "except UnsupportedError as error: print(error)"
    )
    assert "found no card" in said(code)


def test_the_cpu_path_loads_neither_torch_nor_triton() -> None:
    code = (
        "import sys\n"
        "from quickdraft.ops.select import select\n"
        "select(1)\n"
        "print({'torch', 'triton', 'quickdraft.ops.cuda'} & set(sys.modules))"
    )
    assert said(code).strip() == "set()"


def test_in_the_interpreter_it_says_so() -> None:
    assert "interpreter" in select(backend="cuda").explain()


def test_hot_kernels_compile_without_spills() -> None:
    """The page's own check, for a configuration of each kernel that takes a step's time, on a 3090 and on
    sm_90; and it can fail. Weights, keys and values are copied ahead, 16 bytes a thread."""
    code = (
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from dataclasses import replace\n"
        "from quickdraft.ops.cuda import kernels_page as page\n"
        "hot = {}\n"
        "for index, start in enumerate(page.starts()):\n"
        "    name, numbers = start.kernel.__name__, start.numbers\n"
        "    usual = numbers.get('M') in (None, 16, 32) and numbers.get('DIM') in (None, 256)\n"
        "    if name in page.HOT and usual:\n"
        "        hot.setdefault((name, numbers.get('BITS'), numbers.get('P')), index)\n"
        "tasks = [(index, number) for index in hot.values() for number in (page.HOME, 90)]\n"
        "with ProcessPoolExecutor(2) as pool:\n"
        "    results = dict(zip(tasks, pool.map(page.compiled, tasks)))\n"
        "print(len(results), page.faults(results), min(r.registers for r in results.values()) > 0)\n"
        "bad = {k: replace(r, spill_bytes=8, shared_bytes=120_000) for k, r in list(results.items())[:1]}\n"
        "print(*page.faults(bad))\n"
        "wide = [page.starts()[i] for (i, n), r in results.items() if n == page.HOME and r.wide_copies]\n"
        "print(sorted({start.kernel.__name__ for start in wide}))\n"
    )
    fine, bad, wide = said(code).strip().split("\n")
    assert fine == "12 [] True"
    assert "spills 8 bytes" in bad and "120000 bytes of shared memory" in bad
    assert wide == "['attend_span', 'grouped_linear']"


def test_bytes_of_a_projected_step_are_near_the_minimum() -> None:
    """Of a plain step and of a verify block; every op is there, and the linears' bytes are the model's."""
    code = (
        "from quickdraft.ops.cuda import work\n"
        "for rows, context in ((1, 2048), (16, 25_000)):\n"
        "    works = work.whole_step(rows, context)\n"
        "    moved = sum(op.calls * op.bytes_moved for op in works)\n"
        "    least = sum(op.calls * op.least_bytes for op in works)\n"
        "    print(len(works), round(moved / 1e9, 1), moved < 1.1 * least)"
    )
    assert said(code).split("\n")[:2] == ["22 14.5 True", "22 17.2 True"]


def test_the_page_of_kernels_has_these_steps() -> None:
    """Not what was compiled, which takes minutes. Where this fails: `make kernels`."""
    code = (
        "from quickdraft.ops.cuda import kernels_page as page\n"
        "print(*page.step_rows(), *page.work_rows(16, 25_000, 'bfloat16'), sep='\\n')"
    )
    text = PAGE.read_text("utf-8")
    rows = said(code).strip().split("\n")
    assert len(rows) == 33 and [row for row in rows if row not in text] == []


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="'cpu' or 'cuda'"):
        select(backend="tpu")


def test_auto_takes_a_card_that_can_run_and_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("cpu") == ("cpu", "") and resolve("cuda") == ("cuda", "")
    monkeypatch.setattr(select_module, "_cards", lambda: 0)
    assert resolve("auto") == ("cpu", "")
    monkeypatch.setattr(select_module, "_cards", lambda: 1)
    assert resolve("auto") == ("cuda", "")  # the interpreter runs

    def cannot() -> None:
        raise UnsupportedError("the CUDA backend found no card", got="a torch for the CPU")

    monkeypatch.setattr(select_module, "_cuda", cannot)
    backend, note = resolve("auto")
    assert backend == "cpu" and "not used" in note and "a torch for the CPU" in note
    monkeypatch.setattr(select_module, "find_spec", lambda name: None if name == "triton" else name)
    backend, note = resolve("auto")
    assert backend == "cpu" and "no triton" in note and "quickdraft[cuda]" in note


def test_auto_without_a_card_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "from quickdraft.ops import select\n"
        "select._cards = lambda: 0\n"
        "print(select.resolve('auto')[0], {'torch', 'triton'} & set(sys.modules))"
    )
    assert said(code).strip() == "cpu set()"
