"""Where the default model lies; tests marked `model` fail with a hint when it was not pulled."""

from __future__ import annotations

from pathlib import Path

from quickdraft.config import cached_model


def default_model_path() -> Path:
    """Path of the cached default model; ConfigError says to run `quickdraft pull`."""
    return cached_model("smollm2-135m")[1]
