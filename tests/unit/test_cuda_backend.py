"""What the CUDA backend says where it cannot run, what it loads, and its kernels compiled ahead of time."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from quickdraft.errors import ConfigError, UnsupportedError
from quickdraft.ops import select as select_module
from quickdraft.ops.cuda.backend import CudaOps
from quickdraft.ops.cuda.outline import OutlineOps
from quickdraft.ops.cuda.weights import PackedGroups, PackedStack
from quickdraft.ops.select import resolve, select
from quickdraft.ops.weights import Blocks, Dense, Int4Groups, Part, Stacked

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
        "from quickdraft.bench import kernels_page as page\n"
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


def test_the_page_of_kernels_is_up_to_date() -> None:
    """What needs no compiler is made anew; what was compiled carries a digest of sources and configurations
    (with the page's own triton, as another one is no fault of a change here)."""
    text = PAGE.read_text("utf-8")
    version = text.split("Compiled by triton ")[1].split()[0]
    code = (
        "from quickdraft.bench import kernels_page as page\n"
        f"print(page.digest_line({version!r}), len(page.starts()))\n"
        "print(*page.HOT)\n"
        "print(page.projected_part(), end='')"
    )
    line, hot, projected = said(code).split("\n", 2)
    digest, count = line.rsplit(" ", 1)
    compiled = [row for row in text.split(digest)[-1].split("\n") if row.startswith("| `")]
    assert text.startswith(projected) and digest in text and len(compiled) == int(count), "run make kernels"
    for row in compiled:
        kernel, *_, spilled, shared = (cell.strip(" `") for cell in row.strip("|").split("|"))
        assert float(shared) <= 99 and not (kernel in hot.split() and "sm_86" in spilled), row


def test_a_row_is_summed_alike_whatever_the_height_of_its_tile() -> None:
    """By how the compiler lays numbers out, which the interpreter does not know. On sm_90 tiles of 64 rows
    have other matrix instructions, so that none are taken there. Heads of 16 compile, and wide ones fit."""
    code = (
        "from quickdraft.ops.cuda import attention, variants\n"
        "from quickdraft.ops.cuda.backend import CudaOps\n"
        "from quickdraft.bench.kernels_page import HOME, SHARED_LIMIT_BYTES\n"
        "from quickdraft.ops.cuda.compile import compile_start, sum_layouts\n"
        "from quickdraft.ops.cuda.launch import Watching\n"
        "def attended(kind, dim, rows, most):\n"
        "    attention.tallest_tile = lambda device: most\n"
        "    ops = CudaOps('meta', Watching())\n"
        "    variants._attention(ops, rows, 4, 1, dim, kind, None, block=False)\n"
        "    return next(s for s in ops.launcher.seen if s.kernel.__name__ == 'attend_span')\n"
        "cases = [('bfloat16', 64, 86, 64), ('bfloat16', 128, 86, 64), ('int8', 16, 86, 64)]\n"
        "cases += [('float32', 64, 86, 64), ('bfloat16', 128, 90, 32), ('bfloat16', 128, 90, 64)]\n"
        "for kind, dim, card, most in cases:\n"
        "    starts = [attended(kind, dim, rows, most) for rows in (1, 8, 32)]\n"
        "    laid = {start.numbers['M']: sum_layouts(start, card) for start in starts}\n"
        "    few, *more = laid.values()\n"
        "    print(len(laid), bool(few) and all(one == few for one in more))\n"
        "wide = compile_start(attended('float32', 256, 32, 64), HOME)\n"
        "print('fits', wide.shared_bytes <= SHARED_LIMIT_BYTES)\n"
    )
    heights = ["2 True", "3 True", "2 True", "1 True", "2 True", "3 False"]  # how many, and whether alike
    assert said(code).strip().split("\n") == [*heights, "fits True"]


def test_parts_of_one_format_become_one_weight() -> None:
    """As q, of which the gate's rows were taken out, beside k and v, which are still in the file: one linear,
    on a card and in its outline."""
    codes, scales = np.zeros((64, 128), np.uint8), np.ones((64, 1), np.float16)
    weight = Int4Groups(codes, scales, group_size=128)
    in_file = Blocks(None, 128, (Part(io.BytesIO(), 0, 64, lambda: weight),))
    for ops in (CudaOps(), OutlineOps(vocabulary=1000)):
        packed = ops.pack(Stacked((weight, in_file)))
        assert isinstance(packed, PackedGroups) and (packed.outputs, packed.bits, packed.group) == (
            128,
            4,
            128,
        )
        other = ops.pack(Stacked((in_file, Dense(np.zeros((8, 128), np.float32)))))
        assert isinstance(other, PackedStack) and [part.outputs for part in other.parts] == [64, 8]


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
