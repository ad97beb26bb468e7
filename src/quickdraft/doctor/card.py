"""The promises on a card, for `bench card`: a small random hybrid with the heads and states of the large one,
in the engine that serves.

A random model follows nobody's text, so what is compared is long runs of ids and the bits of logprobs, with
drafts of every length that are half right. Owns the model's sizes and which checks run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from quickdraft.config import Hardware
from quickdraft.doctor import exactness
from quickdraft.doctor.check import Check, run_check
from quickdraft.doctor.patient import Patient
from quickdraft.engine.llm import LLM
from quickdraft.models.describe_hybrid import HybridSizes
from quickdraft.prepare.random_model import write_random
from quickdraft.types import Backend

HINT: Final = "QUICKDRAFT_CUDA_GRAPHS=off starts every kernel by itself: does it hold then?"
SIZES: Final = HybridSizes(
    width=512, layers=4, heads=6, kv_heads=1, head_dim=256, feed_forward=1024,
    vocabulary=2048, context=2048, eos_ids=(258, 256), byte_tokenizer=True,
    key_heads=1, value_heads=3, key_dim=128, value_dim=128, mrope_section=(11, 11, 10),
)  # fmt: skip
SEED: Final = 11
KV_BYTES: Final = 64 << 20
CHECKS: Final = (
    ("speculation", exactness.speculation),
    ("prefix cache", exactness.cached_is_cold),
    ("batch", exactness.alone_is_batched),
)


def promises(sizes: HybridSizes = SIZES, backend: Backend = Backend.CUDA) -> Iterator[Check]:
    """Each of CHECKS; whatever happens inside one is its outcome. Another backend is for tests."""
    with tempfile.TemporaryDirectory(prefix="quickdraft-card-") as folder:
        path = Path(folder) / "model"
        write_random(sizes, "compressed-tensors", path, seed=SEED, report=lambda line: None)
        free = Hardware.detect().free_memory_bytes
        llm = LLM(path, backend=backend, kv_memory_bytes=KV_BYTES, checkpoint_memory_bytes=KV_BYTES)
        try:
            patient = Patient(llm, free)
            for name, check in CHECKS:
                yield run_check(name, lambda check=check: check(patient), HINT)  # type: ignore[misc]
        finally:
            llm.close()
