"""One live server per module over one FakeEngine, put back to its defaults before every test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import httpx
import openai
import pytest

from quickdraft.server.limits import Limits
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.tokenizer import Tokenizer
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import complete_app, live_server
from tests.support.thinking_model import REPLY, thinking_tokenizer_data

MAX_BODY_BYTES = 12 << 20


@pytest.fixture(scope="package")
def shared_engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="package")
def base_url(shared_engine: FakeEngine) -> Iterator[str]:
    limits = Limits(body_bytes=MAX_BODY_BYTES)
    app = complete_app(shared_engine, served_names=("fake.Q4_1",), limits=limits)
    with live_server(app, limits) as url:
        yield url


@pytest.fixture
def engine(shared_engine: FakeEngine) -> FakeEngine:
    fresh = FakeEngine(tokenizer=shared_engine.tokenizer, chat_template=shared_engine.chat_template)
    for each in fields(FakeEngine):
        setattr(shared_engine, each.name, getattr(fresh, each.name))
    return shared_engine


@pytest.fixture
def thinker(engine: FakeEngine) -> Iterator[FakeEngine]:
    """The engine of a model that thinks and calls tools."""
    data = thinking_tokenizer_data()
    plain = engine.tokenizer, engine.chat_template
    engine.tokenizer, engine.chat_template = Tokenizer(data), ChatTemplate.of(data)
    engine.reply, engine.max_context_tokens = REPLY, 4096
    yield engine
    engine.tokenizer, engine.chat_template = plain


@pytest.fixture
def client(base_url: str, engine: FakeEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def http(base_url: str, engine: FakeEngine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=base_url, timeout=20, trust_env=False) as client:
        yield client
