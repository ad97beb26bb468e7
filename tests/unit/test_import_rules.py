"""Who may import whom (ARCHITECTURE.md). A failure says the rule that broke and the mend."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "quickdraft"
BASE = {"types", "errors", "config"}
# package -> quickdraft packages it may import beside itself
ALLOWED: dict[str, set[str]] = {
    "types": {"errors"},
    "errors": set(),
    "free_memory": {"errors"},
    "config": {"errors", "types", "free_memory"},
    "speculate": BASE,
    "text": BASE,
    "ops": BASE,
    "state": BASE | {"ops.interface"},
    "models": BASE | {"ops", "state.spec"},
    "engine": BASE | {"models", "state", "ops", "speculate", "text"},
    "prepare": BASE | {"engine", "models", "state", "ops", "speculate", "text"},
    "bench": BASE | {"engine", "models", "state", "ops", "speculate", "text", "prepare"},
    "train": BASE | {"engine", "models", "state", "ops", "speculate", "text", "prepare"},
    "doctor": BASE | {"engine", "models", "state", "ops", "speculate", "text", "bench", "prepare"},
    "server": BASE | {"engine", "models", "state", "ops", "speculate", "text"},
    "cli": BASE
    | {"engine", "models", "state", "ops", "speculate", "text", "prepare", "bench", "doctor", "server"}
    | {"train"},
    "__main__": {"cli"},
    "__init__": BASE | {"engine"},
}
# third-party package -> the only places that may import it
THIRD_PARTY: dict[str, set[str]] = {
    "torch": {"ops/cuda", "train"},
    "safetensors": {"train"},
    "triton": {"ops/cuda"},
    "fastapi": {"server"},
    "starlette": {"server"},
    "pydantic": {"server"},
    "uvicorn": {"server"},
    "h11": {"server"},
    "prometheus_client": {"server"},
    "transformers": {"train"},
    "matplotlib": {"bench"},
    "ray": {"integrations"},
    "vllm": {"integrations"},
    "tokenizers": {"text"},
    "jinja2": {"text"},
    "llguidance": {"engine/grammar"},
}
FILES = sorted(ROOT.rglob("*.py"))


def imports_of(path: Path) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write it out"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += (
                [(node.lineno, name) for name in names]
                if node.module == "quickdraft"
                else [(node.lineno, node.module or "")]
            )
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_layers(path: Path) -> None:
    relative = path.relative_to(ROOT)
    package = relative.parts[0].removesuffix(".py")
    allowed = ALLOWED[package]
    for line, name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "quickdraft" and len(parts) > 1:
            target = ".".join(parts[1:])
            fine = (
                parts[1] == package
                or target == "__version__"
                or any(target == a or target.startswith(a + ".") for a in allowed)
            )
            assert fine, (
                f"{relative}:{line}: '{package}' may not import {name}. "
                f"Allowed: {sorted(allowed)}. Mend: move the code down, or pass the value in."
            )
        elif parts[0] in THIRD_PARTY:
            places = THIRD_PARTY[parts[0]]
            assert any(str(relative).startswith(p) for p in places), (
                f"{relative}:{line}: {parts[0]} belongs only in {sorted(places)}. "
                "Mend: put a plain-data seam there and call that."
            )


def test_every_package_has_a_rule() -> None:
    packages = {p.relative_to(ROOT).parts[0].removesuffix(".py") for p in FILES}
    assert packages <= set(ALLOWED), f"add a rule for {sorted(packages - set(ALLOWED))}"


def test_serving_loads_no_torch() -> None:
    code = (
        "import sys, quickdraft.cli.main, quickdraft.server.app, quickdraft.engine.llm; "
        "bad = {'torch', 'triton', 'transformers', 'safetensors', 'llguidance', 'quickdraft.train'}; "
        "bad &= set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
