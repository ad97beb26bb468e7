"""python -m quickdraft"""

from __future__ import annotations

from quickdraft.cli.main import app

if __name__ == "__main__":
    app(prog_name="quickdraft")
