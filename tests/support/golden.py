"""Golden data: a tiny hybrid checkpoint in the real file format, and what transformers 5.24 made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

FOLDER = Path(__file__).parents[1] / "golden"
TARGET = FOLDER / "target"
TOLERANCE = 2e-4  # float32 on both sides, sums in different orders; values reach 10


def expected() -> dict[str, Any]:
    """Prompt, greedy ids and what drafters propose."""
    values: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())
    return values


def expected_tensors() -> dict[str, NDArray[np.float32]]:
    """Logits and hidden states of the prompt."""
    return load_file(FOLDER / "expected.safetensors")
