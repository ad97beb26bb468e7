"""Grammars over a model's tokens: masks, forced tokens, errors of what clients send, and limits."""

from __future__ import annotations

import json
import random
import threading
from typing import Any

import numpy as np
import pytest

from quickdraft.engine.grammar import KEPT_GRAMMARS, MAX_GRAMMAR_BYTES, Grammars, Kind
from quickdraft.engine.thinking import ThinkingBudget
from quickdraft.errors import BadParameter, UnsupportedError
from quickdraft.speculate.constraint import ConstraintFailed, Joined, Matcher
from quickdraft.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import END_OF_TEXT, IM_END, IM_START, byte_tokenizer
from tests.support.constraints import GRAMMAR, REGEX, SCHEMA

SOURCES = {
    "schema": (Kind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "object": (Kind.JSON_SCHEMA, '{"type": "object"}'),
    "regex": (Kind.REGEX, REGEX + "é?"),
    "grammar": (Kind.LARK, GRAMMAR),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, (IM_END,))


def options(matcher: Matcher) -> list[int]:
    return [int(token) for token in np.flatnonzero(matcher.allowed())]


@pytest.mark.parametrize("name", SOURCES)
def test_a_matcher_does_not_contradict_itself(grammars: Grammars, tokenizer: Tokenizer, name: str) -> None:
    """At every state of random answers: single questions agree with the mask, what is forced is all there is,
    copies do not disturb, and only what is complete may end."""
    dice, ended = random.Random(name), 0
    for _ in range(8):
        matcher = grammars.compile(*SOURCES[name], "x").start()
        for _ in range(120):
            twin, fresh = matcher.copy(), matcher.copy()
            allowed = options(twin)
            assert [t for t in range(tokenizer.vocabulary_size + 3) if fresh.allows(t)] == allowed
            assert not {END_OF_TEXT, IM_START} & set(allowed)
            forced = matcher.forced(5)
            for token in forced:
                assert options(twin) == [token]
                twin.push(token)
            assert fresh.fitting(forced) == len(forced)
            token = dice.choice(allowed)
            assert token == IM_END or fresh.fitting([token]) == 1
            refused = next(t for t in range(tokenizer.vocabulary_size) if t not in allowed)
            assert fresh.fitting([refused, token]) == 0
            if token == IM_END:
                ended += 1
                break
            matcher.push(token)
    assert ended or name == "object"


def test_the_end_is_allowed_only_where_the_text_is_complete(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.compile(Kind.REGEX, "[0-9]{2}(\\.[0-9])?", "x").start()
    for text, ends, only in (("1", False, False), ("2", True, False), (".", False, False), ("5", True, True)):
        for token in tokenizer.encode(text):
            matcher.push(token)
        assert matcher.allows(IM_END) == ends and (options(matcher) == [IM_END]) == only
    assert matcher.forced(9) == ()  # it takes no row of its own
    with pytest.raises(ConstraintFailed, match="cannot be followed"):
        matcher.push(tokenizer.encode("6")[0])


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (Kind.REGEX, "(a", "unclosed group"),
        (Kind.REGEX, "(?=a)b", "look-around"),
        (Kind.LARK, "start: nothing", "unknown name"),
        (Kind.JSON_SCHEMA, '{"type": "object", "not": {}}', "not"),
        (Kind.JSON_SCHEMA, '{"type": "text"}', "Invalid type"),
        (Kind.JSON_SCHEMA, '{"type": 1}', "type"),
        (Kind.JSON_SCHEMA, "[]", "object"),
        (Kind.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1), "bytes"),
    ],
)
def test_bad_grammars_name_the_field(grammars: Grammars, kind: Kind, text: str, said: str) -> None:
    with pytest.raises(BadParameter, match=said) as caught:
        grammars.compile(kind, text, "the.field")
    assert caught.value.name == "the.field" and "<state>" not in str(caught.value)


