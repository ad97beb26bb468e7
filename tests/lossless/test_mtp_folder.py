"""An MTP module beside a llama never changes a token, and stays warm after prefix hits and preemption."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quickdraft.bench.engine_arms import EngineArms
from quickdraft.engine.llm import LLM
from quickdraft.models.draft_vocab import DraftVocab
from quickdraft.types import SamplingParams, Speculation
from tests.lossless.test_mtp import GREEDY, MTP, SAMPLED
from tests.lossless.test_tiny_llama import repetitive_prompts
from tests.support.drafting import Counted
from tests.support.mtp import (
    SOURCES,
    Recorder,
    Scratch,
    agree,
    check_alone_and_ragged,
    check_from_nothing,
    plain,
    poison_freed,
    same,
)
from tests.support.mtp_folder import VOCABULARY, write_mtp_folder
from tests.support.tiny import write_tiny_llama

SETTINGS: dict[str, Any] = {"threads": 1, "chunk_rows": 48, "kv_memory_bytes": 1 << 22}
PARAMS = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("llama") / "tiny.gguf", quantisation="Q8_0")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mtp_folder(tmp_path_factory.mktemp("mtp") / "tiny")


@pytest.fixture(scope="module")
def vocab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three in four ids."""
    path = tmp_path_factory.mktemp("vocab") / "vocab.json"
    ids = np.array([token for token in range(VOCABULARY) if token % 4 != 1])
    DraftVocab(ids, 0.75, VOCABULARY).save(path)
    return path


@pytest.fixture(params=["whole head", "draft vocabulary"])
def settings(request: pytest.FixtureRequest, drafter: Path, vocab: Path) -> dict[str, Any]:
    return SETTINGS | {
        "drafters": [drafter], "draft_vocab": vocab if request.param == "draft vocabulary" else None,
    }  # fmt: skip


@pytest.fixture(scope="module")
def cold(target: Path, drafter: Path) -> Iterator[LLM]:
    """Without a prefix cache, freed memory poisoned."""
    llm = LLM(target, **SETTINGS, drafters=[drafter], prefix_cache=False)
    poison_freed(llm)
    yield llm
    llm.close()


def texts() -> list[list[int]]:
    return [*repetitive_prompts(300), [5], [9, 10]]


@pytest.mark.parametrize("turns", [("mtp",), SOURCES], ids=["mtp", "by turns"])
def test_drafts_are_those_of_the_same_text_from_nothing(
    target: Path, settings: dict[str, Any], turns: tuple[str, ...]
) -> None:
    llm = LLM(target, **settings, prefix_cache=False)
    poison_freed(llm)
    scratch = Scratch(target, "float16", settings["drafters"][0], settings["draft_vocab"])
    made = check_from_nothing(llm, scratch, texts(), GREEDY, turns)
    if settings["draft_vocab"] is not None:
        assert not any(token % 4 == 1 for draft in made.values() for token in draft)
    llm.close()


@PARAMS
def test_alone_ragged_and_plain_are_equal(
    target: Path, settings: dict[str, Any], params: SamplingParams
) -> None:
    llm = LLM(target, **settings, max_sequences=4)
    poison_freed(llm)
    check_alone_and_ragged(llm, texts(), params, SOURCES, 10)
    llm.close()


@pytest.mark.parametrize("text", ["mtp+lookup@8", "auto"])
def test_by_the_rule(target: Path, drafter: Path, text: str) -> None:
    llm = LLM(target, **SETTINGS, drafters=[drafter], max_sequences=4)
    params = dataclasses.replace(GREEDY, speculation=Speculation.parse(text))
    accepted = 0
    for prompt in texts():
        found = llm.generate(prompt, params)
        accepted += found.timings.accepted.get("mtp", 0)
        same(found, llm.generate(prompt, plain(params)))
    assert accepted > 10
    llm.close()


@PARAMS
@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_drafts_after_prefix_hits_are_those_of_a_cold_run(
    target: Path, drafter: Path, tmp_path: Path, cold: LLM, params: SamplingParams, disk: bool
) -> None:
    settings = SETTINGS | {"drafters": [drafter]} | ({"cache_dir": tmp_path} if disk else {})
    llm = LLM(target, **settings)
    poison_freed(llm)
    params = dataclasses.replace(params, max_tokens=12)
    base = texts()[1] + texts()[0]
    for length in (2, 15, 16, 17, 18, 32, 47, 65, 150):
        start = [7 + length, *base][:length]
        llm.generate(start, dataclasses.replace(params, max_tokens=1))
        if disk:
            llm.close()
            llm = LLM(target, **settings)
            poison_freed(llm)
        for prompt in (start, [*start, 3], [*start, *base[-9:]], [*start[:-1], 4, 5, 6]):
            recorder, told = Recorder(llm), Recorder(cold)
            found = llm.generate(prompt, params)
            same(found, cold.generate(prompt, params))
            assert found.timings.cached_tokens >= length - 3
            agree(recorder.made, told.made, 2)
    assert llm.opened.engine.metrics().draft_cold_tokens == 0
    llm.close()


