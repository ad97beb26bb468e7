"""`quickdraft train`: drafters for a model, from texts that it writes itself. Needs the extra `train`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from quickdraft.cli import flags
from quickdraft.cli.flags import report
from quickdraft.errors import ConfigError, UnsupportedError

app = typer.Typer(add_completion=False)
Out = Annotated[Path, typer.Option(metavar="DIR", help="Where to.")]


@app.callback()
def train() -> None:
    """Make data, train drafters, export and evaluate them."""
    for package in ("torch", "safetensors"):
        if find_spec(package) is None:
            raise UnsupportedError(
                f"training needs the package {package}, which is not installed",
                hint="pip install 'quickdraft[train]'",
            )


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="checkpoint.safetensors.")],
    out: Out,
    bits: Annotated[int, typer.Option(metavar="8|4|16", help="Of the linears.")] = 8,
    target: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The target; default: as recipe.json beside the checkpoint says."),
    ] = None,
    draft_vocab: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Default: draft_vocab.json beside the checkpoint."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DATA", help="Note how many rows and tokens this folder has.")
    ] = None,
    block: Annotated[int | None, typer.Option(metavar="N", help="DFlash2 without a recipe: rows.")] = None,
    window: Annotated[int | None, typer.Option(metavar="N", help="The same: positions it sees.")] = None,
    mask_id: Annotated[int | None, typer.Option(metavar="ID", help="The same: the token of masks.")] = None,
) -> None:
    """Write a drafter folder from a checkpoint, and print it."""
    if bits not in (4, 8, 16):
        raise ConfigError("bad value for --bits", got=bits, expected="8, 4 or 16")
    from quickdraft.train.exporting import export_checkpoint

    own = {"block": block, "window": window, "mask_id": mask_id}
    if target is not None:
        flags.fetched(target)
    size = export_checkpoint(
        checkpoint, out, bits, target=target, vocab=draft_vocab, data=data,
        own={name: value for name, value in own.items() if value is not None},
    )  # fmt: skip
    report(f"{size / 1e6:.2f} MB")
    print(out)
