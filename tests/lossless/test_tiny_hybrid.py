"""Lookup never changes a token of a hybrid: pending rows, replay and slots, alone and in ragged batches."""

from __future__ import annotations

from pathlib import Path

from tests.lossless.test_tiny_llama import repetitive_prompts
from tests.support.matrix import check
from tests.support.settings import SETTINGS
from tests.support.tiny_hybrid import write_tiny_hybrid

FEW = {name: SETTINGS[name] for name in ("greedy", "top_k_top_p_min_p", "repetition")}


def test_ids_with_lookup_equal_plain_decoding(tmp_path: Path) -> None:
    accepted = check(write_tiny_hybrid(tmp_path / "tiny"), repetitive_prompts(300), FEW, 48)
    assert accepted["greedy"] > 40, f"lookup hardly drafted, so this proved little: {accepted}"
