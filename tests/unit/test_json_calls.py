"""Tool calls in JSON: complete ones, cut ones, and text that only looks like one, for every cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quickdraft.text.answer_parts import AnswerForm, Content, Reasoning
from quickdraft.text.json_reader import MAX_DEPTH
from quickdraft.types import ToolCallParser
from tests.unit.test_answer_parts import TOOLS, Made, made, parse, shown

HERMES = AnswerForm(tools=TOOLS, calls=ToolCallParser.HERMES)
JSON = AnswerForm(tools=TOOLS, calls=ToolCallParser.JSON)
ROME = '{"name": "weather", "arguments": {"city": "Rome", "days": 3}}'
NOW = '{"name": "now", "arguments": {}}'
rome, now = made(city="Rome", days=3), made("now")
Parts = list[Reasoning | Content | Made]


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


BOTH: dict[str, tuple[str, Parts]] = {
    "one call": (tagged(ROME), [rome]),
    "two after a sentence": ("Let me look.\n\n" + tagged(ROME, NOW), [Content("Let me look."), rome, now]),
    "text behind": (tagged(NOW) + "\n\nDone.", [now, Content("\n\nDone.")]),
    "a list": (f"<tool_call>[{ROME}, {NOW}]</tool_call>!", [rome, now, Content("!")]),
    "lines": (f"<tool_call>{ROME}\n{NOW}; {NOW}</tool_call>", [rome, now, now]),
    "parameters": (tagged('{"name":"weather","parameters":{"city":"é"}}'), [made(city="é")]),
    "arguments first": (tagged('{"arguments": {"city": "a"}, "name": "weather"}'), [made(city="a")]),
    "as OpenAI has it": (
        tagged('{"id": "x", "type": "function", '
               '"function": {"name": "weather", "arguments": "{\\"days\\": 1}"}}'),
        [made(days=1)],
    ),
    "no arguments": (tagged('{"name": "now"}'), [now]),
    "the last bracket is missing": (tagged(ROME[:-1]), [rome]),
    "the last tag is cut": (tagged(ROME).removesuffix("ool_call>"), [rome]),
    "the last tag is missing": (tagged(ROME).removesuffix("</tool_call>"), [rome]),
    "tags within strings": (
        tagged('{"name": "weather", "arguments": {"city": "</tool_call>\\"}{<tool_call>"}}'),
        [made(city='</tool_call>"}{<tool_call>')],
    ),
    "a line break within a string": (
        tagged('{"name": "weather", "arguments": {"city": "a\n\tb\\n\\u00e9"}}'),
        [Made("weather", '{"city": "a\\n\\tb\\n\\u00e9"}', True)],
    ),
    "every kind of value": (
        tagged('{"name":"now","arguments":{"a":[1,-2.5e3,{"b":[]}],"c":{"d":null},"e":true,"f":false}}'),
        [Made("now", '{"a": [1, -2.5e3, {"b": []}], "c": {"d": null}, "e": true, "f": false}', True)],
    ),
    "cut in a string": (
        'a<tool_call>{"name": "weather", "arguments": {"city": "Ro',
        [Content("a"), Made("weather", '{"city": "Ro')],
    ),
    "cut before the arguments": (
        '<tool_call>\n{"name": "weather", "argum', [Content('<tool_call>\n{"name": "weather", "argum')]),
    "broken arguments": (
        "<tool_call>" + '{"name": "weather", "arguments": {"city": Rome}}</tool_call>' + tagged(NOW),
        [Made("weather", '{"city": '), Content("Rome}}</tool_call>"), now],
    ),
    "broken behind the arguments": (
        '<tool_call>{"name": "now", "arguments": {}, "why": 1}</tool_call>',
        [now, Content(', "why": 1}</tool_call>')],
    ),
    "arguments that are no object": (
        tagged('{"name": "now", "arguments": [1]}'), [Content(tagged('{"name": "now", "arguments": [1]}'))]),
    "a string that holds no object": (
        tagged('{"name": "now", "arguments": "[1]"}'),
        [Content(tagged('{"name": "now", "arguments": "[1]"}'))],
    ),
    "two names": (
        tagged('{"name": "now", "name": "now"}'), [Content(tagged('{"name": "now", "name": "now"}'))]),
    "no name": (tagged('{"arguments": {}}'), [Content(tagged('{"arguments": {}}'))]),
    "nothing": (tagged("{}") + tagged(NOW), [Content(tagged("{}")), now]),
    "a tag after a broken tag": (
        "<tool_call>\n<tool_call" + tagged(NOW), [Content("<tool_call>\n<tool_call"), now]),
    "a tag is missing": (f"<tool_call>{NOW}\n" + tagged(NOW), [now, Content("\n"), now]),
    "another form": (
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [Content("<tool_call>\n<function=now>\n</function>\n</tool_call>")],
    ),
}  # fmt: skip
ONLY_JSON: dict[str, tuple[str, Parts]] = {
    "bare": (ROME, [rome]),
    "bare with a colon": ("\n " + ROME + ";" + NOW + " ok", [rome, now, Content(" ok")]),
    "bare list": (f"[{ROME},{NOW}]", [rome, now]),
    "a mark": ("<|python_tag|>" + ROME, [rome]),
    "Mistral's mark": (f"[TOOL_CALLS] [{ROME}]", [rome]),
    "fenced": (f"Sure:\n\n```json\n{ROME}\n```\nok?", [Content("Sure:"), rome, Content("\nok?")]),
    "fenced without a language": (f"```\n{NOW}```", [now]),
    "not at the beginning": (f"So {ROME}", [Content(f"So {ROME}")]),
    "an answer in JSON": ('{"city": "Rome"}', [Content('{"city": "Rome"}')]),
    "a list of numbers": ("[1, 2]", [Content("[1, 2]")]),
    "a name that no tool has": (
        '{"name": "Rome", "arguments": {}}', [Content('{"name": "Rome", "arguments": {}}')]),
    "code": ('```json\n{"a": 1}\n```', [Content('```json\n{"a": 1}\n```')]),
    "far from the beginning": (" " * 17 + NOW, [Content(" " * 17 + NOW)]),
    "only space": ("\n ", [Content("\n ")]),
}  # fmt: skip
CASES = [(HERMES, name, *case) for name, case in BOTH.items()]
CASES += [(JSON, name, *case) for name, case in (BOTH | ONLY_JSON).items()]
CASES += [(HERMES, "unknown name", tagged('{"name": "x"}'), [made("x")]),
          (HERMES, "bare", ROME, [Content(ROME)])]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [(f, t, e) for f, _, t, e in CASES],
    ids=[f"{f.calls}: {n}" for f, n, *_ in CASES],
)
def test_parts_for_every_cut(form: AnswerForm, text: str, expected: Parts) -> None:
    assert parse([text], form) == expected
    for at in range(len(text) + 1):
        assert parse([text[:at], text[at:]], form) == expected, at
    for size in range(1, 17):
        assert parse((text[i : i + size] for i in range(0, len(text), size)), form) == expected, size


def test_arguments_come_out_while_they_are_read() -> None:
    parser, out = HERMES.parser(), []
    for character in tagged(ROME):
        out.append("".join(shown(part) for part in parser.feed(character)))
    assert "".join(out) == '[weather {"city": "Rome", "days": 3}]'
    came = dict(enumerate("".join(out[: at + 1]) for at in range(len(out))))
    assert came[tagged(ROME).index("Rome") + 1] == '[weather {"city": "Ro'


def test_after_reasoning() -> None:
    form = AnswerForm(reasoning=True, inside=True, tools=TOOLS, calls=ToolCallParser.JSON)
    assert parse(["hm\n</think>\n\n" + ROME], form) == [Reasoning("hm"), rome]
    assert parse(["hm\n" + tagged(ROME)], form) == [Reasoning("hm"), rome]


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<|python_tag|>", "```json\n", "```", "{", "}", "[", "]", ",", ";", '"',
     ROME, NOW, '{"name": "now", "arguments": {"a": ', '"name": "now"', '"arguments": {', '"function": ',
     ": ",
     '"type": "function"', "1", "null", "\\", "\n", " ", "x", "é", "<", "`"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=25).map("".join)


@given(TEXTS, st.sampled_from([HERMES, JSON]))
def test_what_has_come_out_depends_on_the_text_alone(text: str, form: AnswerForm) -> None:
    by_character, came = form.parser(), ""
    for at, character in enumerate(text):
        came += "".join(shown(part) for part in by_character.feed(character))
        assert came == "".join(shown(part) for part in form.parser().feed(text[: at + 1]))
    assert parse(text, form) == parse([text], form)  # which also reads the arguments of complete calls


PROSE = st.text(st.sampled_from('{}[]",:;<>/`\\ \n1xé'), max_size=60)


@given(PROSE, st.sampled_from([HERMES, JSON]), st.sampled_from(["", "<tool_call>", "```\n"]))
def test_no_text_is_lost(text: str, form: AnswerForm, mark: str) -> None:
    """Without a name nothing is a call: all comes out, where it stands."""
    assert "".join(part.text for part in parse([mark + text], form)) == mark + text


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(max_examples=50)
@given(st.dictionaries(st.text(), JSON_VALUES), st.sampled_from([None, 1]), st.booleans())
def test_arguments_are_what_was_written(arguments: dict[str, Any], indent: int | None, ascii: bool) -> None:
    text = json.dumps({"name": "now", "arguments": arguments}, indent=indent, ensure_ascii=ascii)
    [call] = parse([tagged(text)], HERMES)
    assert isinstance(call, Made) and call.complete and json.loads(call.arguments) == arguments
    if not ascii:
        assert call.arguments == json.dumps(arguments, ensure_ascii=False)


@pytest.mark.parametrize(
    "value",
    ["NaN", "-Infinity", "1e999", "01", "1.", "+1", "truth", "'a'", "9" * 401, '"\\x"', '"\\u12g"', "{1: 2}",
     '{"a" 1}', "[1 2]", "[1,]", "{,}", "[" * MAX_DEPTH],
    ids=lambda value: value[:12],
)  # fmt: skip
def test_what_is_no_json_breaks_the_call(value: str) -> None:
    parts = parse([tagged(f'{{"name": "now", "arguments": {{"a": {value}}}}}'), tagged(NOW)], HERMES)
    assert isinstance(parts[0], Made) and not parts[0].complete and parts[-1] == now


@pytest.mark.parametrize("form", [HERMES, JSON], ids=lambda form: form.calls)
@pytest.mark.parametrize(
    "unit", ["<tool_call>", "<", "\n", " ", "<tool_call>{", "{", "[", '{"', "```\n", "```\n{", "`"]
)
@pytest.mark.parametrize("before", ["", "<tool_call>", '<tool_call>{"name": "now", "arguments": {"a": "'])
def test_hostile_texts_are_read_once(form: AnswerForm, before: str, unit: str) -> None:
    """What is kept unread between two pieces of text stays short, whatever comes; so work is linear."""
    parser = form.parser()
    for character in before + unit * 200:
        parser.feed(character)
        assert len(parser._calls._text) < 20
    text = before + unit * 2_000
    assert parse([text], form) == parse(text, form)
