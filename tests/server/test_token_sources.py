"""`return_token_sources`: in both APIs, whole and streamed, and what a real engine says under drafts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quickdraft.engine.llm import LLM
from quickdraft.types import SamplingParams, Speculation
from tests.support.fake_engine import FakeEngine
from tests.support.thinking_model import REPLY
from tests.support.tiny import write_tiny_llama

ASKED = {"return_token_sources": True}
USER: list[Any] = [{"role": "user", "content": "hi"}]


def answers(client: openai.OpenAI, api: str, **options: Any) -> tuple[Any, list[Any]]:
    """The choice of a whole answer, and the choices of the chunks of the same one streamed."""
    create = client.chat.completions.create if api == "chat" else client.completions.create
    what: dict[str, Any] = {"messages": USER} if api == "chat" else {"prompt": "hi"}
    fields = {"model": "fake", "max_tokens": 400, "extra_body": ASKED, **what, **options}
    return create(**fields).choices[0], [chunk.choices[0] for chunk in create(**fields, stream=True)]


def shown(choice: Any, api: str) -> str:
    if api == "chat":
        return (choice.message if hasattr(choice, "message") else choice.delta).content or ""
    return choice.text


@pytest.mark.parametrize("api", ["chat", "completion"])
@pytest.mark.parametrize("stop", [None, "ld 🎉"])
def test_the_texts_joined_are_the_answer_whole_and_in_each_chunk(
    client: openai.OpenAI, engine: FakeEngine, api: str, stop: str | None
) -> None:
    whole, chunks = answers(client, api, stop=stop)
    entries = whole.model_extra["token_sources"]
    assert "".join(one["text"] for one in entries) == shown(whole, api)
    assert shown(whole, api) == ("hello wör" if stop else engine.reply)
    streamed = []
    for chunk in chunks:
        own = chunk.model_extra.get("token_sources", [])
        assert "".join(one["text"] for one in own) == shown(chunk, api)
        streamed += own
    assert streamed == entries
    # Three tokens a step here: two of a draft, then the target's own. "hello" and " w" are one token each.
    assert entries[:3] == [
        {"text": "hello", "source": "lookup"}, {"text": " w", "source": "lookup"},
        {"text": "ö", "source": "lookup"},
    ]  # fmt: skip


@pytest.mark.parametrize("api", ["chat", "completion"])
def test_nobody_gets_it_unasked(client: openai.OpenAI, engine: FakeEngine, api: str) -> None:
    whole, chunks = answers(client, api, extra_body={})
    assert all("token_sources" not in one.model_extra for one in (whole, *chunks))


def test_with_reasoning_and_calls_it_is_the_text_as_it_was_written(
    client: openai.OpenAI, thinker: FakeEngine
) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    whole, chunks = answers(client, "chat", tools=tools)
    streamed = [one for chunk in chunks for one in chunk.model_extra.get("token_sources", [])]
    assert streamed == whole.model_extra["token_sources"]
    assert "".join(one["text"] for one in streamed) == REPLY and whole.message.tool_calls


def test_a_value_of_another_type_is_refused(http: httpx.Client, engine: FakeEngine) -> None:
    body = {"model": "fake", "messages": USER, "return_token_sources": "yes"}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "return_token_sources"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_engine_says_of_each_token_what_its_timings_count(tmp_path: Path, temperature: float) -> None:
    llm = LLM(write_tiny_llama(tmp_path / "tiny.gguf"), kv_memory_bytes=1 << 20, threads=1)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=60, ignore_eos=True)
    truth = llm.generate("hello there", params).ids
    for speculation, prediction in (
        ("off", None),
        ("prediction@8", truth),
        ("prediction+lookup", truth[:30]),
    ):
        asked = SamplingParams(
            temperature=temperature, seed=3, max_tokens=60, ignore_eos=True,
            speculation=Speculation.parse(speculation),
        )  # fmt: skip
        outputs = list(llm.stream("hello there", asked, prediction))
        tokens = [token for output in outputs for token in output.tokens]
        sources = [source for output in outputs for source in output.sources]
        timings = outputs[-1].timings
        assert timings is not None and tuple(tokens) == truth and len(sources) == len(tokens)
        accepted = {name: count for name, count in timings.accepted.items() if count}
        assert Counter(sources) == {"model": timings.steps, **accepted}
        assert all(output.sources[-1] == "model" for output in outputs)
        assert bool(accepted) == (speculation != "off")
