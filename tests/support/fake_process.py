"""A real server process over a FakeEngine: `python -m tests.support.fake_process '{"port": ...}'`.

Settings beside FakeEngine's own: `port`, `drain_seconds`, `load_when` (a file that must exist before
loading ends) and `load_error` (what loading then fails with).
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

from quickdraft.errors import ModelFormatError
from quickdraft.server.app import create_app
from quickdraft.server.limits import Limits
from quickdraft.server.run import Loaded, serve
from tests.support.fake_engine import FakeEngine


def main(settings: dict[str, Any]) -> None:
    listener = socket.create_server(("127.0.0.1", settings.pop("port")))
    drain_seconds = settings.pop("drain_seconds", 30.0)
    load_when, load_error = settings.pop("load_when", None), settings.pop("load_error", None)

    def load() -> Loaded:
        while load_when is not None and not Path(load_when).exists():
            time.sleep(0.01)
        if load_error is not None:
            raise ModelFormatError(load_error)
        engine = FakeEngine(**settings)
        return create_app(engine), engine

    try:
        serve([listener], load, limits=Limits(), drain_seconds=drain_seconds)
    except Exception as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
