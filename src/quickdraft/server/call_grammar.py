"""Tool calls as grammar: the text of calls whose arguments follow the tools' schemas, in a model's own form.

The forms are those that text/tool_calls.py reads: `qwen3_coder`, `hermes`, `json`. What is written here must
be what is read there. Knows no request and no engine: it writes rules into a GrammarText.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from quickdraft.engine.grammar import JSON_FORM
from quickdraft.errors import BadParameter
from quickdraft.text.markup import END_TOOL_CALL, FUNCTION, TOOL_CALL
from quickdraft.text.tool_values import is_list_of_texts, resolved, types_of
from quickdraft.types import ToolCallParser

# Of a text that goes on after a value: no value may hold it.
_END: Final = "\n</parameter>\n"
_NOT_END: Final = r"~/(?s:.*)\n<\/parameter>(?s:.*)/"
# Keywords of a string that can be kept in the form qwen3_coder, beside those that say nothing about its text.
_STRING_WORDS: Final = {"type", "enum", "const", "minLength", "maxLength", "pattern"}
_SILENT_WORDS: Final = {"title", "description", "default", "examples", "deprecated", "$comment"}
_MAX_OPTIONS_DEPTH: Final = 4
_MARKS: Final = r"(<tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]|```(json)?\n)"
_ANY: Final = "/(?s:.*)/"
# Text that the form `json` reads no call in: one may begin it, or follow a mark.
_NO_JSON_CALL: Final = rf"{_ANY} & ~/\s*[{{\[](?s:.*)/ & ~/(?s:.*){_MARKS}\s*[{{\[](?s:.*)/"


@dataclass(slots=True)
class GrammarText:
    """A grammar while it is written: rules, and parts that rules name. A part keeps the field of the request
    that it came from, for errors."""

    rules: list[str] = field(default_factory=list)
    parts: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def rule(self, text: str) -> str:
        """The name of a new rule."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {text}")
        return name

    def lazy(self, text: str, ends: str) -> str:
        """The name of a rule: a text, matched by terminals, that ends at the first `ends`."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {self.terminal(f'{self.terminal(text)} {literal(ends)}')}")
        return name

    def terminal(self, text: str) -> str:
        """The name of a new terminal."""
        name = f"T{len(self.rules)}"
        self.rules.append(f"{name}: {text}")
        return name

    def part(self, where: str, grammar: dict[str, Any]) -> str:
        """The name under which rules call a grammar of its own."""
        name = f"p{len(self.parts)}"
        self.parts.append((where, {**grammar, "name": name}))
        return f"@{name}"

    def schema(self, where: str, schema: Mapping[str, Any], *, exact: bool = True) -> str:
        """A JSON value; not `exact`: keywords that cannot be followed are left out."""
        form = {**JSON_FORM, "lenient": not exact}
        return self.part(where, {"json_schema": {**schema, "x-guidance": form}})

    def whole(self, start: str) -> str:
        """The grammar as the library reads it."""
        lines = [f"start: {start}", *self.rules]
        top = {"name": "start", "lark_grammar": "\n".join(lines) + "\n"}
        return json.dumps({"grammars": [top, *(grammar for _, grammar in self.parts)]})


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that may be called. `exact`: its arguments follow the schema to the letter; else as far as
    it can be followed, and not `known`: any arguments."""

    where: str  # the field of the request that holds its schema
    name: str
    parameters: Mapping[str, Any]
    exact: bool
    known: bool

    def schema(self) -> dict[str, Any]:
        """What its arguments are: an object, closed where nothing says otherwise."""
        if not self.known:
            return {"type": "object"}
        schema = {"type": "object", **resolved(self.parameters, self.parameters)}
        if schema["type"] != "object":
            raise BadParameter(f"{self.where}.type", got=repr(schema["type"])[:80], expected="'object'")
        if schema.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:  # properties that stand there are known too
            return schema
        return {"properties": {}, "additionalProperties": False, **schema}


def literal(text: str) -> str:
    """A text as grammars write it."""
    return json.dumps(text, ensure_ascii=False)


