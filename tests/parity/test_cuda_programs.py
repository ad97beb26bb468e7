"""Programs in captured stretches: what is replayed has the bits of what is started one by one, whatever the
rows, contexts, slots and drafts of a step are beside those that were captured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from quickdraft.ops.cuda import program as program_module
from tests.support.card import card
from tests.support.fake_capture import capturing_card
from tests.support.golden import TARGET
from tests.support.model_steps import ModelSteps
from tests.support.tiny_hybrid import write_tiny_hybrid

Logits = list[NDArray[np.float32]]
# tokens, how many are drafted, rows of the last step that are replayed
STEPS: tuple[tuple[Sequence[int], int, int], ...] = (
    ((5, 9, 14), 0, 0),  # met for the first time: 4 rows
    ((7, 8, 11, 12), 3, 0),  # captured, with drafts
    ((8, 11, 60), 2, 2),  # again: fewer rows and drafts, two rows of history, another context
    ((61,), 0, 1),  # met: 1 row
    ((62,), 0, 0),  # captured
)


def logits_of(steps: ModelSteps, count: int = len(STEPS)) -> Logits:
    return [steps.step(list(tokens), drafted=drafted, replay=kept) for tokens, drafted, kept in STEPS[:count]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hybrid(tmp_path_factory.mktemp("hybrid") / "tiny")


@pytest.fixture(scope="module")
def plain(path: Path) -> tuple[Logits, bytes]:
    """Logits and state of a card that starts every kernel by itself."""
    steps = ModelSteps(path, card())
    return logits_of(steps), steps.state_bytes()


def test_replayed_steps_have_the_bits_of_started_ones(path: Path, plain: tuple[Logits, bytes]) -> None:
    ops, capture = capturing_card()
    ours = ModelSteps(path, ops)
    for found, wanted in zip(logits_of(ours), plain[0], strict=True):
        assert found.tobytes() == wanted.tobytes()
    assert ours.state_bytes() == plain[1]
    assert len(capture.starts) == 2 * 2 and min(capture.starts) > 5  # two shapes, before and after attention
    assert capture.replays == 2 * (2 + 1)  # every step but the first of each shape


@pytest.mark.full
def test_the_golden_hybrid_replayed() -> None:
    ours, plain = ModelSteps(TARGET, capturing_card()[0]), ModelSteps(TARGET, card())
    for found, wanted in zip(logits_of(ours), logits_of(plain), strict=True):
        assert found.tobytes() == wanted.tobytes()


def test_a_number_that_slips_into_a_capture_shows(
    path: Path, plain: tuple[Logits, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention captured with the rest, whose grid follows the context, gives other logits: so the test above
    can fail."""
    monkeypatch.setattr(program_module, "_is_fixed", lambda start: True)
    ops, _ = capturing_card()
    pairs = zip(logits_of(ModelSteps(path, ops), 3), plain[0], strict=False)
    assert not all(found.tobytes() == wanted.tobytes() for found, wanted in pairs)
