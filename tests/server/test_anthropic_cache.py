"""Anthropic's API over a tiny model: what prompts share, and the same answer with any speculation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from quickdraft.engine.async_engine import AsyncEngine
from quickdraft.engine.opened import EngineConfig, open_model
from tests.support.live_server import complete_app, live_server
from tests.support.tiny import write_tiny_llama

USER = {"role": "user", "content": "hello there"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path: Path = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")
    engine = AsyncEngine(open_model(path, EngineConfig(threads=1, kv_memory_bytes=1 << 20)))
    with live_server(complete_app(engine, served_names=("tiny",))) as url:
        yield url
    engine.shutdown()


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def create(client: anthropic.Anthropic, **options: Any) -> Any:
    return client.messages.create(**{"model": "tiny", "max_tokens": 12, "messages": [USER], **options})


@pytest.mark.parametrize("as_block", [True, False])
def test_a_volatile_first_line_keeps_the_prefix(claude: anthropic.Anthropic, as_block: bool) -> None:
    """Clients put a line that changes with every request before their system prompt."""

    def system(mark: str) -> Any:
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={mark};"
        prompt = f"You are of use, as a {'block' if as_block else 'text'}."
        if not as_block:
            return f"{header}\n{prompt}"
        return [{"type": "text", "text": text} for text in (header, prompt)]

    create(claude, system=system("aaaaa"))
    usage = create(claude, system=system("zzzzz")).usage
    assert usage.input_tokens == 1, "all tokens but the last are found"
    assert usage.cache_read_input_tokens > 20
    other = create(claude, system=f"x-other-header: {as_block}\nYou are of use.").usage
    assert other.input_tokens > 1, "only that line is left out"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_and_streaming_change_nothing(
    claude: anthropic.Anthropic, url: str, temperature: float
) -> None:
    """The same tokens off and auto, streamed and not, and in all three APIs."""
    texts = set()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        for speculation in ("off", "auto", "lookup@8"):
            extra = {"seed": 5, "speculation": speculation, "temperature": temperature}
            message = create(claude, extra_body=extra, max_tokens=40)
            texts.add("".join(block.text for block in message.content))
            streamed = create(claude, extra_body=extra, max_tokens=40, stream=True)
            texts.add("".join(e.delta.text for e in streamed if e.type == "content_block_delta"))
            response = client.responses.create(
                model="tiny", input="hello there", max_output_tokens=40, extra_body=extra
            )
            texts.add(response.output_text)
            chat = client.chat.completions.create(
                model="tiny", messages=[USER], max_tokens=40, extra_body=extra
            )
            texts.add(chat.choices[0].message.content)
    assert len(texts) == 1 and texts.pop()