def test_while_nothing_is_drafted_rows_are_made_for_many_tokens_at_once(target: Path, drafter: Path) -> None:
    llm = LLM(target, **SETTINGS, drafters=[drafter])
    poison_freed(llm)
    ran: list[str] = []
    of: Any = llm.opened.engine.drafting._drafters["mtp"]
    of._keys, of._draft = Counted(of._keys, "keys", ran), Counted(of._draft, "draft", ran)
    Recorder(llm, ("",))
    prompt = texts()[0][:40]
    found = llm.generate(prompt, GREEDY)
    assert len(found.ids) == found.timings.steps == 40
    assert ran == ["keys"] * 4, "the prompt, twice sixteen tokens, and the rest at the end"
    recorder = Recorder(llm)
    same(
        llm.generate([*prompt, *found.ids, 7], GREEDY), llm.generate([*prompt, *found.ids, 7], plain(GREEDY))
    )
    assert recorder.made and llm.opened.engine.drafting.cold_tokens == 0
    llm.close()


def test_a_request_that_does_not_draft_resumes_at_the_last_token(target: Path, drafter: Path) -> None:
    """One more token cached, no rows written; a later one that drafts is cold, and drafts."""
    llm = LLM(target, **SETTINGS, drafters=[drafter])
    poison_freed(llm)
    prompt = texts()[0][:76]
    llm.generate(prompt, dataclasses.replace(plain(GREEDY), max_tokens=1))
    found = llm.generate(prompt, plain(GREEDY))
    assert found.timings.cached_tokens == len(prompt) - 1
    recorder = Recorder(llm)
    again = llm.generate(prompt, GREEDY)
    same(again, found)
    assert again.timings.cached_tokens == len(prompt) - 2 and len(recorder.made) > 5
    assert again.cache is not None and again.cache.reason == "none" and again.cache.again_tokens == 1
    assert llm.opened.engine.metrics().draft_cold_tokens == len(prompt) - 2
    llm.close()


@PARAMS
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_requests_go_on_drafting(
    target: Path, drafter: Path, cold: LLM, params: SamplingParams, prefix_cache: bool
) -> None:
    """Blocks for little more than one of four requests: they give theirs back and read again."""
    block = cold.opened.runner.kv.bytes_per_block
    settings = SETTINGS | {"kv_memory_bytes": 14 * block, "drafters": [drafter]}
    llm = LLM(target, **settings, max_sequences=4, prefix_cache=prefix_cache)
    poison_freed(llm)
    recorder, told = Recorder(llm), Recorder(cold)
    params = dataclasses.replace(params, speculation=MTP, max_tokens=60)
    prompts = [prompt[:40] for prompt in repetitive_prompts(300)]
    found = llm.generate_many([(prompt, params) for prompt in prompts])
    for prompt, one in zip(prompts, found, strict=True):
        same(one, cold.generate(prompt, params))
    assert llm.opened.engine.scheduler.preemptions > 1
    agree(recorder.made, told.made, 25)
    assert llm.free_blocks == llm.total_blocks
    llm.close()


def test_a_fork_is_as_warm_as_what_it_was_forked_from(target: Path, drafter: Path, cold: LLM) -> None:
    """As bench stages forks the state of a prompt for each of its arms."""
    llm = LLM(target, **SETTINGS, drafters=[drafter])
    poison_freed(llm)
    recorder, told = Recorder(llm), Recorder(cold)
    opened, prompt = llm.opened, texts()[1][:75]
    wanted = cold.generate(prompt, GREEDY)
    arms = EngineArms(opened.engine, opened.request, opened.memory.storage.copy_block)
    for _ in range(3):
        recorder.made.clear()
        arm = arms.start(prompt, GREEDY)
        ids, _ = arm.advance(len(wanted.ids))
        assert ids == wanted.ids and arm.timings.drafted == wanted.timings.drafted
        assert recorder.made == told.made and tuple(prompt) in recorder.made
    arms.close()
    assert llm.free_blocks == llm.total_blocks
    llm.close()
