"""MTP drafts: right by the golden values, the same whatever was refused or cached before, lossless."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quickdraft.engine.llm import LLM
from quickdraft.engine.opened import EngineConfig, open_model
from quickdraft.errors import UnsupportedError
from quickdraft.types import SamplingParams, Speculation
from tests.lossless.test_tiny_llama import repetitive_prompts
from tests.support.golden import TARGET, TOLERANCE, expected, expected_tensors
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
from tests.support.tiny_hybrid import ADDRESSABLE, hybrid_tensors, write_tiny_hybrid

PROMPT: list[int] = expected()["prompt"]
GOLDEN: list[int] = expected()["greedy_64"]
MTP = Speculation.parse("mtp")
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2, ignore_eos=True, speculation=MTP)
SAMPLED = dataclasses.replace(
    GREEDY, temperature=0.7, top_p=0.95, seed=11, repetition_penalty=1.1, max_tokens=24
)
SETTINGS: dict[str, Any] = {
    "threads": 1, "chunk_rows": 48, "kv_memory_bytes": 1 << 22, "checkpoint_interval": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_hybrid(tmp_path_factory.mktemp("hybrid") / "tiny")


@pytest.fixture(scope="module")
def cold(path: Path) -> Iterator[LLM]:
    """Without a prefix cache, freed memory poisoned."""
    llm = LLM(path, **SETTINGS, prefix_cache=False)
    poison_freed(llm)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def scratch(path: Path) -> Scratch:
    return Scratch(path, "float32")


def test_golden_rows() -> None:
    golden = expected_tensors()
    found = Scratch(TARGET, "float32").run([*PROMPT[1:], GOLDEN[0]], 1, golden["final_hidden_normed"])
    assert np.abs(found - golden["mtp_prompt_out"]).max() < TOLERANCE


def test_golden_drafts_and_ids() -> None:
    llm = LLM(TARGET, **SETTINGS, kv_dtype="float32")
    params = dataclasses.replace(GREEDY, max_tokens=64)
    auto = llm.generate(PROMPT, params)
    assert list(auto.ids) == GOLDEN and auto.timings.drafted["mtp"] > 0
    llm.opened.engine.drafting._drafters["mtp"].longest = 4  # type: ignore[attr-defined]
    recorder = Recorder(llm)
    found = llm.generate(PROMPT, params)
    assert list(found.ids) == GOLDEN
    assert list(recorder.made[*PROMPT, GOLDEN[0]]) == expected()["mtp_drafts_after_prompt"]
    text = (*PROMPT, *GOLDEN)
    right = sum(draft[0] == text[len(key)] for key, draft in recorder.made.items() if len(key) < len(text))
    assert found.timings.accepted["mtp"] >= right  # random weights: few, if any


def texts(count: int = 4) -> list[list[int]]:
    source = random.Random(3)
    prompts = [*repetitive_prompts(ADDRESSABLE), [5], [9, 10], [source.randrange(20, 90) for _ in range(48)]]
    return prompts[:count]


@pytest.mark.parametrize("turns", [("mtp",), SOURCES], ids=["mtp", "by turns"])
def test_drafts_do_not_depend_on_what_was_refused(
    cold: LLM, scratch: Scratch, turns: tuple[str, ...]
) -> None:
    check_from_nothing(cold, scratch, texts(7), GREEDY, turns)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("turns", [("mtp",), SOURCES], ids=["mtp", "by turns"])
def test_alone_ragged_and_plain_are_equal(path: Path, params: SamplingParams, turns: tuple[str, ...]) -> None:
    llm = LLM(path, **SETTINGS, max_sequences=4)
    poison_freed(llm)
    check_alone_and_ragged(llm, texts(), params, turns, 10 if len(turns) > 1 else 30)
    llm.close()


@pytest.mark.parametrize("text", ["mtp", "mtp+lookup@8", "auto"])
def test_by_the_rule(path: Path, text: str) -> None:
    llm = LLM(path, **SETTINGS, max_sequences=4)
    params = dataclasses.replace(GREEDY, speculation=Speculation.parse(text))
    accepted = 0
    for prompt in texts():
        found = llm.generate(prompt, params)
        accepted += found.timings.accepted.get("mtp", 0)
        same(found, llm.generate(prompt, plain(params)))
    assert accepted > 30
    llm.close()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("disk", [False, True], ids=["memory", "disk"])
def test_drafts_after_prefix_hits_are_those_of_a_cold_run(
    path: Path, tmp_path: Path, cold: LLM, params: SamplingParams, disk: bool
) -> None:
    folder = {"cache_dir": tmp_path} if disk else {}
    llm = LLM(path, **SETTINGS, **folder)
    poison_freed(llm)
    params = dataclasses.replace(params, max_tokens=12)
    base = texts(2)[1] + texts(2)[0]
    for length in (15, 16, 17, 32, 47, 65, 150):
        start = [7 + length, *base][:length]
        llm.generate(start, dataclasses.replace(params, max_tokens=1))
        if disk:
            llm.close()
            llm = LLM(path, **SETTINGS, **folder)
            poison_freed(llm)
        for prompt in (start, [*start, 3], [*start, *base[-9:]], [*start[:-1], 4, 5, 6]):
            recorder, told = Recorder(llm), Recorder(cold)
            found = llm.generate(prompt, params)
            same(found, cold.generate(prompt, params))
            assert found.timings.cached_tokens >= length - 1
            agree(recorder.made, told.made, 2)
    assert llm.opened.engine.metrics().draft_cold_tokens == 0
    llm.close()


@pytest.mark.parametrize("length", [15, 16, 33, 75])
def test_a_prefix_without_rows_is_cold_and_counted(path: Path, cold: LLM, length: int) -> None:
    """Nothing unwritten is seen (it is NaN), ids are right, and drafts are right again some tokens later."""
    llm = LLM(path, **SETTINGS)
    poison_freed(llm)
    prompt = texts(1)[0][: length + 1]
    llm.generate(prompt, dataclasses.replace(plain(GREEDY), max_tokens=1))
    longer, lacking = [*prompt, *texts(2)[1][:20]], length
    for _ in range(2):
        found = llm.generate(longer, GREEDY)
        same(found, cold.generate(longer, plain(GREEDY)))
        assert found.timings.cached_tokens > length and found.timings.accepted["mtp"] > 5
        assert llm.opened.engine.metrics().draft_cold_tokens == lacking
        lacking += length + 1  # the row of the next token cannot be made either
    llm.close()


def test_a_request_that_writes_no_rows_does_not_claim_those_it_copied(path: Path, cold: LLM) -> None:
    llm = LLM(path, **SETTINGS)
    poison_freed(llm)
    prompt = texts(1)[0][:27]
    llm.generate(prompt, GREEDY)
    off = [*prompt[:26], 3, 4, 5, 6, 7, 8]  # parts within a block that has rows beyond
    llm.generate(off, dataclasses.replace(plain(GREEDY), max_tokens=2))
    recorder, lacking = Recorder(llm), 0
    for text in (off, [*off, 9, 9]):
        found = llm.generate(text, GREEDY)
        same(found, cold.generate(text, plain(GREEDY)))
        assert found.timings.cached_tokens >= len(off) - 1
        lacking += len(off) - 1 - (text == off)  # the second time as many as could not be made the first time
        assert llm.opened.engine.metrics().draft_cold_tokens == lacking
    assert tuple(off) not in recorder.made, "the hidden state of another position"
    assert recorder.made
    llm.close()


def test_what_waits_is_made_before_others_go_on_from_a_checkpoint(path: Path, cold: LLM) -> None:
    """A request that has not drafted for some tokens passes a checkpoint, and another resumes there."""
    llm = LLM(path, **SETTINGS)
    poison_freed(llm)
    engine, prompt, none = llm.opened.engine, texts(1)[0][:40], Recorder(llm, ("",))
    first = llm.opened.request("first", prompt, dataclasses.replace(GREEDY, max_tokens=60))
    engine.add(first)
    while len(first.tokens) < 75:
        engine.step()
    recorder, told = Recorder(llm), Recorder(cold)
    second = llm.opened.request("second", first.tokens[:70], GREEDY)
    engine.add(second)
    while second.finish is None:
        engine.step()
    assert not none.made and second.timings.cached_tokens == 64 and engine.drafting.cold_tokens == 0
    assert tuple(second.output_ids) == cold.generate(first.tokens[:70], GREEDY).ids
    agree(recorder.made, told.made, 10)
    engine.abort("first")
    assert llm.free_blocks == llm.total_blocks
    llm.close()


def test_models_without_a_module_refuse_the_source(tmp_path: Path) -> None:
    tensors = {name: values for name, values in hybrid_tensors().items() if not name.startswith("mtp.")}
    llm = LLM(write_tiny_hybrid(tmp_path / "none", tensors=tensors), **SETTINGS)
    with pytest.raises(UnsupportedError, match="no drafter for source 'mtp'"):
        llm.generate([5, 6], GREEDY)
    assert llm.opened.sources == ("forced", "prediction", "lookup")
    llm.close()


def test_a_module_that_is_left_takes_no_memory_and_changes_no_token(path: Path, cold: LLM) -> None:
    config = EngineConfig(threads=1, chunk_rows=48, kv_memory_bytes=1 << 22, own_mtp=False)
    opened = open_model(path, config)
    assert opened.sources == ("forced", "prediction", "lookup")
    assert opened.memory.kv.bytes_per_block < cold.opened.memory.kv.bytes_per_block
    assert opened.memory.mtp is None
    params = dataclasses.replace(GREEDY, speculation=Speculation())
    request = opened.request("r", PROMPT, params)
    opened.engine.add(request)
    while opened.engine.has_work:
        opened.engine.step()
    assert tuple(request.output_ids) == cold.generate(PROMPT, params).ids
    opened.close()
