"""Answers of a given form over HTTP: a real engine behind the server, the official client in front of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from quickdraft.engine.async_engine import AsyncEngine
from tests.support.constraints import CHOICES, FORMAT, KINDS, LOOK, SCHEMA, TOOLS, check_obeys
from tests.support.live_server import complete_app, live_server
from tests.support.thinking_opened import open_thinker

ASK: dict[str, Any] = {
    "model": "thinker", "messages": [{"role": "user", "content": "hi"}], "seed": 5, "max_tokens": 150,
    "parallel_tool_calls": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    engine = AsyncEngine(open_thinker(tmp_path_factory.mktemp("thinker")), max_queue=64)
    with live_server(complete_app(engine, thinking_budget=4)) as url:
        yield url
    engine.shutdown()


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


Said = tuple[str, str, list[tuple[str, str]], str]  # reasoning, content, calls, finish reason


def whole(http: httpx.Client, body: dict[str, Any]) -> tuple[Said, dict[str, Any]]:
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    message = answer["choices"][0]["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    said = message.get("reasoning_content") or "", message["content"] or "", calls
    return (*said, answer["choices"][0]["finish_reason"]), answer


def test_the_official_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, response_format=FORMAT)
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
    answer = client.chat.completions.create(
        **ASK, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "look"}}
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "look" and answer.choices[0].finish_reason == "tool_calls"
    jsonschema.validate(json.loads(call.function.arguments), LOOK)


def test_several_answers_of_one_form(http: httpx.Client) -> None:
    body = {**ASK, "n": 3, "response_format": FORMAT, "thinking_budget": 0}
    choices = http.post("/v1/chat/completions", json=body).json()["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1


def obeys(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({"structured_outputs": {"choice": CHOICES}}, lambda text: text in CHOICES),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, obeys),
        ({"response_format": FORMAT}, obeys),
    ],
    ids=["choice", "json", "response_format"],
)  # fmt: skip
def test_completions(http: httpx.Client, options: dict[str, Any], fits: Any) -> None:
    body = {"model": "thinker", "prompt": ["a", "b"], "max_tokens": 150, "seed": 1, **options}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 2
    assert all(fits(choice["text"]) for choice in choices)


@pytest.mark.parametrize(("asked", "most"), [(None, 4), (0, 0), (2, 2)])
def test_the_servers_own_budget_is_for_requests_that_do_not_say(
    http: httpx.Client, asked: int | None, most: int
) -> None:
    (reasoning, _, _, _), answer = whole(http, {**ASK, "max_tokens": 30, "thinking_budget": asked})
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == most + 2  # and "\n</think>"
    assert bool(reasoning) == bool(most)


def test_no_budget_without_thinking(http: httpx.Client) -> None:
    (reasoning, _, _, _), _ = whole(http, {**ASK, "max_tokens": 9, "enable_thinking": False})
    assert reasoning == ""


def test_choices_that_are_too_short(http: httpx.Client) -> None:
    body = {"model": "thinker", "prompt": "a", "structured_outputs": {"choice": ["abc"]}}
    reply = http.post("/v1/completions", json={**body, "min_tokens": 4})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "min_tokens"
    reply = http.post("/v1/completions", json={**body, "min_tokens": 3})
    assert reply.status_code == 200 and reply.json()["choices"][0]["text"] == "abc"


@pytest.mark.parametrize("speculation", ["off", "auto"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", ["regex", "choice", "schema", "required"])
def test_a_form_ends_before_min_tokens(http: httpx.Client, kind: str, n: int, speculation: str) -> None:
    least = 9 if kind == "choice" else 100  # choices know how long they may be
    body = {**ASK, **KINDS[kind], "min_tokens": least, "n": n, "speculation": speculation}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    for choice in reply.json()["choices"]:
        message = choice["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
        check_obeys(kind, message["content"] or "", calls)
        assert choice["finish_reason"] == ("tool_calls" if kind == "required" else "stop")


TOO_MUCH = [
    {"structured_outputs": {"grammar": 'start: "a" start'}},
    {"structured_outputs": {"regex": "(((a{1,30}){1,30}){1,30}){1,30}"}},
]


@pytest.mark.parametrize("options", TOO_MUCH, ids=["right recursion", "repetition"])
def test_what_is_too_much_while_it_is_followed_is_the_requests_fault(
    http: httpx.Client, options: dict[str, Any]
) -> None:
    body = {**ASK, **options, "thinking_budget": 0}
    reply = http.post("/v1/chat/completions", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "format_failed"), reply.text
    assert "grammar cannot be followed" in error["message"] and "<" not in error["message"]
    with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
        events = [line for line in stream.iter_lines() if line]
    assert json.loads(events[-1][6:]) == {"error": error}
    assert whole(http, {**ASK, "max_tokens": 5})[0][3] == "length"  # others go on


def test_a_schema_of_many_keys(http: httpx.Client) -> None:
    keys = {f"key{n}": {"type": "boolean"} for n in range(1500)}
    body = {**ASK, "thinking_budget": 0, "response_format": schema(type="object", properties=keys)}
    said, _ = whole(http, body)
    assert said[3] == "length" or isinstance(json.loads(said[1]), dict)


def schema(**content: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": content}}


def tool(strict: bool = True, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "strict": strict, "parameters": parameters}}


WHERE = "response_format.json_schema.schema"
PARAMETERS = "tools[0].function.parameters"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs it"),
    ({"response_format": {**schema(), "type": "text"}}, "response_format", "belongs"),
    ({"response_format": schema(type="object", minProperties="two")}, WHERE, "minProperties"),
    ({"response_format": schema(type="widget")}, WHERE, "widget"),
    ({"response_format": schema(type="object", **{"not": {}})}, WHERE, "not"),
    ({"response_format": schema(type="string", pattern="(")}, WHERE, "unclosed"),
    ({"response_format": schema(enum=["x" * 70_000])}, WHERE, "bytes"),
    ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "structured_outputs", "beside"),
    ({"structured_outputs": {}}, "structured_outputs", "one of"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one of"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "look-around"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "unknown name"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to 1000"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "not empty"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON schema"),
    ({"structured_outputs": {"json": [1]}}, "structured_outputs.json", "JSON schema"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "unknown"),
    ({"response_format": FORMAT, "ignore_eos": True}, "ignore_eos", "false"),
    ({"thinking_budget": -1}, "thinking_budget", "0 or more"),
    ({"thinking_budget": "1"}, "thinking_budget", "valid integer"),
    ({"tools": [tool(type="array")]}, f"{PARAMETERS}.type", "'object'"),
    ({"tools": [tool(properties={"a": {"type": "string", "format": "email"}})]},
     f"{PARAMETERS}.properties.a.format", "strings as they are"),
    ({"tools": [tool(properties={"a": {"type": "number", "not": {}}})]}, f"{PARAMETERS}.properties.a", "not"),
    ({"tools": [tool(required=["b"])]}, f"{PARAMETERS}.required", "a property"),
    ({"tools": [tool(anyOf=[{}])]}, f"{PARAMETERS}.anyOf", "keyword"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "param", "said"), REFUSED)
def test_what_cannot_be_followed_is_a_400(
    http: httpx.Client, options: dict[str, Any], param: str, said: str
) -> None:
    reply = http.post("/v1/chat/completions", json={**ASK, **options})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param and said in reply.json()["error"]["message"]


def test_a_loose_tool_keeps_what_can_be_kept(http: httpx.Client) -> None:
    loose = tool(strict=False, properties={"n": {"type": "integer", "not": {"const": 3}}}, required=["n"])
    (_, _, calls, finish), _ = whole(http, {**ASK, "tools": [loose], "tool_choice": "required"})
    assert finish in ("tool_calls", "length") and calls[0][0] == "f"
    if finish == "tool_calls":
        assert isinstance(json.loads(calls[0][1])["n"], int)


def test_compiling_stalls_nobody(http: httpx.Client, url: str) -> None:
    """Requests are answered while large schemas compile, more at once than may."""
    keys = {f"key_{n}": {"type": "string"} for n in range(1800)}
    failures: list[str] = []

    def compile_one(number: int) -> None:
        body = {
            **ASK,
            "max_tokens": 1,
            "response_format": schema(type="object", properties=keys, title=str(number)),
        }
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
        if reply.status_code >= 500 and "grammar" not in reply.text:
            failures.append(reply.text)

    threads = [threading.Thread(target=compile_one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    answered = 0
    while any(thread.is_alive() for thread in threads) or answered < 3:
        assert http.get("/health").status_code == 200
        assert whole(http, {**ASK, "max_tokens": 2})[0][3] == "length"
        answered += 1
    assert not failures
