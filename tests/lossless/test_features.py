"""No draft, no neighbour and no stream changes an answer, whatever a request of any API asks for.

Every feature of support/features.py, through the application and a real engine in this process, is
asked alone, whole and one token per step; every other way to ask must give the same.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import pytest

from quickdraft.engine.async_engine import AsyncEngine
from quickdraft.engine.opened import Opened
from quickdraft.engine.request import Request
from quickdraft.server.app import create_app
from quickdraft.speculate.draft import Draft, SequenceView
from quickdraft.types import ToolCallParser
from tests.support.answers import Reply, ask
from tests.support.drafting import RandomDrafting
from tests.support.features import FEATURES, Feature, Told
from tests.support.thinking_opened import open_thinker
from tests.support.toy import RandomDrafter

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "seed": 5}, "sampled": {"temperature": 1.0, "seed": 5},
}  # fmt: skip
DRAFTS = ("off", "auto", "random")
WAYS = [(drafts, stream) for drafts in DRAFTS for stream in (False, True)][1:]  # the first is the truth's
FORMS = ("qwen3_coder", "hermes", "json")
WORDS = "one two three one two"


class Knowing(RandomDrafter):
    """Right for a random while, of the answers that some text so far went on with."""

    source = "corpus"

    def __init__(self) -> None:
        super().__init__({}, 0, 0, seed=4)
        self.texts: set[tuple[int, ...]] = set()

    def propose(self, view: SequenceView, budget: int) -> Draft:
        known, length = tuple(view.tokens), len(view.tokens)
        texts = [text for text in self.texts if len(text) > length and text[:length] == known]
        text = self.random.choice(sorted(texts)) if texts else known
        self.truth = {view.request_id: list(text[view.prompt_length :])}
        return super().propose(view, budget)


class World:
    """An engine behind three applications, one for each form of calls."""

    def __init__(self, opened: Opened) -> None:
        self.engine = AsyncEngine(opened)
        apps = {
            form: create_app(self.engine, tool_call_parser=ToolCallParser(form), thinking_budget=6)
            for form in FORMS
        }
        self.clients = {
            form: httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", timeout=None)
            for form, app in apps.items()
        }
        self.loop = asyncio.Runner()
        self.known = Knowing()
        self.drafting = {
            "off": opened.engine.drafting, "auto": opened.engine.drafting,
            "random": RandomDrafting([*opened.engine.drafting.drafters, self.known], seed=1),
        }  # fmt: skip
        self.requests: list[Request] = []
        add = opened.engine.add

        def noting(request: Request) -> None:
            self.requests.append(request)
            add(request)

        opened.engine.add = noting  # type: ignore[method-assign]
        self.told, self.truth, self.batch = cache(self._told), cache(self._truth), cache(self._batch)

    def close(self) -> None:
        self.loop.close()
        self.engine.shutdown()

    def body(self, feature: Feature, sampling: str, drafts: str, stream: bool, **more: Any) -> dict[str, Any]:
        spoken = {"role": "user", "content": WORDS}
        own: dict[str, Any] = {
            "chat": {"messages": [spoken]}, "messages": {"messages": [spoken]},
            "completion": {"prompt": WORDS}, "responses": {"input": WORDS, "store": False},
        }[feature.api]  # fmt: skip
        own |= {"model": self.engine.name, "speculation": "off" if drafts == "off" else "auto"}
        if stream:
            own["stream"] = True
            if feature.api in ("chat", "completion"):
                own["stream_options"] = {"include_usage": True}
        body = {**own, **SAMPLING[sampling], **feature.fields, **more}
        if drafts == "off":  # which refuses one
            body.pop("prediction", None)
        return body

    def ask(self, asked: list[tuple[Feature, dict[str, Any]]], drafts: str) -> list[Reply]:
        """The answers to all, asked at once."""
        self.engine.opened.engine.drafting = self.drafting[drafts]
        self.requests.clear()

        async def all_of_them() -> list[Reply]:
            return await asyncio.gather(*(ask(self.clients[one.form], one.api, body) for one, body in asked))

        replies = self.loop.run(all_of_them())
        for request in self.requests:
            timings = request.timings
            assert timings.steps + sum(timings.accepted.values()) == timings.completion_tokens
        return replies

    def accepted(self) -> Counter[str]:
        """Tokens of drafts that were accepted in the last `ask`, by source."""
        return sum((Counter(one.timings.accepted) for one in self.requests), Counter())

    def _told(self, name: str, sampling: str) -> Told:
        feature = FEATURES[name]
        (reply,) = self.ask([(feature, self.body(feature, sampling, "off", False))], "off")
        return Told(reply, tuple(self.requests[0].output_ids))

    def more(self, name: str, sampling: str) -> dict[str, Any]:
        return FEATURES[name].more(self.told(name, sampling))

    def one(self, name: str, sampling: str, drafts: str, stream: bool, **more: Any) -> Reply:
        """The answer to a request that is alone."""
        feature, more = FEATURES[name], self.more(name, sampling) | more
        return self.ask([(feature, self.body(feature, sampling, drafts, stream, **more))], drafts)[0]

    def _truth(self, name: str, sampling: str) -> Reply:
        reply = self.one(name, sampling, "off", False)
        self.known.texts |= {tuple(one.tokens) for one in self.requests}
        return reply

    def _batch(self, sampling: str, drafts: str, stream: bool) -> dict[str, Reply]:
        """All features at once, more than run at a time, in an order of chance."""
        for name in FEATURES:
            self.truth(name, sampling)
        names = random.Random(f"{sampling} {drafts} {stream}").sample(list(FEATURES), len(FEATURES))
        asked = [
            (FEATURES[name], self.body(FEATURES[name], sampling, drafts, stream, **self.more(name, sampling)))
            for name in names
        ]
        replies = dict(zip(names, self.ask(asked, drafts), strict=True))
        accepted = self.accepted()
        if drafts == "off":
            assert not accepted
        else:
            wanted = {"lookup": 50, "forced": 500, "prediction": 5} | (
                {"corpus": 500} if drafts == "random" else {}
            )
            assert all(accepted[source] > least for source, least in wanted.items()), accepted
        return replies


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    opened = open_thinker(tmp_path_factory.mktemp("thinker"), max_sequences=12, chunk_rows=48)
    world = World(opened)
    yield world
    world.close()


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", FEATURES)
def test_the_feature_shows(world: World, name: str, sampling: str) -> None:
    assert FEATURES[name].shows(world.truth(name, sampling), world.told(name, sampling))


@pytest.mark.parametrize(("drafts", "stream"), WAYS)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", FEATURES)
def test_alone(world: World, name: str, sampling: str, drafts: str, stream: bool) -> None:
    truth = world.truth(name, sampling)  # first: random drafts know it
    assert world.one(name, sampling, drafts, stream) == truth


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_in_a_batch(world: World, sampling: str, drafts: str, stream: bool) -> None:
    replies = world.batch(sampling, drafts, stream)
    wrong = [name for name, reply in replies.items() if reply != world.truth(name, sampling)]
    assert not wrong


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("name", FEATURES)
def test_a_limit_inside(world: World, name: str, sampling: str) -> None:
    """Tokens run out in the middle of whatever it is."""
    feature = FEATURES[name]
    limit = max(1, world.truth(name, sampling).tokens // (2 * len(world.truth(name, sampling).choices)))
    given = (
        {feature.limit: limit, "min_tokens": 0}
        if feature.api in ("chat", "completion")
        else {feature.limit: limit}
    )
    truth = world.one(name, sampling, "off", False, **given)
    for drafts, stream in (("auto", True), ("random", False)):
        assert world.one(name, sampling, drafts, stream, **given) == truth
