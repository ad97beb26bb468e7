"""Lookup never changes a token of a qwen folder or GGUF file: biases and head norms are row by row too, and
so are zero points and inputs in an order of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lossless.test_tiny_llama import repetitive_prompts
from tests.support.matrix import check
from tests.support.quant_folder import FORMATS, quantised_folder
from tests.support.settings import SETTINGS
from tests.support.tiny import write_tiny_llama
from tests.support.tiny_folder import write_tiny_folder

FEW = {name: SETTINGS[name] for name in ("greedy", "top_k_top_p_min_p", "repetition")}


@pytest.mark.parametrize(
    "form", ["qwen3 BF16 folder", "qwen2 Q4_1 file", "gptq v2 in order, asymmetric, 8 bits", "awq"]
)
def test_ids_with_lookup_equal_plain_decoding(tmp_path: Path, form: str) -> None:
    if form in FORMATS:
        path = tmp_path / "tiny"
        quantised_folder(path, FORMATS[form], "qwen3" if form == "awq" else "llama", size=0.1)
    elif form.endswith("folder"):
        path = write_tiny_folder(tmp_path / "tiny", "qwen3", dtype="BF16")
    else:
        path = write_tiny_llama(tmp_path / "tiny.gguf", architecture="qwen2", quantisation="Q4_1")
    accepted = check(path, repetitive_prompts(300), FEW, 48)
    assert accepted["greedy"] > 40, f"lookup hardly drafted, so this proved little: {accepted}"
