"""Stored responses: looked at, listed, deleted, and dropped when there is no room."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from quickdraft.server.errors import ApiError
from quickdraft.server.response_store import ResponseStore
from tests.server.test_errors import error_of
from tests.support.fake_engine import FakeEngine


def create(client: openai.OpenAI, **options: Any) -> Any:
    return client.responses.create(**{"model": "fake", "input": "hi", **options})


@pytest.mark.parametrize("stream", [False, True])
def test_retrieve_and_delete(client: openai.OpenAI, engine: FakeEngine, stream: bool) -> None:
    answer = create(client, stream=stream)
    if stream:
        answer = list(answer)[-1].response
    assert client.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    client.responses.delete(answer.id)
    for gone in (answer.id, "resp_other", create(client, store=False).id):
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.retrieve(gone)
        assert caught.value.code == "response_not_found"
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(gone)
        with pytest.raises(openai.NotFoundError) as caught:
            create(client, previous_response_id=gone)
        assert caught.value.param == "previous_response_id"


def test_input_items_are_the_conversation(
    client: openai.OpenAI, http: httpx.Client, engine: FakeEngine
) -> None:
    engine.reply = "first"
    one = create(client)
    two = create(client, previous_response_id=one.id, input=[{"role": "user", "content": "more"}])
    texts = [item.content[0].text for item in client.responses.input_items.list(two.id, order="asc")]
    assert texts == ["hi", "first", "more"]
    newest = client.responses.input_items.list(two.id, limit=1)
    assert newest.data[0].content[0].text == "more" and newest.has_more
    listed = [item.content[0].text for item in newest]  # the client asks for the pages after it
    assert listed == texts[::-1]
    for query in ("limit=0", "limit=x", "after=msg_x", "order=up", "surprise=1"):
        error_of(http.get(f"/v1/responses/{two.id}/input_items?{query}"), 400)
    assert error_of(http.get(f"/v1/responses/{two.id}?stream=true"), 400)["param"] == "stream"


def response(name: str, text: str = "") -> dict[str, Any]:
    return {"id": name, "output": [{"type": "message", "text": text}]}


def refusal(store: ResponseStore, name: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        store.get(name)
    assert caught.value.status == 404
    return caught.value


def test_the_oldest_are_dropped_by_number() -> None:
    store = ResponseStore(max_responses=3)
    for index in range(5):
        store.put(response(f"r{index}"), [])
    assert len(store) == 3 and store.get("r4").response["id"] == "r4"
    assert refusal(store, "r1").code == "response_dropped"
    assert "the latest 3" in refusal(store, "r1").message
    assert refusal(store, "r9").code == "response_not_found"


def test_the_oldest_are_dropped_by_bytes() -> None:
    store = ResponseStore(max_bytes=10_000)
    items: tuple[dict[str, Any], ...] = ({"role": "user", "content": "x" * 900},)
    for index in range(40):
        store.put(response(f"r{index}", "y" * 900), items)
        assert store.bytes <= 10_000
        items = store.get(f"r{index}").conversation()[-4:]
    assert 0 < len(store) < 10
    store.put(response("huge", "z" * 20_000), [])
    assert (len(store), store.bytes) == (0, 0) and refusal(store, "huge").code == "response_dropped"
    store.put(response("r"), [])
    store.delete("r")
    assert (len(store), store.bytes) == (0, 0)
