"""Every relative link in the documentation points at a file that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from quickdraft.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_point_at_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    missing = [
        target
        for target in targets
        if not re.match(r"[a-z]+:|#", target) and not (page.parent / target.partition("#")[0]).exists()
    ]
    assert not missing


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/guides/*.md")), ids=lambda p: p.name)
def test_commands_that_guides_show_exist_with_their_flags(page: Path) -> None:
    root = get_command(app)
    context = typer.Context(root)
    for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in re.findall(r"^(?:\$ )?quickdraft (.*)$", block.replace("\\\n", " "), re.MULTILINE):
            command, words = root, line.partition("#")[0].split()
            while words and hasattr(command, "commands"):
                found = command.get_command(context, words.pop(0))
                assert found is not None, line
                command = found
            known = {
                flag for parameter in command.params for flag in [*parameter.opts, *parameter.secondary_opts]
            }
            used = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert used <= known, f"{line}: {sorted(used - known)}"
