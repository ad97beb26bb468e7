"""One tool call as a JSON object, read while it streams; which keys it may have says json_calls.py.

The object may have its parts in any order. They are told in one order: the name as soon as the
beginning of the arguments was read too, then the arguments, then their end.
"""

from __future__ import annotations

import json
from typing import Final, Protocol

from quickdraft.text.json_reader import NotJson, Reader, after_space, read_string, read_value
from quickdraft.text.tool_values import value_of

_ARGUMENTS: Final = ("arguments", "parameters")


class Listener(Protocol):
    """Who is told of a call."""

    def begin(self, name: str) -> None:
        """A call is certain."""

    def more(self, text: str) -> None:
        """Of its arguments."""

    def end(self) -> None:
        """Its arguments are complete."""


class CallObject:
    """Reads one call object. `listener` is told of its parts; `names`: those it may have, None for any."""

    def __init__(self, listener: Listener, names: frozenset[str] | None) -> None:
        self._listener, self._names = listener, names
        self._name = ""
        self._arguments: list[str] | None = None  # what was read before the name
        self._complete = False  # the arguments were read
        self.begun = False  # and given out in part

    def read(self) -> Reader:
        """The object, after its bracket; NotJson for one that is no call. A last bracket may be missing."""
        behind = yield from self._read_object(outer=True)
        if not self._name:
            raise NotJson
        if self._arguments is None:
            self._more("{}")
            self._arguments_end()
        return behind

    def _read_object(self, *, outer: bool) -> Reader:
        while True:
            if (yield from after_space()) != '"':
                raise NotJson
            key: list[str] = []
            yield from read_string(key.append)
            if (yield from after_space()) != ":":
                raise NotJson
            first = yield from after_space()
            behind = yield from self._read_member("".join(key)[1:-1], first, outer)
            character = yield from after_space(behind)
            if character == "}":
                return ""
            if character != ",":
                if self._complete and self._name and outer:
                    return character
                raise NotJson

    def _read_member(self, key: str, first: str, outer: bool) -> Reader:
        if key == "function" and first == "{" and outer:
            return (yield from self._read_object(outer=False))
        if key in _ARGUMENTS and first == "{" and self._arguments is None:
            self._arguments = []
            yield from read_value(first, self._more)
            self._arguments_end()
            return ""
        if key == "id":
            return (yield from read_value(first, lambda text: None))
        if first != '"':
            raise NotJson
        pieces: list[str] = []
        yield from read_string(pieces.append)
        self._take_string(key, str(json.loads("".join(pieces))))
        return ""

    def _take_string(self, key: str, text: str) -> None:
        if key in ("name", "function") and not self._name and text:
            if self._names is not None and text not in self._names:
                raise NotJson
            self._name = text
            if self._arguments:
                held, self._arguments = self._arguments, []
                self._more("".join(held))
            if self._complete:
                self._arguments_end()
        elif key in _ARGUMENTS and self._arguments is None:
            self._arguments = []
            self._more(_object_in(text))
            self._arguments_end()
        elif key != "type" or text != "function":
            raise NotJson

    def _more(self, text: str) -> None:
        if not self._name:
            assert self._arguments is not None, "arguments are being read"
            self._arguments.append(text)
            return
        if not self.begun:
            self.begun = True
            self._listener.begin(self._name)
        self._listener.more(text)

    def _arguments_end(self) -> None:
        self._complete = True
        if self._name:
            self.begun = False
            self._listener.end()


def _object_in(text: str) -> str:
    """Arguments that were written as a string that holds JSON: the object; NotJson for anything else."""
    value = value_of(text, frozenset({"object"}))
    if not isinstance(value, dict):
        raise NotJson
    return json.dumps(value, ensure_ascii=False)
