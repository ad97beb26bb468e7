"""docs/reference/request-fields.md has every field the server knows, and says of each what is done."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
NONE_OFF = (
    {},
    [],
    "x",
    5,
    0,
    True,
    False,
    None,
    ["text"],
)  # tried on fields that are refused whatever they say


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
        for shown in (
            re.findall(r"`(\[.*?\]|\"\w+\"|false|\d)`", listed[name]) if name != "context_management" else ()
        ):
            assert is_off(json.loads(shown)), (name, shown)
