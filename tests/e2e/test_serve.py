"""The product as a user meets it: `quickdraft serve` in a process, driven by the openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import openai
import pytest

from quickdraft.engine.llm import LLM
from quickdraft.types import SamplingParams, Speculation
from tests.support.model import default_model_path
from tests.support.server_process import ServerProcess, server_process

pytestmark = pytest.mark.model
MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "Repeat after me: one two three four five six seven eight."}]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    default_model_path()
    with server_process("--kv-memory", "256MiB") as server:
        yield server


@pytest.fixture(scope="module")
def url(server: ServerProcess) -> str:
    return server.url


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **fields: object) -> openai.types.chat.ChatCompletion:
    extra = {key: fields.pop(key) for key in ("speculation",) if key in fields}
    return client.chat.completions.create(
        model=MODEL, messages=QUESTION, **{"temperature": 0, "max_tokens": 48, **fields}, extra_body=extra
    )


def test_answers_are_the_same_with_any_speculation_and_equal_the_offline_api(client: openai.OpenAI) -> None:
    answers = {s: ask(client, speculation=s) for s in ("off", "auto", "lookup", "lookup@16")}
    texts = {s: a.choices[0].message.content for s, a in answers.items()}
    assert len(set(texts.values())) == 1, texts
    timings = {s: a.model_extra["timings"] for s, a in answers.items()}
    assert timings["off"]["drafted"] == {} and timings["off"]["steps"] == timings["off"]["rows"]
    for t in timings.values():
        assert t["steps"] + sum(t["accepted"].values()) == t["completion_tokens"]
    llm = LLM(kv_memory_bytes=64 << 20)
    offline = llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=48, speculation=Speculation()))
    assert offline.text == texts["off"]


def test_streaming_equals_not_streaming_and_seeds_hold(client: openai.OpenAI) -> None:
    whole = ask(client, temperature=0.9, seed=5).choices[0].message.content
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0.9, seed=5, max_tokens=48, stream=True,
        stream_options={"include_usage": True}, extra_body={"speculation": "off"},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert chunks[-1].usage.completion_tokens > 0


def test_completions_equal_the_offline_api(client: openai.OpenAI, url: str) -> None:
    prompts = ["The capital of France is", "one two three one two three one two"]
    whole = client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=24)
    llm = LLM(kv_memory_bytes=64 << 20)
    params = SamplingParams(temperature=0, max_tokens=24, speculation=Speculation())
    assert [choice.text for choice in whole.choices] == [llm.generate(p, params).text for p in prompts]
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": prompts[0]}).json()
    assert tokens["tokens"] == llm.encode(prompts[0]) and tokens["max_model_len"] == 8192
    text = httpx.post(f"{url}/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"]
    assert text == prompts[0]


@pytest.mark.parametrize(("speculation", "computed"), [("lookup@16", 1), ("mtp", 2)])
def test_what_the_prefix_cache_gave_is_reported(
    client: openai.OpenAI, server: ServerProcess, speculation: str, computed: int
) -> None:
    """An MTP module needs the hidden state of the last shared token, which is computed again for it."""
    names = ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits")
    question = [
        {"role": "user", "content": f"What was never sent before? This, by {speculation}, and again."}
    ]
    fields = {"model": MODEL, "messages": question, "max_tokens": 4, "temperature": 0}
    fields["extra_body"] = {"speculation": speculation}
    cold = client.chat.completions.create(**fields)
    before = [server.metric(name) for name in names]
    chunks = list(
        client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    prompt = cold.usage.prompt_tokens
    cached = prompt - computed
    assert cold.model_extra["prefix_cache"]["reason"] in ("differs", "end", "empty")
    assert cold.usage.prompt_tokens_details.cached_tokens < cached
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == cached
    assert chunks[-2].model_extra["prefix_cache"]["reason"] == "none"
    after = [server.metric(name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [prompt, cached]


def test_models_lists_the_context_and_the_sources(url: str) -> None:
    model = httpx.get(f"{url}/v1/models").json()["data"][0]
    assert model["id"] == MODEL and model["max_model_len"] == 8192
    assert "lookup" in json.dumps(model)


def test_errors_are_clear(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="frobnicate"):
        client.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"frobnicate": 1})
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 9000}])
    assert caught.value.code == "context_length_exceeded" and "8192" in str(caught.value)
    assert httpx.post(f"{url}/v1/chat/completions", content=b"\xff" * (1 << 20)).status_code in (400, 415)
    assert httpx.get(f"{url}/health").status_code == 200


def test_the_default_model_refuses_tools_and_thinking(client: openai.OpenAI, url: str) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    with pytest.raises(openai.BadRequestError, match="chat template knows no tools"):
        ask(client, tools=tools)
    with pytest.raises(openai.BadRequestError, match="chat template does not read it"):
        ask(client, reasoning_effort="low")
    assert ask(client, tools=tools, tool_choice="none", reasoning_effort="none").choices[0].message.content


def test_a_client_that_leaves_frees_its_request(client: openai.OpenAI, url: str) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    started = ask(client).model_extra["timings"]
    assert started["completion_tokens"] > 0  # alone again: the abandoned request would share each step
    assert httpx.get(f"{url}/health").status_code == 200
