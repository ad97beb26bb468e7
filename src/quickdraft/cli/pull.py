"""`quickdraft pull`: fetch a model's file into the cache and print its path."""

from __future__ import annotations

import typer

from quickdraft.cli.flags import Model, report
from quickdraft.config import DEFAULT_MODEL

app = typer.Typer(add_completion=False)


@app.command()
def pull(model: Model = DEFAULT_MODEL) -> None:
    """Fetch a model into the cache, check it, and print its path."""
    from quickdraft.prepare.models import resolve_model

    print(resolve_model(model, report).path)
