"""`n`: several answers to a prompt that is read once; each is what its seed alone would give."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from quickdraft.engine.async_engine import AsyncEngine
from quickdraft.engine.opened import EngineConfig, open_model
from tests.server.test_disconnect import send, slow, wait_for
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import complete_app, live_server
from tests.support.tiny import write_tiny_llama

LONG = "a prompt of some blocks, " * 8
OPTIONS: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "extra_body": {"ignore_eos": True}}
CHAT: dict[str, Any] = {**OPTIONS, "messages": [{"role": "user", "content": LONG}]}


@pytest.fixture(scope="module", params=[True, False], ids=["prefix cache", "no prefix cache"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    path: Path = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")
    config = EngineConfig(
        threads=1, kv_memory_bytes=1 << 20, max_sequences=3, prefix_cache=request.param, chunk_rows=16
    )
    engine = AsyncEngine(open_model(path, config))
    yield engine
    engine.shutdown()


@pytest.fixture
def tiny(real: AsyncEngine) -> Iterator[openai.OpenAI]:
    with (
        live_server(complete_app(real, served_names=("tiny",))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def test_each_choice_is_its_solo_run(tiny: openai.OpenAI, real: AsyncEngine) -> None:
    hits = real.metrics().prefix_hits
    whole = tiny.chat.completions.create(**CHAT, n=5, seed=40)
    found = real.metrics().prefix_hits - hits
    solo = [tiny.chat.completions.create(**CHAT, seed=40 + i) for i in range(5)]
    texts = [choice.message.content for choice in whole.choices]
    assert texts == [one.choices[0].message.content for one in solo] and len(set(texts)) > 1
    assert [choice.index for choice in whole.choices] == list(range(5))
    assert [choice.model_extra["seed"] for choice in whole.choices] == list(range(40, 45))
    prompt = solo[0].usage.prompt_tokens
    assert whole.usage.prompt_tokens == prompt and whole.usage.completion_tokens == 5 * 12
    first = whole.choices[0].model_extra["prefix_cache"]["cached_tokens"]
    assert whole.usage.prompt_tokens_details.cached_tokens == first
    if real.opened.engine.scheduler.cache is not None:  # all but the last block was read once
        assert 4 * (prompt - 16) <= found - first <= 4 * (prompt - 1)
    assert real.metrics().running == 0


def test_streamed_choices_carry_their_index(tiny: openai.OpenAI) -> None:
    whole = tiny.chat.completions.create(**CHAT, n=3, seed=7)
    texts, ends, usage = Counter[int](), [], None
    said: dict[int, str] = {0: "", 1: "", 2: ""}
    for chunk in tiny.chat.completions.create(
        **CHAT, n=3, seed=7, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.role == "assistant"
            said[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends.append((choice.index, choice.model_extra["seed"]))
    assert list(said.values()) == [choice.message.content for choice in whole.choices]
    assert texts == {0: 1, 1: 1, 2: 1} and sorted(ends) == [(0, 7), (1, 8), (2, 9)]
    assert usage.completion_tokens == 36 and usage.prompt_tokens == whole.usage.prompt_tokens


def test_several_prompts_come_one_after_the_other(tiny: openai.OpenAI) -> None:
    whole = tiny.completions.create(**OPTIONS, prompt=["one", "two two"], n=2, seed=3, echo=True)
    solo = [
        tiny.completions.create(**OPTIONS, prompt=prompt, seed=seed, echo=True)
        for prompt in ("one", "two two")
        for seed in (3, 4)
    ]
    assert [choice.text for choice in whole.choices] == [one.choices[0].text for one in solo]
    assert whole.usage.prompt_tokens == solo[0].usage.prompt_tokens + solo[2].usage.prompt_tokens


def test_without_a_seed_they_differ_and_say_theirs(tiny: openai.OpenAI) -> None:
    choices = tiny.chat.completions.create(**CHAT, n=3).choices
    assert len({choice.model_extra["seed"] for choice in choices}) == 3
    for choice in choices:
        again = tiny.chat.completions.create(**CHAT, seed=choice.model_extra["seed"])
        assert again.choices[0].message.content == choice.message.content


def test_only_the_first_of_a_prompt_reads_it(client: openai.OpenAI, engine: FakeEngine) -> None:
    client.completions.create(model="fake", prompt=[[5], [6]], n=2, seed=1)
    assert [(ids, params.seed) for ids, params in engine.requests] == [([5], 1), ([5], 2), ([6], 1), ([6], 2)]
    own = engine.after[1]
    assert engine.after == [None, own, None, own.removesuffix("0") + "2"] and own.endswith("-0")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_all(
    base_url: str, engine: FakeEngine, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    slow(engine)
    caplog.set_level(logging.INFO, logger="quickdraft.requests")
    connection = send(base_url, stream, n=3)
    wait_for(lambda: len(engine.running) == 3, "the choices never started")
    connection.close()
    wait_for(lambda: len(engine.aborted) == 3 and not engine.running, "not all choices were aborted")
