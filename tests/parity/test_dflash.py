"""DFlash and DFlash2: golden blocks, the published package on random weights, and rows in bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quickdraft.models.interface import Taps
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.ops.select import select
from tests.support.dflash import DrafterSteps, drafter_config, write_drafter
from tests.support.golden import FOLDER, TARGET, TOLERANCE, expected, expected_tensors
from tests.support.model_steps import ModelSteps

TAPS = Taps(layers=(1, 3, 5))
GOLDEN = expected()
TEXT: list[int] = [*GOLDEN["prompt"], *GOLDEN["greedy_64"]]


def features_of(steps: ModelSteps, tokens: list[int]) -> Any:
    """The target's taps [n, 3 C] of further tokens."""
    steps.step(tokens)
    return np.concatenate([steps.model.taps[layer][: len(tokens)] for layer in TAPS.layers], axis=1)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", ["dflash1", "dflash2"])
def test_golden_blocks(name: str, backend: str) -> None:
    ops = ReferenceOps() if backend == "reference" else select(2)
    target = ModelSteps(TARGET, ops, TAPS)
    drafter = DrafterSteps.load(FOLDER / name, target.loaded, ops)
    tensors, done = expected_tensors(), 0
    for index, block in enumerate(GOLDEN[name]):
        drafter.append(features_of(target, TEXT[done : block["context"]]))
        done = block["context"]
        rows = drafter.module.config.block
        (hidden,) = drafter.block([block["anchor"]], [rows])
        np.testing.assert_allclose(hidden, tensors[f"{name}_block{index}_hidden"], atol=TOLERANCE)
        best = [int(drafter.module.scores(row, block["anchor"])[0][0]) for row in range(rows - 1)]
        assert best == block["argmax"]
        assert drafter.path(block["anchor"], rows - 1) == block.get("path", block["argmax"])
    assert done == 85
