"""`quickdraft prepare`: offline work on model files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from quickdraft.cli.flags import report
from quickdraft.config import check_range
from quickdraft.errors import ConfigError

app = typer.Typer(add_completion=False)
LONGEST_CONTEXT = 1 << 24
MOST_LAYERS = 256


class Like(StrEnum):
    """The models whose shapes can be written."""

    QWEN = "qwen3.8-27b"
    TINY_HYBRID = "tiny-hybrid"
    TINY_LLAMA = "tiny-llama"


class FormatName(StrEnum):
    """How the matrices of the body are stored."""

    BF16 = "bf16"
    AUTOROUND = "autoround"
    COMPRESSED_TENSORS = "compressed-tensors"


@app.callback()
def prepare() -> None:
    """Make model files, offline."""


@app.command()
def random(
    like: Annotated[Like, typer.Option(help="The model whose shapes, names and config.json to write.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to; must be absent or empty.")],
    form: Annotated[
        FormatName,
        typer.Option("--format", help="How the matrices of the layers are stored; groups are of 128."),
    ] = FormatName.BF16,
    context: Annotated[
        int | None, typer.Option(metavar="N", help="max_position_embeddings; default: the model's own.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(metavar="N", help="Layers; default: as many as the model has.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Another seed gives other numbers.")] = 0,
) -> None:
    """Write a checkpoint with random numbers in the layout of a real one, and print its folder."""
    from quickdraft.models.known import KNOWN
    from quickdraft.prepare.random_model import write_random

    sizes = KNOWN[like.value]
    if not str(out).strip(". "):
        raise ConfigError("bad value for --out", got=repr(str(out)), expected="a new folder")
    check_range("seed", seed, 0, 2**63 - 1)
    if context is not None:
        check_range("context", context, 1, LONGEST_CONTEXT)
    if layers is not None:
        check_range("layers", layers, sizes.fewest_layers, MOST_LAYERS)
    write_random(sizes.changed(layers=layers, context=context), form.value, out, seed=seed, report=report)
    print(out)
