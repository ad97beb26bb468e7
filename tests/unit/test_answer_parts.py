"""Reasoning and tool calls in an answer's text: what comes out never depends on how the text was cut."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quickdraft.text.answer_parts import AnswerForm, Content, Part, Reasoning
from quickdraft.text.tool_calls import CallEnd, CallName, CallText
from tests.support.byte_tokenizer import byte_tokenizer

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "ratio": {"type": "number"},
    "exact": {"type": "boolean"},
    "where": {"type": "object"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "nothing": {"type": "null"},
    "either": {"type": ["integer", "string", "null"]},
    "choice": {"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]},
    "level": {"enum": [1, 2, 3]},
    "free": {},
}
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": PROPERTIES,
                "$defs": {"Unit": {"type": "boolean"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
)
FORM = AnswerForm(reasoning=True, inside=True, tools=TOOLS)


def call(name: str = "weather", **arguments: str) -> str:
    """A call as the model writes it; values verbatim."""
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


@dataclass(frozen=True)
class Made:
    """A call, its pieces joined; cut off, or broken, unless it is complete."""

    name: str
    arguments: str = ""
    complete: bool = False


def made(name: str = "weather", **arguments: Any) -> Made:
    return Made(name, json.dumps(arguments, ensure_ascii=False), True)


def parse(chunks: Iterable[str], form: AnswerForm = FORM) -> list[Reasoning | Content | Made]:
    """The parts of a text that arrives in these chunks, neighbours of one kind joined."""
    parser = form.parser()
    joined: list[Any] = []
    for part in [p for chunk in chunks for p in parser.feed(chunk)] + parser.finish():
        last = joined[-1] if joined else None
        match part:
            case CallName(name):
                joined.append(Made(name))
            case CallText(text):
                assert text
                joined[-1] = replace(last, arguments=last.arguments + text)
            case CallEnd():
                json.loads(last.arguments)
                joined[-1] = replace(last, complete=True)
            case _ if type(part) is type(last):
                joined[-1] = type(part)(last.text + part.text)
            case _:
                joined.append(part)
    return joined


CASES: dict[str, tuple[str, list[Reasoning | Content | Made]]] = {
    "thought and said": ("why\n</think>\n\nbecause", [Reasoning("why"), Content("because")]),
    "only thought": ("why\n</thin", [Reasoning("why\n</thin")]),
    "nothing thought": ("\n</think>\n\nhi", [Content("hi")]),
    "newlines of its own": ("\na\n\n</think>\n\n\nb", [Reasoning("\na\n"), Content("\nb")]),
    "said </think> again": ("a</think>b</think>", [Reasoning("a"), Content("b</think>")]),
    "a call ends thinking": ("hm\n" + call("now"), [Reasoning("hm"), made("now")]),
    "content and two calls": (
        "a\n</think>\n\nLet me look.\n\n" + call(city="Rome", days="3") + "\n" + call("now"),
        [Reasoning("a"), Content("Let me look."), made(city="Rome", days=3), made("now")],
    ),
    "text after a call": ("</think>" + call("now") + "\n\nDone.", [made("now"), Content("\n\nDone.")]),
    "white space within a string": ("</think>" + call(city="\n  a\n\tb \n"), [made(city="\n  a\n\tb \n")]),
    "one line": (
        "</think><tool_call><function=weather><parameter=city>Rome</parameter></function></tool_call>",
        [made(city="Rome")],
    ),
    "tags within a string": (
        "</think>" + call(city="</tool_call><tool_call></function> </think>"),
        [made(city="</tool_call><tool_call></function> </think>")],
    ),
    "unknown names": ("</think>" + call("other", x="1"), [made("other", x="1")]),
    "unknown parameter": ("</think>" + call(zone="1"), [made(zone="1")]),
    "the end of the call is missing": (
        "</think>" + call("now").removesuffix("ool_call>"), [made("now")]),
    "the function does not end": (
        "</think>x\n\n" + call(city="Rome").removesuffix("ction>\n</tool_call>"),
        [Content("x"), Made("weather", '{"city": "Rome"')],
    ),
    "unfinished value": (
        "</think><tool_call>\n<function=now>\n<parameter=a>\nxy\n</para",
        [Made("now", '{"a": "xy')],
    ),
    "unfinished number": (
        "</think><tool_call>\n<function=weather>\n<parameter=days>\n12", [Made("weather", '{"days": ')]),
    "no parameter yet": (
        "</think><tool_call>\n<function=weather>\n<parameter=da",
        [Content("<tool_call>\n<function=weather>\n<parameter=da")],
    ),
    "prose after a parameter": (
        "</think>" + call(city="Rome").replace("</function>", "and </function>") + call("now"),
        [Made("weather", '{"city": "Rome"'), Content("\nand </function>\n</tool_call>"), made("now")],
    ),
    "a key twice": (
        "</think>" + call(city="a").replace("</function>", "<parameter=city>b</parameter></function>"),
        [Made("weather", '{"city": "a", "city": "b"}', True)],
    ),
    "what JSON escapes": ("</think>" + call(city='a"\\\n\x01é'), [made(city='a"\\\n\x01é')]),
    "JSON instead": (
        '</think>\n<tool_call>\n{"name": "now"}\n</tool_call>',
        [Content('<tool_call>\n{"name": "now"}\n</tool_call>')],
    ),
    "a real call after a broken one": (
        "</think><tool_call>\n\n<tool_call>\n<tool_call" + call("now"),
        [Content("<tool_call>\n\n<tool_call>\n<tool_call"), made("now")],
    ),
    "prose between parameters": (
        "</think><tool_call>\n<function=now>\nno </function>\n</tool_call>" + call("now"),
        [Content("<tool_call>\n<function=now>\nno </function>\n</tool_call>"), made("now")],
    ),
    "text behind the function": (
        "</think>" + call("now").replace("\n</tool_call>", " and") + call("now"),
        [made("now"), Content(" and"), made("now")],
    ),
    "no name": ("</think><tool_call><function=></function>", [Content("<tool_call><function=></function>")]),
    "name of two lines": (
        "</think><tool_call><function=a\nb></function>", [Content("<tool_call><function=a\nb></function>")]),
    "key of a tag": (
        "</think><tool_call><function=a><parameter=<b>", [Content("<tool_call><function=a><parameter=<b>")]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_parts_for_every_cut(name: str) -> None:
    text, expected = CASES[name]
    assert parse([text]) == expected
    for at in range(len(text) + 1):
        assert parse([text[:at], text[at:]]) == expected, at
    for size in range(1, 17):
        assert parse(text[i : i + size] for i in range(0, len(text), size)) == expected, size


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=now>", "<function=weather>",
     "</function>", "<parameter=city>", "<parameter=days>", "</parameter>", "\n",
     "\n\n", " ", "7", "<", "</", "x", "é", ">"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=30).map("".join)
FORMS = st.builds(
    AnswerForm, reasoning=st.booleans(), inside=st.booleans(), tools=st.sampled_from([TOOLS, None])
)


@given(TEXTS, FORMS, st.lists(st.integers(1, 20), min_size=1))
def test_any_text_any_cut(text: str, form: AnswerForm, sizes: list[int]) -> None:
    chunks, at = [], 0
    while at < len(text):
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(text[at : at + size])
        at += size
    assert parse(chunks, form) == parse([text], form)


@given(TEXTS, FORMS)
def test_what_has_come_out_depends_on_the_text_alone(text: str, form: AnswerForm) -> None:
    by_character, came = form.parser(), ""
    for at, character in enumerate(text):
        came += "".join(shown(part) for part in by_character.feed(character))
        assert came == "".join(shown(part) for part in form.parser().feed(text[: at + 1]))


@given(TEXTS, st.booleans())
def test_no_text_is_lost(text: str, inside: bool) -> None:
    """Without calls and tags, all is there; with them, only tags and newlines of the format are not."""
    parts = parse([text], AnswerForm(reasoning=True, inside=inside))
    came = "".join(part.text for part in parts)
    characters = iter(text)
    assert all(character in characters for character in came)  # in this order
    lost = sorted(filter(str.strip, (Counter(text) - Counter(came)).elements()))
    assert lost in [sorted(tags) for tags in ("", "<think>", "</think>", "<think></think>")]


def shown(part: Part) -> str:
    match part:
        case CallName(name):
            return f"[{name} "
        case CallEnd():
            return "]"
    return part.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nwhy\n</think>\n\nso", [Reasoning("why"), Content("so")]),
        ("\n\n<think>why</think>so", [Reasoning("why"), Content("so")]),
        ("no <think>why</think>", [Content("no <think>why</think>")]),
        ("<thin", [Content("<thin")]),
        ("\n", [Content("\n")]),
    ],
)
def test_think_blocks_that_the_answer_opens(text: str, expected: list[Part]) -> None:
    form = AnswerForm(reasoning=True)
    assert parse([text], form) == parse(text, form) == expected


def test_without_tools_nothing_is_a_call() -> None:
    text = "a <tool_call>b\n</think>" + call("now")
    assert parse([text], AnswerForm(reasoning=True, inside=True)) == [
        Reasoning("a <tool_call>b"), Content(call("now"))
    ]  # fmt: skip


def test_one_call_leaves_out_the_others() -> None:
    form = AnswerForm(tools=TOOLS, one_call=True)
    assert parse(["x" + call("now") + "\n" + call(city="a")], form) == [Content("x"), made("now")]


DEEP = "[" * 100_000 + "]" * 100_000
VALUES: list[tuple[str, str, Any]] = [
    ("city", "42", "42"), ("city", "null", "null"), ("city", "", ""), ("city", '"a"', '"a"'),
    ("days", "42", 42), ("days", " -7 ", -7), ("days", "5.0", 5), ("days", "5.5", "5.5"),
    ("days", "five", "five"), ("days", "1_000", "1_000"), ("days", "٣", "٣"),
    ("days", "9" * 5000, "9" * 5000),
    ("days", "true", "true"),
    ("ratio", "1.5", 1.5), ("ratio", "3", 3), ("ratio", "NaN", "NaN"), ("ratio", "1e999", "1e999"),
    ("exact", "true", True), ("exact", "False", False), ("exact", "1", "1"), ("exact", "yes", "yes"),
    ("where", '{"a": [1, null]}', {"a": [1, None]}), ("where", "[1]", "[1]"),
    ("where", "{'a': 1}", "{'a': 1}"),
    ("tags", '["é",\n"b"]', ["é", "b"]), ("tags", "[1", "[1"), ("tags", DEEP, DEEP),
    ("tags", "[" * 150 + "]" * 150, "[" * 150 + "]" * 150), ("tags", "[Infinity]", "[Infinity]"),
    ("nothing", "null", None), ("nothing", "none", "none"),
    ("either", "12", 12), ("either", "x", "x"), ("either", "null", None),
    ("choice", "true", True), ("choice", "null", None), ("choice", "maybe", "maybe"),
    ("level", "2", 2), ("free", "2", "2"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "text", "value"), VALUES, ids=[f"{k}={t[:12]}" for k, t, _ in VALUES])
def test_values_follow_the_schema(key: str, text: str, value: Any) -> None:
    assert parse([call(**{key: text})], AnswerForm(tools=TOOLS)) == [made(**{key: value})]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a"}, {"$ref": "elsewhere"}, {"$ref": "#/$defs/a/0"}, {"anyOf": {}}, {"type": 5},
        {"allOf": [{"$ref": "#/properties/x"}] * 9}, {"type": [5, None]}, {"enum": "a"}, [], 7,
    ],
    ids=str,
)  # fmt: skip
def test_schemas_that_say_nothing_leave_strings(schema: Any) -> None:
    parameters = {"properties": {"x": schema}, "$defs": {"a": {"$ref": "#/$defs/a"}}}
    form = AnswerForm(tools=({"type": "function", "function": {"name": "f", "parameters": parameters}},))
    assert parse([call("f", x="1")], form) == [made("f", x="1")]


@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        "<",
        "\n",
        " ",
        "<tool_call><function=now>",
        "<tool_call>\n\n",
        "<parameter=a>x</parameter>",
        "</",
    ],
)
@pytest.mark.parametrize(
    "before",
    [
        "",
        "</think>",
        "</think><tool_call>",
        "</think><tool_call><function=now>",
        "</think><tool_call><function=now><parameter=a>",
    ],
)
def test_hostile_texts_are_read_once(unit: str, before: str) -> None:
    """What is kept unread between two pieces of text stays short, whatever comes; so work is linear."""
    parser = FORM.parser()
    for character in before + unit * 200:
        parser.feed(character)
        assert len(parser._splitter._held) < 16 and len(parser._calls._text) < 16
    text = before + unit * 3_000
    assert parse([text]) == parse(text)


@pytest.mark.parametrize(
    ("inside", "text", "last"),
    [
        (True, "hm, so</think>yes", "</think>"),
        (True, "hm", "hm"),
        (False, "<think>a</think>b", "</think>"),
        (False, "a", ""),
        (False, "", ""),
        (True, "a<tool_call>b", "<tool_call>"),
    ],
)
def test_reasoning_tokens_count_up_to_the_end_of_reasoning(inside: bool, text: str, last: str) -> None:
    tokenizer = byte_tokenizer()
    counter = AnswerForm(reasoning=True, inside=inside, tools=TOOLS).counter(tokenizer)
    assert counter is not None
    for token in tokenizer.encode(text):
        counter.push(token)
    until = text[: text.index(last) + len(last)] if last else ""
    assert counter.count == len(tokenizer.encode(until))
