"""A hybrid whose linears are quantised: it computes what its values do; drafts and the cache change no bit.

As `prepare random` writes it (AutoRound, compressed-tensors), and in other formats as tests write it, with
the gates and the MTP module left in bfloat16 and the query projection, which is cut in two, quantised.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from quickdraft.engine.llm import LLM
from quickdraft.models.known import KNOWN
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.ops.select import select
from quickdraft.prepare.random_model import write_random
from quickdraft.types import SamplingParams
from tests.lossless.test_prefix import Told, same, text
from tests.parity.test_quantised import as_dense
from tests.support.model_steps import ModelSteps
from tests.support.quant_folder import FORMATS, quantised_hybrid
from tests.support.toy import AlwaysDraft

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.9, top_p=0.95, seed=11)
TOKENS = 256  # every folder has so many; logits of padding rows are -inf
OURS = ("gptq", "gptq in order", "awq", "compressed-tensors asymmetric", "compressed-tensors 8 bits")


def written(folder: Path, name: str) -> Path:
    if name in FORMATS:
        return quantised_hybrid(folder, FORMATS[name])
    form = "autoround" if name == "random autoround" else "compressed-tensors"
    write_random(KNOWN["tiny-hybrid"], form, folder, seed=1, report=lambda line: None)
    return folder


@pytest.mark.parametrize("name", ["random autoround", "random compressed-tensors", *OURS])
def test_a_quantised_hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = written(tmp_path / "m", name)
    cache, cold = (
        LLM(
            folder, threads=2, chunk_rows=48, kv_memory_bytes=1 << 24, checkpoint_interval=64, prefix_cache=on
        )
        for on in (True, False)
    )
    told, accepted = Told(), 0
    cache.opened.engine.drafting = AlwaysDraft(told)
    for length, params in ((1, SAMPLED), (40, GREEDY), (150, SAMPLED)):
        prompt = text(length, length)
        expected = cold.generate(prompt, params)
        told.truth = (*prompt, *expected.ids)
        for cached in (0, length - 1):
            found = cache.generate(prompt, params)
            same(found, expected)
            assert found.timings.cached_tokens == cached
            accepted += sum(found.timings.accepted.values())
        turn = [*prompt, *expected.ids, 7, 8, 9]
        expected = cold.generate(turn, params)
        told.truth = (*turn, *expected.ids)
        found = cache.generate(turn, params)
        same(found, expected)
        assert found.timings.cached_tokens == length + params.max_tokens - 1
    assert accepted > 20, "drafts were hardly ever right"
    ids = text(30, 5)
    ours = ModelSteps(folder, select(2)).step(ids)[:, :TOKENS]
    as_dense(monkeypatch)
    exact = ModelSteps(folder, ReferenceOps()).step(ids)[:, :TOKENS]
    assert np.std(ours - exact) < 0.1 * np.std(exact) and np.std(exact) > 0.1
