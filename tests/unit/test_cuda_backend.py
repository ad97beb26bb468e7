"""What the CUDA backend says where it cannot run, what it loads, and its kernels compiled ahead of time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quickdraft.errors import ConfigError
from quickdraft.ops.select import select

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


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="'cpu' or 'cuda'"):
        select(backend="tpu")
