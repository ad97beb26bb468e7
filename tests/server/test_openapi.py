"""/openapi.json: its paths are the routes, and schemathesis finds no answer that it does not describe."""

from __future__ import annotations

import re

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from quickdraft.server.app import create_app
from quickdraft.server.front import OPEN_PATHS
from quickdraft.server.openapi import ENDPOINTS, openapi
from tests.support.fake_engine import FakeEngine
from tests.support.live_server import complete_app, live_server

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
]  # fmt: skip
GOOD, BAD = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
OPERATIONS = [
    (one.method, one.path, mode) for one in ENDPOINTS for mode in (GOOD, BAD)
    if mode is GOOD or one.request is not None or one.query
]  # fmt: skip
EXAMPLES = 8


def test_the_paths_are_the_routes() -> None:
    def plain(path: str) -> str:
        return re.sub(r":path\}", "}", path)

    routes = {
        (method.lower(), plain(route.path))
        for route in create_app(FakeEngine()).routes
        for method in getattr(route, "methods", ())
        if getattr(route, "include_in_schema", False)
    }
    described = {(one.method, one.path) for one in ENDPOINTS if one.path not in OPEN_PATHS}
    assert described == {(method, path) for method, path in routes}


def test_it_is_behind_the_key() -> None:
    with live_server(complete_app(FakeEngine(), keys=("k" * 20,))) as url:
        assert httpx.get(f"{url}/openapi.json", trust_env=False).status_code == 401
        reply = httpx.get(f"{url}/openapi.json", headers={"x-api-key": "k" * 20}, trust_env=False)
    assert reply.json() == openapi()


@pytest.fixture(scope="module")
def url() -> object:
    with live_server(complete_app(FakeEngine(reply="yes"), served_names=("m",))) as url:
        yield url


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_answers_are_as_described(url: str, method: str, path: str, mode: object) -> None:
    """Bodies that the document allows and bodies that it does not; the model is often one that is served."""
    operation = schemathesis.openapi.from_dict(openapi())[path][method]

    @settings(
        max_examples=EXAMPLES, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        case = data.draw(operation.as_strategy(generation_mode=mode))
        if isinstance(case.body, dict) and "model" in case.body and data.draw(st.booleans()):
            case.body["model"] = "m"
        reply = case.call(base_url=url, timeout=20)
        case.validate_response(reply, checks=CHECKS)

    check()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_bodies_of_clients_are_allowed(path: str) -> None:
    """What is turned into what the models hold is described as it is written."""
    import jsonschema

    text = [{"type": "text", "text": "hi"}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    bodies = {
        "/v1/chat/completions": [
            {"messages": [{"role": "user", "content": "hi"}], "stop": "x", "seed": None, "store": False},
            {"messages": [{"role": "user", "content": text}, {"role": "assistant", "tool_calls": [call]}]},
        ],
        "/v1/completions": [{"prompt": one} for one in ("a", [1, 2], ["a", "b"], [[1], [2]])],
        "/v1/responses": [
            {"input": "hi"}, {"input": [{"role": "user", "content": "hi"}], "background": False},
        ],
        "/v1/messages": [
            {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "system": "be brief"},
            {"max_tokens": 5, "messages": [{"role": "user", "content": text}], "system": text},
        ],
    }  # fmt: skip
    document = openapi()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
    for body in bodies[path]:
        validator.validate({"model": "m", **body})
        assert not validator.is_valid({"model": "m", **body, "frobnicate": 1})
