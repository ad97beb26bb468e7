"""JSON read one character at a time, as generators that are sent the next character.

What a reader has said after some characters depends on nothing else, so a caller may cut its text
anywhere. A reader passes the value on as json.dumps writes it, strings as they were written; one
liberty is taken: a raw control character within a string is escaped, as models forget to do that.
Values end at their last character, but numbers and names at the one behind, which is returned.
Knows nothing of tool calls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator
from typing import Final

MAX_DEPTH: Final = 64
_MAX_SCALAR_CHARS: Final = 400
_SPACE: Final = frozenset(" \t\n\r")
_SCALAR: Final = frozenset("0123456789+-.eEtrufalsn")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_ESCAPED: Final = frozenset('"\\/bfnrt')
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_CONTROL: Final = {chr(code): f"\\u{code:04x}" for code in range(32)} | {
    "\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f",
}  # fmt: skip

Reader = Generator[None, str, str]  # returns the character behind the value that it read, or ""
Out = Callable[[str], None]


class NotJson(Exception):
    """The last character cannot stand where it stands."""


def after_space(character: str = "") -> Reader:
    """Returns the first character that is no white space, from `character` on."""
    while not character or character in _SPACE:
        character = yield
    return character


def read_value(first: str, out: Out, depth: int = 1) -> Reader:
    """The value that begins with `first`; NotJson, also for nesting beyond MAX_DEPTH and numbers that
    are not finite."""
    if depth > MAX_DEPTH:
        raise NotJson
    if first == '"':
        return (yield from read_string(out))
    if first == "{":
        return (yield from _read_members("}", out, depth))
    if first == "[":
        return (yield from _read_members("]", out, depth))
    return (yield from _read_scalar(first, out))


def read_string(out: Out) -> Reader:
    """A string, after its first quote; both quotes are passed on."""
    out('"')
    while (character := (yield)) != '"':
        if character == "\\":
            yield from _read_escape(out)
        else:
            out(_CONTROL.get(character, character))
    out('"')
    return ""


def _read_escape(out: Out) -> Reader:
    kind = yield
    if kind in _ESCAPED:
        out("\\" + kind)
        return ""
    if kind != "u":
        raise NotJson
    digits = ""
    for _ in range(4):
        digits += yield
        if digits[-1] not in _HEX:
            raise NotJson
    out("\\u" + digits)
    return ""


def _read_members(end: str, out: Out, depth: int) -> Reader:
    """An object or an array, after its bracket."""
    out("{" if end == "}" else "[")
    character = yield from after_space()
    if character == end:
        out(end)
        return ""
    while True:
        if end == "}":
            if character != '"':
                raise NotJson
            yield from read_string(out)
            if (yield from after_space()) != ":":
                raise NotJson
            out(": ")
            character = yield from after_space()
        behind = yield from read_value(character, out, depth + 1)
        character = yield from after_space(behind)
        if character == end:
            out(end)
            return ""
        if character != ",":
            raise NotJson
        out(", ")
        character = yield from after_space()


def _read_scalar(first: str, out: Out) -> Reader:
    word = ""
    character = first
    while character in _SCALAR and len(word) < _MAX_SCALAR_CHARS:
        word += character
        character = yield
    number = _NUMBER.fullmatch(word) is not None
    if word not in ("true", "false", "null") and not (number and math.isfinite(float(word))):
        raise NotJson
    out(word)
    return character
