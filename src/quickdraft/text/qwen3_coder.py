"""The form qwen3_coder of tool calls: a pure streaming state machine (what it keeps to: tool_calls.py).

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A call is certain at the key of its first parameter, or at its </function>. A parameter that can only be a
string comes out while it is read, others once they are complete, as their schema says. A key that
is written twice comes out twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, Final

from quickdraft.text.markup import END_TOOL_CALL, FUNCTION, TOOL_CALL, open_end
from quickdraft.text.tool_calls import CallEnd, CallName, CallPiece, CallText
from quickdraft.text.tool_values import ToolTypes, json_string, only_text, value_of

_PARAMETER: Final = "<parameter="
_END_PARAMETER: Final = "</parameter>"
_END_FUNCTION: Final = "</function>"
_VALUE_ENDS: Final = (_END_PARAMETER, f"\n{_END_PARAMETER}")
# A call may stand after an empty line, which is the format's.
_BEGINNINGS: Final = (TOOL_CALL, f"\n{TOOL_CALL}", f"\n\n{TOOL_CALL}")
_SPACE: Final = re.compile(r"\s*")
_NAME_END: Final = re.compile(r"[<>\n]")


class _State(Enum):
    TEXT = auto()
    FUNCTION = auto()  # after <tool_call>
    NAME = auto()
    BODY = auto()  # between parameters
    KEY = auto()
    VALUE = auto()
    END = auto()  # after </function>


class Qwen3CoderParser:
    """Text in; pieces of text and calls out, in order. `tools` are OpenAI's tool objects."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._types = ToolTypes(tools)
        self._state = _State.TEXT
        self._text, self._at = "", 0  # what is not consumed yet begins at `at`
        self._raw: list[str] = []  # what was consumed and did not come out, should it be no call
        self._name = ""
        self._begun = False  # the name came out
        self._keys = 0  # of its parameters, how many
        self._value: list[str] = []
        self._kinds: frozenset[str] = frozenset()  # the types that the value may have
        self._fresh = False  # nothing of the value was read
        self._out: list[str | CallPiece] = []

    def feed(self, text: str) -> list[str | CallPiece]:
        """What `text` makes certain."""
        self._text += text
        while self._step():
            pass
        self._text, self._at = self._text[self._at :], 0
        return self._take_out()

    def finish(self) -> list[str | CallPiece]:
        """The end of the text: what was held back is no call, or one that was cut off."""
        if self._begun or (self._state is _State.END and END_TOOL_CALL.startswith(self._text)):
            self._raw, self._text = [], ""
        self._give_up()
        self._emit(self._text)
        self._text = ""
        return self._take_out()

    def _step(self) -> bool:
        """Take the next construct; False when more text is needed for it."""
        match self._state:
            case _State.TEXT:
                return self._step_text()
            case _State.FUNCTION:
                return self._expect({FUNCTION: _State.NAME})
            case _State.BODY:
                return self._expect({_PARAMETER: _State.KEY, _END_FUNCTION: _State.END})
            case _State.NAME | _State.KEY:
                return self._step_name()
            case _State.VALUE:
                return self._step_value()
            case _State.END:
                return self._expect({END_TOOL_CALL: _State.TEXT})

    def _step_text(self) -> bool:
        text, start = self._text, self._at
        found = text.find(TOOL_CALL, start)
        if found < 0:
            self._at = max(start, len(text) - open_end(text, _BEGINNINGS))
            self._emit(text[start : self._at])
            return False
        begin = found
        while begin > start and found - begin < 2 and text[begin - 1] == "\n":
            begin -= 1
        self._emit(text[start:begin])
        self._at = begin
        self._consume(found + len(TOOL_CALL))
        self._state = _State.FUNCTION
        return True

    def _expect(self, words: Mapping[str, _State]) -> bool:
        """One of `words` after any white space; anything else is no call."""
        space = _SPACE.match(self._text, self._at)
        assert space is not None, "the pattern matches nothing too"
        self._consume(space.end())
        for word, state in words.items():
            if self._text.startswith(word, self._at):
                self._consume(self._at + len(word))
                self._enter(state)
                return True
        left = len(self._text) - self._at
        if any(left < len(word) and self._text.endswith(word[:left]) for word in words):
            return False
        self._give_up()
        return True

    def _enter(self, state: _State) -> None:
        self._state = state
        if state is _State.END:
            self._begin()
            self._out += [CallText("}" if self._keys else "{}"), CallEnd()]
            self._begun = False
        if state in (_State.END, _State.TEXT):
            self._raw = []

    def _step_name(self) -> bool:
        found = _NAME_END.search(self._text, self._at)
        self._take_value(found.start() if found else len(self._text))
        if found is None:
            return False
        name = self._joined_value()
        if found[0] != ">" or not name:
            self._give_up()
            return True
        self._consume(found.end())
        if self._state is _State.NAME:
            self._name, self._keys, self._state = name, 0, _State.BODY
        else:
            self._begin_value(name)
        return True

    def _begin(self) -> None:
        if not self._begun:
            self._out.append(CallName(self._name))
            self._begun = True

    def _begin_value(self, key: str) -> None:
        self._begin()
        self._kinds = self._types.of(self._name, key)
        quote = '"' if only_text(self._kinds) else ""
        self._out.append(CallText(f"{', ' if self._keys else '{'}{json_string(key)}: {quote}"))
        self._keys += 1
        self._state, self._fresh, self._raw = _State.VALUE, True, []

    def _step_value(self) -> bool:
        # One newline each side is the format's; all other white space is the value's.
        if self._fresh and self._at < len(self._text):
            self._at += self._text[self._at] == "\n"
            self._fresh = False
        found = self._text.find(_END_PARAMETER, self._at)
        if found < 0:
            end = max(self._at, len(self._text) - open_end(self._text[self._at :], _VALUE_ENDS))
            self._more_value(self._text[self._at : end])
            self._at = end
            return False
        self._more_value(self._text[self._at : found].removesuffix("\n"))
        self._at = found + len(_END_PARAMETER)
        rest = value_of(self._joined_value(), self._kinds)
        ended = '"' if only_text(self._kinds) else json.dumps(rest, ensure_ascii=False)
        self._out.append(CallText(ended))
        self._state, self._raw = _State.BODY, []
        return True

    def _more_value(self, text: str) -> None:
        if not only_text(self._kinds):
            self._value.append(text)
        elif text:
            self._out.append(CallText(json_string(text)[1:-1]))

    def _take_value(self, end: int) -> None:
        self._value.append(self._text[self._at : end])
        self._consume(end)

    def _joined_value(self) -> str:
        value = "".join(self._value)
        self._value = []
        return value

    def _consume(self, end: int) -> None:
        self._raw.append(self._text[self._at : end])
        self._at = end

    def _give_up(self) -> None:
        """What was consumed since the last complete construct is text."""
        self._emit("".join(self._raw))
        self._raw, self._value = [], []
        self._state, self._begun = _State.TEXT, False

    def _emit(self, text: str) -> None:
        if text:
            self._out.append(text)

    def _take_out(self) -> list[str | CallPiece]:
        out, self._out = self._out, []
        return out
