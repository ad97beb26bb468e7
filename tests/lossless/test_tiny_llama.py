"""Lookup never changes a token: the whole matrix on a tiny random llama in the real file format."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.matrix import check
from tests.support.settings import SETTINGS
from tests.support.tiny import write_tiny_llama, written_as

MAX_TOKENS = 64


def repetitive_prompts(vocabulary: int) -> list[list[int]]:
    """Four prompts whose text repeats, so that lookup has something to propose."""
    source = random.Random(5)
    ids = range(20, vocabulary)
    phrase = [source.choice(ids) for _ in range(23)]
    prompts = [phrase * 3 + phrase[:9], [source.choice(ids) for _ in range(90)]]
    prompts.append(([source.choice(ids)] * 6 + phrase[:5]) * 4)
    prompts.append(prompts[1][:30] + phrase + prompts[1][:30])
    return prompts


@pytest.mark.parametrize("quantisation", ["Q4_1", "Q8_0", "F32"])
def test_ids_with_lookup_equal_plain_decoding(tmp_path: Path, quantisation: str) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", quantisation=quantisation, vocabulary_size=320)
    accepted = check(path, repetitive_prompts(300), SETTINGS, MAX_TOKENS)
    assert accepted["greedy"] > 60, f"lookup hardly drafted, so this proved little: {accepted}"
    assert sum(count > 0 for count in accepted.values()) > 8, accepted


def test_ids_with_int8_keys_and_values_equal_plain_decoding_with_them(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", quantisation="Q4_1", vocabulary_size=320)
    accepted = check(path, repetitive_prompts(300), SETTINGS, MAX_TOKENS, kv_dtype="int8")
    assert accepted["greedy"] > 60, f"lookup hardly drafted, so this proved little: {accepted}"


@pytest.mark.parametrize("quantisation", ["Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1", "mixed"])
def test_ids_are_equal_in_every_tensor_type(tmp_path: Path, quantisation: str) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", **written_as(quantisation))
    settings = {name: SETTINGS[name] for name in ("greedy", "top_k_top_p_min_p")}
    accepted = check(path, repetitive_prompts(300), settings, MAX_TOKENS, schedules=((1, 256), (2, 16)))
    assert accepted["greedy"] > 60, f"lookup hardly drafted, so this proved little: {accepted}"