def calls(grammar: GrammarText, form: ToolCallParser, tools: Sequence[CallableTool], *, several: bool) -> str:
    """One call of one of the tools, or `several`."""
    if form == "json":
        call = _bare_json(grammar, tools)
        return grammar.rule(f'{call} | "[" {call} (", " {call})* "]"') if several else call
    call = grammar.rule(f"{literal(TOOL_CALL)} {_after_mark(grammar, form, tools)}")
    return grammar.rule(f'{call} ("\\n" {call})*') if several else call


def text_with_calls(
    grammar: GrammarText, form: ToolCallParser, tools: Sequence[CallableTool], *, several: bool
) -> str:
    """Any text, with no call in it that is not one of these tools'."""
    if form == "json":
        return f"{grammar.terminal(_NO_JSON_CALL)} | {calls(grammar, form, tools, several=several)}"
    call = grammar.rule(f"{grammar.lazy(_ANY, TOOL_CALL)} {_after_mark(grammar, form, tools)}")
    rest = grammar.terminal(_ANY if several else f"{_ANY} & ~/(?s:.*){TOOL_CALL}(?s:.*)/")
    return grammar.rule(f"{call}{'*' if several else '?'} {rest}")


def _after_mark(grammar: GrammarText, form: ToolCallParser, tools: Sequence[CallableTool]) -> str:
    """What stands after <tool_call>, its end with it."""
    one = _qwen3_coder if form == "qwen3_coder" else _hermes
    options = grammar.rule(" | ".join(one(grammar, tool) for tool in tools))
    return grammar.rule(f'"\\n" {options} {literal(chr(10) + END_TOOL_CALL)}')


def _hermes(grammar: GrammarText, tool: CallableTool) -> str:
    return _json_call(grammar, tool, ("arguments",))


def _bare_json(grammar: GrammarText, tools: Sequence[CallableTool]) -> str:
    return grammar.rule(" | ".join(_json_call(grammar, tool, ("arguments", "parameters")) for tool in tools))


def _json_call(grammar: GrammarText, tool: CallableTool, keys: Sequence[str]) -> str:
    """{"name": NAME, "arguments": {...}}"""
    beginning = f'{{"name": {json.dumps(tool.name)}, '
    key = " | ".join(literal(f'"{name}": ') for name in keys)
    return f'{literal(beginning)} ({key}) {grammar.schema(tool.where, tool.schema(), exact=tool.exact)} "}}"'


def _qwen3_coder(grammar: GrammarText, tool: CallableTool) -> str:
    head = literal(f"{FUNCTION}{tool.name}>\n")
    return f"{head} {_parameters(grammar, tool)} {literal('</function>')}"


