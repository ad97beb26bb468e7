"""From the name a user types to a model file that is there and whole.

An alias is fetched when it is missing or damaged; a file is taken as it is. Nothing here opens
a model or knows its format.
"""

from __future__ import annotations

from collections.abc import Callable

from quickdraft.config import FoundModel, cache_folder, find_model
from quickdraft.prepare.fetch import fetch


def resolve_model(name: str, report: Callable[[str], None]) -> FoundModel:
    """The model `name` means, its file present; `report` gets one line per thing done.

    Raises ConfigError (unknown name), UnsupportedError (folder) and whatever `fetch` raises.
    """
    found = find_model(name)
    if found.alias is not None:
        fetch(found.alias, cache_folder(), report=report)
    return found
