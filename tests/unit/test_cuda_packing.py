"""Codes are packed on the device some outputs at a time, which must not show."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quickdraft.ops.cuda import weights
from quickdraft.ops.weights import Grouped, Int4Groups, Int8Groups
from tests.support import interpreter as interpreter

OUTPUTS, INPUTS, GROUP = 37, 160, 32
RANDOM = np.random.default_rng(5)
SCALES = RANDOM.uniform(0.1, 1, (OUTPUTS, INPUTS // GROUP)).astype(np.float16)
CODES = RANDOM.integers(0, 16, (OUTPUTS, INPUTS), np.uint8)


@pytest.mark.parametrize(
    "weight",
    [
        Int4Groups(CODES, SCALES),
        Int4Groups(CODES[:, ::2] | CODES[:, 1::2] << 4, SCALES, paired=True),
        Int8Groups(RANDOM.integers(-128, 128, (OUTPUTS, INPUTS)).astype(np.int8), SCALES),
        Int8Groups(RANDOM.integers(-16, 16, (OUTPUTS, INPUTS)).astype(np.int8), SCALES, bits=5),
        Int8Groups(RANDOM.integers(-32, 32, (OUTPUTS, INPUTS)).astype(np.int8), SCALES, bits=6),
    ],
    ids=["4", "4 paired", "8", "5", "6"],
)
@pytest.mark.parametrize("at_once", [1, 10 * INPUTS, 1 << 24])
def test_every_code_is_in_its_place(monkeypatch: pytest.MonkeyPatch, weight: Grouped, at_once: int) -> None:
    monkeypatch.setattr(weights, "PACKED_AT_ONCE", at_once)
    packed = weights.pack(weight, torch.device("cpu"), torch.float16)
    assert isinstance(packed, weights.PackedGroups)
    count = 16 // packed.bits
    words = packed.words.numpy().view(np.uint16)
    codes = (words[:, :, None] >> packed.bits * np.arange(count)[:, None]) & ((1 << packed.bits) - 1)
    if packed.high is not None:
        codes = codes.astype(np.int64)
        for block, index in np.ndindex(len(words), count):
            each = 2 // packed.high_bits
            part = packed.high.numpy()[block // each] >> 4 * (block % each) + packed.high_bits * index
            codes[block, :, index] |= (part & (1 << packed.high_bits) - 1).astype(np.int64) << 4
    flat = codes.transpose(1, 0, 2, 3).reshape(OUTPUTS, -1)
    values = (flat[:, :INPUTS] - packed.offset) * np.repeat(SCALES.astype(np.float32), GROUP, axis=1)
    assert not flat[:, INPUTS:].any()
    np.testing.assert_array_equal(values.astype(np.float32), weight.dequantised())