def _parameters(grammar: GrammarText, tool: CallableTool) -> str:
    """<parameter=KEY>, a value, </parameter>: for each property in the schema's order."""
    schema = tool.schema()
    if not tool.known or ("properties" not in schema and not tool.exact):
        key = grammar.terminal("/[^<>\\n]{1,64}/")
        one = grammar.rule(f'"<parameter=" {key} ">\\n" {grammar.lazy(_ANY, _END)}')
        return f"{one}*"
    properties, required = schema.get("properties", {}), schema.get("required", [])
    odd = schema.keys() - {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
    if tool.exact and odd - _SILENT_WORDS:
        word = sorted(odd - _SILENT_WORDS)[0]
        raise BadParameter(f"{tool.where}.{word}", expected="no such keyword beside 'properties'")
    if not isinstance(properties, Mapping) or not is_list_of_texts(required):
        raise BadParameter(tool.where, expected="'properties' to be an object and 'required' a list of texts")
    missing = [name for name in required if name not in properties]
    if missing:
        raise BadParameter(f"{tool.where}.required", got=repr(missing[0])[:80], expected="a property")
    written, needed = [], set(required)
    for key, value in properties.items():
        if not key or set(key) & set("<>\n"):
            raise BadParameter(
                f"{tool.where}.properties", got=repr(key)[:80], expected="a key without < and >"
            )
        where = f"{tool.where}.properties.{key}"
        one = grammar.rule(
            f"{literal(f'<parameter={key}>{chr(10)}')} ({_value(grammar, tool, where, value)})"
        )
        written.append(one if key in needed else f"{one}?")
    return " ".join(written)


def _value(grammar: GrammarText, tool: CallableTool, where: str, schema: Any, depth: int = 0) -> str:
    """A value and what ends it. Strings stand as they are, all else is JSON."""
    if not isinstance(schema, Mapping):
        return grammar.lazy(_ANY, _END)
    schema = resolved(schema, tool.parameters)
    types = types_of(schema, tool.parameters)
    if "string" in types and (options := _options(schema)) is not None:
        key, several = options
        if depth >= _MAX_OPTIONS_DEPTH:
            raise BadParameter(f"{where}.{key}", expected="options that do not lead back to themselves")
        return " | ".join(
            _value(grammar, tool, f"{where}.{key}[{index}]", one, depth + 1)
            for index, one in enumerate(several)
        )
    if (texts := _listed(where, schema)) and not (schema.keys() - _SILENT_WORDS - {"type", "enum", "const"}):
        return " | ".join(literal(text + _END) for text in texts)
    if types and "string" not in types:
        shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
        return f"{grammar.schema(where, {**schema, **shared}, exact=tool.exact)} {literal(_END)}"
    odd = schema.keys() - _STRING_WORDS - _SILENT_WORDS
    if tool.exact and odd and types == {"string"}:
        raise BadParameter(
            f"{where}.{sorted(odd)[0]}",
            expected="no such keyword: calls of this model hold strings as they are",
        )
    least, most = _length(where, schema, "minLength", 0), _length(where, schema, "maxLength", "")
    text = f"/(?s:.{{{least},{most}}})/ & {_NOT_END}" if least or most != "" else f"{_ANY} & {_NOT_END}"
    if "pattern" in schema:
        pattern = _searched(schema["pattern"], f"{where}.pattern")
        grammar.part(f"{where}.pattern", {"lark_grammar": f"start: {pattern}\n"})
        text += f" & {pattern}"
    return grammar.lazy(text, _END)


def _options(schema: Mapping[str, Any]) -> tuple[str, list[Any]] | None:
    """The schemas of which one holds, where nothing else is said: (keyword, schemas)."""
    said = schema.keys() - _SILENT_WORDS - {"$defs", "definitions"}
    for key in ("anyOf", "oneOf"):
        if said == {key} and isinstance(schema[key], list) and schema[key]:
            return key, schema[key]
    return None


def _listed(where: str, schema: Mapping[str, Any]) -> list[str]:
    """The texts of `enum` and `const`; BadParameter for one that would end before its end."""
    values = schema.get("enum", [])
    if not isinstance(values, list):
        raise BadParameter(f"{where}.enum", got=repr(values)[:80], expected="a list")
    values = [*values, *([schema["const"]] if "const" in schema else [])]
    texts = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in values]
    for text in texts:
        if _END[:-1] in text:
            raise BadParameter(where, got=repr(text)[:80], expected="texts without '</parameter>' as a line")
    return texts


def _length(where: str, schema: Mapping[str, Any], key: str, absent: int | str) -> int | str:
    value = schema.get(key, absent)
    if value != absent and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise BadParameter(f"{where}.{key}", got=repr(value)[:80], expected="an integer, 0 or more")
    return absent if isinstance(value, str) else value


def _searched(pattern: Any, where: str) -> str:
    """A JSON schema's pattern, which may match anywhere, for a whole text."""
    if not isinstance(pattern, str):
        raise BadParameter(where, got=repr(pattern)[:80], expected="a string")
    start = "" if pattern.startswith("^") else "(?s:.*)"
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern.removeprefix("^")
    inner = inner[:-1] if ends else inner
    if inner != pattern and "|" in inner and not (inner.startswith("(") and inner.endswith(")")):
        raise BadParameter(where, got=repr(pattern)[:80], expected="anchors around the whole: ^(a|b)$")
    inner = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", inner, flags=re.DOTALL)
    return f"/{start}({inner}){'' if ends else '(?s:.*)'}/"
