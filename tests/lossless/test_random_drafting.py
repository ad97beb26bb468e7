"""A random source, or fusion, and a random length at every step: on toys and on a model with drafters."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quickdraft.engine.llm import LLM
from quickdraft.models.registry import open_target
from quickdraft.speculate.lookup import LookupDrafter
from quickdraft.types import SamplingParams, Speculation
from tests.lossless.test_tiny_llama import repetitive_prompts
from tests.lossless.test_toy import DRAFTERS, params_for, requests, truth_of
from tests.support.draft_engine import knowing_drafter, poison_freed
from tests.support.drafting import RandomDrafting
from tests.support.mtp_folder import write_mtp_folder
from tests.support.settings import SETTINGS
from tests.support.tiny import write_tiny_llama
from tests.support.toy import run_all, toy_engine

OFF, ALL = Speculation(), Speculation.parse("lookup+mtp+dflash2+dflash@64")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("chunk_rows", "blocks"), [(64, 64), (5, 64), (16, 13), (3, 8)])
def test_toys(setting: str, chunk_rows: int, blocks: int) -> None:
    truth = truth_of(setting)
    scripted = DRAFTERS["random"](truth)
    scripted.source = "corpus"
    drafting = RandomDrafting([LookupDrafter(), scripted], seed=blocks)
    engine = toy_engine(drafting, chunk_rows=chunk_rows, blocks=blocks)
    assert run_all(engine, requests(params_for(setting))) == truth
    assert drafting.drafted["corpus"] > 5


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny llama with every kind of drafter, two of which are right now and then."""
    folder = tmp_path_factory.mktemp("llama")
    path = write_tiny_llama(folder / "tiny.gguf", tokenizer=False, quantisation="Q8_0")
    following: dict[int, int] = {}
    plain = LLM(path, threads=1, kv_memory_bytes=1 << 22, drafters=())
    for prompt in repetitive_prompts(300):
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, speculation=OFF)
        text = [prompt[-1], *plain.generate(prompt, params).ids]
        following |= dict(itertools.pairwise(text))
    plain.close()
    target = open_target(path).config
    folders: list[Path] = [
        write_mtp_folder(folder / "mtp"),
        knowing_drafter(folder / "v2", target, following, dflash_config={"selector_top_k": 32}),
        knowing_drafter(folder / "v1", target, following, version=1, dflash_config={"block_size": 16}),
    ]
    llm = LLM(
        path, threads=1, chunk_rows=48, kv_memory_bytes=1 << 22, drafters=folders, max_sequences=4,
        prefix_cache=False,
    )  # fmt: skip
    poison_freed(llm)
    yield llm
    llm.close()


@pytest.mark.parametrize("seed", range(3))
def test_models_with_drafters(llm: LLM, seed: int) -> None:
    engine, prompts = llm.opened.engine, repetitive_prompts(300)
    names = list(SETTINGS)[seed::3]
    jobs: list[Any] = [
        (prompts[number % len(prompts)], dataclasses.replace(SETTINGS[name], max_tokens=40))
        for number, name in enumerate(["greedy", *names])
    ]
    before = engine.drafting
    drafting = RandomDrafting(list(before._drafters.values()), seed)
    wanted = [llm.generate(prompt, dataclasses.replace(one, speculation=OFF)) for prompt, one in jobs]
    engine.drafting = drafting
    try:
        drafted = [(prompt, dataclasses.replace(one, speculation=ALL)) for prompt, one in jobs]
        found = [llm.generate(*drafted[0]), *llm.generate_many(drafted[1:])]
    finally:
        engine.drafting = before
    for one, plain in zip(found, wanted, strict=True):
        assert one.ids == plain.ids and one.logprobs == plain.logprobs
    accepted = sum(sum(one.timings.accepted.values()) for one in found)
    assert np.all([drafting.drafted.get(name, 0) > 3 for name in ("lookup", "mtp", "dflash2", "dflash")])
    assert sum(drafting.drafted.values()) > 30 and accepted > 20
