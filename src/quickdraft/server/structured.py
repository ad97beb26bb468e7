"""From what a request says of the form of its answer to the constraint that the engine holds it to.

response_format, structured_outputs, tools with tool_choice or strict schemas, and thinking_budget become one
value. A grammar covers the whole answer: it begins after the think block, if there is one, and an answer with
tools may be a call instead. Every schema is also compiled by itself, so that an error names its field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from quickdraft.engine.grammar import MAX_GRAMMAR_BYTES, Grammars, Kind
from quickdraft.engine.thinking import ThinkingBudget
from quickdraft.errors import BadParameter
from quickdraft.server.call_grammar import CallableTool, GrammarText, calls, literal, text_with_calls
from quickdraft.server.errors import ApiError
from quickdraft.server.schemas import Generation
from quickdraft.speculate.constraint import Constraint, Joined
from quickdraft.text.formats import Formats
from quickdraft.text.markup import END_THINK, THINK
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import ToolCallParser

MAX_CHOICES: Final = 1000
_CLOSED_WITHIN: Final = 8  # tokens at the end of a prompt that may close its think block
# A body with one of these words may need a grammar, and compiling one can take a second.
_WORDS: Final = re.compile(
    rb'"(response_format|structured_outputs|tool_choice|strict|output_config|text"\s*:\s*\{)'
)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What the whole text of an answer must be; `where`: the field that says so."""

    where: str
    grammar: Mapping[str, Any]  # llguidance's: {"json_schema": ...} or {"lark_grammar": ...}
    kind: Kind
    source: str
    most_bytes: int | None = None  # of such an answer; None: not known


@dataclass(frozen=True, slots=True)
class Wish:
    """What an answer to a conversation must obey. `tools`: those it may call; `must_call`: those of which
    one must be called. `inside`: the prompt ends with an open think block."""

    format: AnswerFormat | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    must_call: Sequence[str] = ()
    one_call: bool = False
    thinking_budget: int | None = None
    inside: bool = False
    prompt_ids: Sequence[int] = ()


def may_compile(body: bytes) -> bool:
    """Whether the request in a body may need a grammar: then it is translated in a thread."""
    return _WORDS.search(body) is not None


def answer_format(request: Generation) -> AnswerFormat | None:
    """What `response_format` and `structured_outputs` say; None for plain text. BadParameter."""
    wanted, other = request.response_format, request.structured_outputs
    if other is None:
        if wanted is None or wanted.type == "text":
            return None
        if wanted.json_schema is None:
            return _of_schema("response_format", {"type": "object"})
        return _of_schema("response_format.json_schema.schema", wanted.json_schema.content)
    if wanted is not None and wanted.type != "text":
        raise BadParameter("structured_outputs", expected="no response_format beside it")
    kind, value = other.only
    where = f"structured_outputs.{kind}"
    match kind:
        case "json":
            return _of_schema(where, _parsed(where, value))
        case "choice":
            made = _of_lark(where, f"start: {_choices(where, value)}\n")
            return replace(made, most_bytes=max(len(text.encode()) for text in value))
        case "regex":
            return AnswerFormat(where, {}, Kind.REGEX, value)
        case _:
            return _of_lark(where, value)


def text_constraint(request: Generation, grammars: Callable[[], Grammars]) -> Constraint | None:
    """Of a completion: no thinking, no tools."""
    wanted = answer_format(request)
    _check_end(request, wanted is not None, wanted)
    return grammars().compile(wanted.kind, wanted.source, wanted.where) if wanted is not None else None


def chat_constraint(
    request: Generation,
    wish: Wish,
    formats: Formats,
    tokenizer: Tokenizer,
    grammars: Callable[[], Grammars],
) -> Constraint | None:
    """Of an answer to a conversation; None where it is free. BadParameter, ApiError."""
    budget = _budget(wish, formats, tokenizer)
    grammar = _grammar(wish, formats, tokenizer, grammars)
    whole = None if formats.reasoning or wish.tools else wish.format
    _check_end(request, grammar is not None, whole)
    if budget is None or grammar is None:
        return budget or grammar
    return Joined(budget, grammar)


def _budget(wish: Wish, formats: Formats, tokenizer: Tokenizer) -> Constraint | None:
    if wish.thinking_budget is None:
        return None
    if not formats.reasoning:
        raise ApiError(
            "'thinking_budget' is not supported: this model does not think",
            param="thinking_budget", code="unsupported_parameter",
        )  # fmt: skip
    return ThinkingBudget(wish.thinking_budget, tokenizer, wish.inside, bool(wish.tools))


