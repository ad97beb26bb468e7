"""Cached == cold on a real tiny hybrid: ids and logprobs in bits, with drafts, batches and a restart."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from quickdraft.engine.llm import LLM
from quickdraft.errors import ConfigError
from quickdraft.types import SamplingParams
from tests.lossless.test_prefix import Told, same
from tests.support.tiny_hybrid import ADDRESSABLE, write_tiny_hybrid
from tests.support.toy import AlwaysDraft

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, ignore_eos=True)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.9, top_p=0.95, seed=11)
INTERVAL = 64
SETTINGS = {"threads": 1, "chunk_rows": 48, "kv_memory_bytes": 1 << 24, "checkpoint_interval": INTERVAL}


def text(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    alphabet = [source.randrange(20, ADDRESSABLE) for _ in range(5)]
    return [source.choice(alphabet) for _ in range(length)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hybrid(tmp_path_factory.mktemp("hybrid") / "tiny")


def poison_what_is_free(llm: LLM) -> None:
    """NaN in every block and slot now, and again whenever one is freed."""
    scheduler, kv = llm.opened.engine.scheduler, llm.opened.runner.kv
    storage = scheduler.slots.storage

    def fill(views: list[memoryview]) -> None:
        for view in views:
            view[:] = b"\xff" * len(view)

    scheduler.pool._on_free = lambda block: fill(kv.views(block))
    scheduler.slots._on_free = lambda slot: fill(storage.views(slot))
    for block in range(kv.blocks):
        fill(kv.views(block))
    for slot in range(storage.slots):
        fill(storage.views(slot))


@pytest.fixture(scope="module")
def pair(path: Path) -> Iterator[tuple[LLM, LLM]]:
    """The same model with a prefix cache, free blocks and slots full of NaN, and without one."""
    llms = [LLM(path, **SETTINGS, prefix_cache=cache) for cache in (True, False)]
    poison_what_is_free(llms[0])
    yield llms[0], llms[1]
    for llm in llms:
        llm.close()


@pytest.mark.parametrize("first", range(1, 301, 60))
def test_lengths_and_where_the_cache_ends(pair: tuple[LLM, LLM], first: int) -> None:
    cache, cold = pair
    told, accepted = Told(), 0
    drafting = (cache.opened.engine.drafting, AlwaysDraft(told))
    for length in range(first, first + 60, 6):
        block = (length - 1) // 16 * 16
        for index, shared in enumerate(
            sorted({0, length // 3, block, min(block + 1, length - 1), length - 1})
        ):
            prompt = [2 + index, 20 + length % 60, *text(length, length)][:length]
            params = GREEDY if length % 4 else SAMPLED
            cache.opened.engine.drafting = drafting[index % 2]
            expected = cold.generate(prompt, params)
            told.truth = (*prompt, *expected.ids)
            if shared:
                cache.generate([*prompt[:shared], 1], GREEDY)
            found = cache.generate(prompt, params)
            same(found, expected)
            assert found.timings.cached_tokens == min(shared, length - 1)
            again = cache.generate(prompt, params)
            same(again, expected)
            assert again.timings.cached_tokens == length - 1
            accepted += sum(found.timings.accepted.values())
            turn = [*prompt, *found.ids, 7, 8, 9]
            expected = cold.generate(turn, params)
            told.truth = (*turn, *expected.ids)
            found = cache.generate(turn, params)
            same(found, expected)
            assert found.timings.cached_tokens == length + GREEDY.max_tokens - 1
        cache.opened.engine.scheduler.cache.clear()
    cache.opened.engine.drafting = drafting[0]
    assert accepted > 20, "drafts were hardly ever right"


def test_a_batch_that_parts_within_a_document(pair: tuple[LLM, LLM]) -> None:
    cache, cold = pair
    document = text(200, 5)
    prompts = [document[: 120 + 16 * k] + text(20, 60 + k) for k in range(5)]
    jobs = [(prompt, dataclasses.replace(SAMPLED, max_tokens=20)) for prompt in prompts]
    expected = cold.generate_many(jobs)
    for _ in range(2):
        found = cache.generate_many(jobs)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    assert [one.timings.cached_tokens for one in found] == [len(prompt) - 1 for prompt in prompts]


@pytest.mark.parametrize("drafts", [False, True])
def test_after_a_restart(path: Path, tmp_path: Path, pair: tuple[LLM, LLM], drafts: bool) -> None:
    prompts = [[2 + length % 17, *text(length, length)] for length in range(3, 301, 27)]
    writer = LLM(path, **SETTINGS, cache_dir=tmp_path)
    for prompt in prompts:
        writer.generate(prompt, GREEDY)
    writer.close()
    reader, told = LLM(path, **SETTINGS, cache_dir=tmp_path, checkpoint_memory_bytes=1 << 20), Told()
    if drafts:
        reader.opened.engine.drafting = AlwaysDraft(told)
    for prompt in prompts:
        expected = pair[1].generate(prompt, SAMPLED)
        told.truth = (*prompt, *expected.ids)
        found = reader.generate(prompt, SAMPLED)
        same(found, expected)
        assert found.timings.cached_tokens == found.cache.restored_tokens == len(prompt) - 1
    counters = reader.opened.engine.metrics().disk
    assert counters["restored_states"] == len(prompts) and counters["rejected_files"] == 0
    reader.close()


def test_memory_for_no_state_is_an_error(path: Path) -> None:
    with pytest.raises(ConfigError, match="checkpoint memory holds no state"):
        LLM(path, **SETTINGS, checkpoint_memory_bytes=100)
