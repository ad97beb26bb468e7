"""Whole models against transformers: a tiny random llama per file format, and SmolLM2 dequantised.

The file's weights are run dequantised through Dense, so that both sides compute with the same
numbers in float32; the int8-activation path is compared with the oracle in test_cpu_ops.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quickdraft.models.loading import gguf as loading
from quickdraft.models.registry import load_model
from quickdraft.ops.interface import Ops
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.ops.select import select
from quickdraft.ops.weights import Dense, Weight
from tests.support.model import default_model_path
from tests.support.tiny import write_tiny_llama, written_as

# float32 on both sides, sums in different orders; logits of these models have a spread of 2 to 8
TOLERANCE = {"tiny": 2e-4, "smollm2": 2e-2}


def dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    original = loading.GGUFFile.matrix

    def matrix(self: loading.GGUFFile, name: str) -> Weight:
        return Dense(original(self, name).dequantised())

    monkeypatch.setattr(loading.GGUFFile, "matrix", matrix)


def our_logits(path: Path, ids: list[int], ops: Ops, head_bits: int | None = None) -> np.ndarray:
    loaded = load_model(path, ops, max_rows=len(ids), max_wanted=len(ids), head_bits=head_bits)
    blocks = -(-len(ids) // 16)
    batch = ops.batch(len(ids), 1, blocks, blocks, loaded.model.config.vocabulary_size)
    program = loaded.model.program(batch, loaded.model.kv_cache(blocks, "float32"))
    arrays = (ids, range(len(ids)), [0, len(ids)], [list(range(blocks))], range(len(ids)))
    batch.set(*(np.array(a, np.int32) for a in arrays))
    program.run()
    return np.array(loaded.model.logits[: len(ids)])


def their_logits(path: Path, ids: list[int], rope_factors: np.ndarray | None = None) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    if rope_factors is not None:  # what Llama 3.1's own scaling does to the frequencies
        model.model.rotary_emb.inv_freq /= torch.from_numpy(rope_factors)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "quantisation",
    ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "mixed"],
)
def test_tiny_llama_equals_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantisation: str, backend: str
) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", **written_as(quantisation))
    dequantised(monkeypatch)
    ids = [int(i) for i in np.random.default_rng(1).integers(3, 320, 37)]
    ours = our_logits(path, ids, ReferenceOps() if backend == "reference" else select(2))
    assert np.abs(ours - their_logits(path, ids)).max() < TOLERANCE["tiny"]


def test_a_tied_head_equals_transformers(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", tied=True)
    ids = [int(i) for i in np.random.default_rng(2).integers(3, 320, 9)]
    ours = our_logits(path, ids, ReferenceOps())
    assert np.abs(ours - their_logits(path, ids)).max() < TOLERANCE["tiny"]


def test_rope_factors_equal_transformers(tmp_path: Path) -> None:
    ids = [int(i) for i in np.random.default_rng(3).integers(3, 320, 65)]
    factors = np.linspace(1.0, 8.0, 8, dtype=np.float32)
    plain = write_tiny_llama(tmp_path / "tiny.gguf")
    stretched = write_tiny_llama(tmp_path / "stretched.gguf", rope_factors=factors)
    ours, theirs = our_logits(stretched, ids, ReferenceOps()), their_logits(plain, ids, factors)
    assert np.abs(ours - theirs).max() < TOLERANCE["tiny"]
    assert np.abs(ours - our_logits(plain, ids, ReferenceOps())).max() > 10 * TOLERANCE["tiny"]


@pytest.mark.model
def test_smollm2_equals_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    path = default_model_path()
    dequantised(monkeypatch)
    ids = [1, 4093, 198, 19556, 28, 638, 359, 346, 47, 2, 198, 1, 520, 9531, 198]
    ours, theirs = our_logits(path, ids, select(2)), their_logits(path, ids)
    assert np.abs(ours - theirs).max() < TOLERANCE["smollm2"]
    assert (ours.argmax(axis=1) == theirs.argmax(axis=1)).all()