def _nested() -> dict[str, Any]:
    definitions: dict[str, Any] = {
        f"d{n}": {"type": "object", "properties": {key: {"$ref": f"#/$defs/d{n + 1}"} for key in "abcd"}}
        for n in range(60)
    }
    return {"$ref": "#/$defs/d0", "$defs": definitions | {"d60": {"type": "string"}}}


HOSTILE: dict[str, tuple[Kind, str]] = {
    "many optional keys": (
        Kind.JSON_SCHEMA, json.dumps({"type": "object", "properties": {f"k{n}": {} for n in range(5000)}})
    ),
    "two to the sixtieth": (Kind.JSON_SCHEMA, json.dumps(_nested())),
    "many alternatives": (
        Kind.JSON_SCHEMA,
        json.dumps({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(4)]}
                              for i in range(20)]}),
    ),
    "huge repeats": (Kind.REGEX, "(((a{1,1000}){1,1000}){1,1000}b){1,1000}"),
    "intersections": (Kind.LARK, "start: X\nX: /.*a.{12}/ & /.*b.{12}/ & ~/.*c.{12}/\n"),
    "ambiguity": (Kind.LARK, 'start: s\ns: s s s | "a" | ""\n'),
    "a pattern inside": (Kind.JSON_SCHEMA, '{"type": "string", "pattern": "^(a|aa|b.*){1,900}c.{500}$"}'),
    "deep": (Kind.LARK, "start: " + "(" * 5000 + '"a"' + ")" * 5000),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_leave_other_threads_running(grammars: Grammars, name: str) -> None:
    """Each is compiled or refused, with at most a few steps of work per token after that; this thread goes on
    while another compiles, which one that held the interpreter's lock would not let it."""
    grammars.compile(Kind.REGEX, "a", "warm")
    outcome: list[object] = []

    def work() -> None:
        try:
            matcher = grammars.compile(*HOSTILE[name], "x").start()
            for _ in range(8):
                allowed = [token for token in options(matcher) if token != IM_END]
                if not allowed:
                    break
                matcher.push(allowed[-1])
            outcome.append("followed")
        except (BadParameter, ConstraintFailed) as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert outcome, "it neither compiled nor was refused"


def test_grammars_are_kept_and_the_oldest_go(grammars: Grammars) -> None:
    first, second = (grammars.compile(Kind.REGEX, text, "x") for text in ("first", "second"))
    for n in range(KEPT_GRAMMARS - 1):
        grammars.compile(Kind.REGEX, f"a{n}", "x")
        assert grammars.compile(Kind.REGEX, "first", "x") is first
    assert grammars.compile(Kind.REGEX, "second", "x") is not second


def test_without_an_end_there_is_no_grammar(tokenizer: Tokenizer) -> None:
    with pytest.raises(UnsupportedError, match="end-of-text"):
        Grammars(tokenizer, ()).compile(Kind.REGEX, "a", "x")


def test_joined_constraints_hold_both(grammars: Grammars, tokenizer: Tokenizer) -> None:
    budget = ThinkingBudget(2, tokenizer, inside=True)
    closing = tokenizer.encode("\n</think>\n\n", special=True)
    both = Joined(
        budget, grammars.compile(Kind.LARK, 'start: /[xy]*\\n<\\/think>\\n\\n/ "done"', "x")
    ).start()
    assert both.allows(tokenizer.encode("x")[0]) and not both.allows(tokenizer.encode("z")[0])
    assert both.fitting(tokenizer.encode("xyx")) == 2
    for token in tokenizer.encode("xy"):
        both.push(token)
    assert list(both.forced(99)) == closing and options(both) == closing[:1]
    for token in closing:
        both.push(token)
    assert tokenizer.decode(both.forced(99)) == "done"


@pytest.mark.parametrize("tokens", [-1, True, 1.5])
def test_bad_budgets(tokenizer: Tokenizer, tokens: Any) -> None:
    with pytest.raises(BadParameter, match="thinking_budget"):
        ThinkingBudget(tokens, tokenizer, inside=True)
