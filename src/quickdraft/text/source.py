"""naming: errors about a model's text files say which file it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quickdraft.errors import ModelFormatError, UnsupportedError


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Put `source` (a path, or "" for none) in front of format errors raised inside."""
    try:
        yield
    except (ModelFormatError, UnsupportedError) as error:
        if not source:
            raise
        raise type(error)(
            f"{source}: {error.what}", got=error.got, expected=error.expected, hint=error.hint
        ) from error
