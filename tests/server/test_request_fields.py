"""docs/reference/request-fields.md has every field the server knows, and the server does what it says."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from quickdraft.server.anthropic_schemas import COUNT_OFF, MESSAGES_OFF, CountRequest, MessagesRequest
from quickdraft.server.body import CHAT_OFF, COMPLETION_OFF
from quickdraft.server.responses_schemas import RESPONSES_OFF, ResponsesRequest
from quickdraft.server.schemas import ChatRequest, CompletionRequest

PAGE = Path(__file__).parents[2] / "docs/reference/request-fields.md"
APIS: dict[str, tuple[type[BaseModel], Mapping[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, CHAT_OFF),
    "/v1/completions": (CompletionRequest, COMPLETION_OFF),
    "/v1/responses": (ResponsesRequest, RESPONSES_OFF),
    "/v1/messages": (MessagesRequest, MESSAGES_OFF),
    "/v1/messages/count_tokens": (CountRequest, COUNT_OFF),
}
# Tried on fields that are refused whatever they say.
NONE_OFF = ({}, [], "x", 5, 0, True, False, None, ["text"])
USER = [{"role": "user", "content": "hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": USER},
}
LABELS = {"user": "me", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"job": "7"}}


def rows(path: str) -> dict[str, str]:
    """Field -> what its row says."""
    section = PAGE.read_text().partition(f"## POST {path}\n")[2].partition("\n## ")[0]
    found: dict[str, str] = {}
    for first, second in re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", first):
            assert name not in found, f"{name} has two rows"
            found[name] = second
    return found


@pytest.mark.parametrize("path", APIS)
def test_the_tables_are_what_the_server_does(path: str) -> None:
    model, off = APIS[path]
    listed = rows(path)
    assert {name for name, said in listed.items() if said.startswith("yes")} == set(model.model_fields)
    assert {name for name, said in listed.items() if not said.startswith("yes")} == set(off)
    required = {name for name, field in model.model_fields.items() if field.is_required()}
    assert {name for name, said in listed.items() if "required" in said} == required
    for name, is_off in off.items():
        if listed[name] == "no":
            assert not any(is_off(value) for value in NONE_OFF)
        for shown in allowed(name, listed[name]):
            assert is_off(shown), (name, shown)


def allowed(name: str, said: str) -> list[Any]:
    """The values of a row that says only which are accepted."""
    if "edits" in said or said == "as above":
        return [{"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}]
    return [json.loads(value) for value in re.findall(r"`(\[.*?\]|\"\w+\"|false|\d)`", said)]


@pytest.mark.parametrize("path", APIS)
def test_what_is_off_is_accepted_and_nothing_else(http: httpx.Client, path: str) -> None:
    body = {"model": "fake", **ASKED[path]}
    for name, said in rows(path).items():
        if said.startswith("yes"):
            continue
        good = [] if said == "no" else allowed(name, said)
        assert good or said == "no"
        for value in good:
            reply = http.post(path, json={**body, name: value})
            assert reply.status_code == 200, (name, reply.text)
        for value in ("other", {"a": 1}, 17):
            reply = http.post(path, json={**body, name: value})
            assert reply.status_code == 400 and f"'{name}" in reply.json()["error"]["message"], (
                name,
                reply.text,
            )


@pytest.mark.parametrize("path", list(APIS)[:4])
def test_labels_go_to_the_log_line(http: httpx.Client, caplog: pytest.LogCaptureFixture, path: str) -> None:
    given = {"metadata": {"user_id": "me"}} if path == "/v1/messages" else LABELS
    with caplog.at_level(logging.INFO, logger="quickdraft.requests"):
        reply = http.post(path, json={"model": "fake", **ASKED[path], **given})
    assert reply.status_code == 200, reply.text
    (line,) = [record.getMessage() for record in caplog.records if record.name == "quickdraft.requests"]
    for name, value in ({"user": "me"} if path == "/v1/messages" else LABELS).items():
        assert f" {name}={json.dumps(value)} " in line