def _grammar(
    wish: Wish, formats: Formats, tokenizer: Tokenizer, grammars: Callable[[], Grammars]
) -> Constraint | None:
    tools = [_callable(index, tool, wish) for index, tool in enumerate(wish.tools)]
    strict = any(tool.exact for tool in tools)
    if wish.format is None and not wish.must_call and not strict:
        return None
    form = formats.tool_calls
    if (strict or wish.must_call) and form in (None, ToolCallParser.NONE):
        raise ApiError(
            "'tools' cannot be held to their schemas: calls are left in the text by --tool-call-parser none",
            param="tools", code="unsupported_parameter",
        )  # fmt: skip
    text = GrammarText()
    several = not wish.one_call and len(wish.must_call) != 1
    if wish.must_call:
        assert form is not None
        chosen = [tool for tool in tools if tool.name in wish.must_call]
        start = _after_thinking(text, calls(text, form, chosen, several=several), wish, formats, tokenizer)
    elif wish.format is None:
        assert form is not None
        start = text_with_calls(text, form, tools, several=several)
    else:
        body = text.part(wish.format.where, _grammar_of(wish.format))
        if tools and form not in (None, ToolCallParser.NONE):
            assert form is not None
            body = f"{body} | {calls(text, form, tools, several=several)}"
        start = _after_thinking(text, body, wish, formats, tokenizer)
    whole = text.whole(start)
    if len(whole.encode()) <= MAX_GRAMMAR_BYTES:  # else it is refused, whatever its parts are
        for where, part in text.parts:
            grammars().compile(Kind.PARTS, json.dumps({"grammars": [part]}), where)
    return grammars().compile(Kind.PARTS, whole, wish.format.where if wish.format else "tools")


def _after_thinking(text: GrammarText, body: str, wish: Wish, formats: Formats, tokenizer: Tokenizer) -> str:
    """The body, after a think block where there may be one."""
    end = tokenizer.decode(wish.prompt_ids[-_CLOSED_WITHIN:], skip_special=False).rstrip()
    if not formats.reasoning or end.endswith(END_THINK):
        return body
    block = f"{text.lazy('/(?s:.*)/', END_THINK)} {text.terminal('/' + chr(92) + 'n{0,2}/')}"
    if not wish.inside:
        opening = text.terminal(f"/\\n{{0,2}}/ {literal(THINK)}")
        block = f"({opening} {block})?"
    return f"{block} ({body})"


def _callable(index: int, tool: Mapping[str, Any], wish: Wish) -> CallableTool:
    function = tool["function"]
    exact = bool(function.get("strict"))
    return CallableTool(
        f"tools[{index}].function.parameters", function["name"], function.get("parameters") or {},
        exact=exact, known=exact or bool(wish.must_call),
    )  # fmt: skip


def _grammar_of(wanted: AnswerFormat) -> dict[str, Any]:
    if wanted.kind is Kind.REGEX:
        return Grammars.regex_part(wanted.source)
    return dict(wanted.grammar)


def _of_schema(where: str, schema: Mapping[str, Any]) -> AnswerFormat:
    text = GrammarText()
    text.schema(where, schema)
    return AnswerFormat(where, text.parts[0][1], Kind.JSON_SCHEMA, json.dumps(schema))


def _of_lark(where: str, source: str) -> AnswerFormat:
    return AnswerFormat(where, {"lark_grammar": source}, Kind.LARK, source)


def _parsed(where: str, value: Any) -> dict[str, Any]:
    """A schema, which may also come as a text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadParameter(where, got=str(error)[:200], expected="a JSON schema") from error
    if not isinstance(value, dict):
        raise BadParameter(where, got=type(value).__name__, expected="a JSON schema: an object")
    return value


def _choices(where: str, texts: Sequence[str]) -> str:
    if not 0 < len(texts) <= MAX_CHOICES or not all(texts):
        raise BadParameter(
            where, got=f"{len(texts)} texts", expected=f"1 to {MAX_CHOICES} texts that are not empty"
        )
    return " | ".join(map(literal, texts))


def _check_end(request: Generation, constrained: bool, whole: AnswerFormat | None) -> None:
    """An answer that obeys a grammar ends with it; `whole`: what all of it is, where that is known."""
    if constrained and request.ignore_eos:
        raise BadParameter("ignore_eos", got="true, with an answer of a given form", expected="false")
    most = whole.most_bytes if whole is not None else None
    if most is not None and request.min_tokens > most:  # a token for each byte
        raise BadParameter(
            "min_tokens", got=request.min_tokens, expected=f"at most {most}, with these choices"
        )
