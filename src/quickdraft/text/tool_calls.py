"""Tool calls in the text of an answer, in the form qwen3_coder: a pure streaming state machine.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

What has come out after some text depends on that text only, not on how it was cut. A call comes out
when its </function> is read, so its arguments are always complete JSON; text that turns out to be no
call comes out as text, from its <tool_call> on, where it stands. Every character is looked at a
bounded number of times.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

from quickdraft.text.markup import END_TOOL_CALL, FUNCTION, TOOL_CALL, open_end
from quickdraft.text.tool_values import ToolTypes

_PARAMETER: Final = "<parameter="
_END_PARAMETER: Final = "</parameter>"
_END_FUNCTION: Final = "</function>"
# A call may stand after an empty line, which is the format's.
_BEGINNINGS: Final = (TOOL_CALL, f"\n{TOOL_CALL}", f"\n\n{TOOL_CALL}")
_SPACE: Final = re.compile(r"\s*")
_NAME_END: Final = re.compile(r"[<>\n]")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete call; `arguments` is a JSON object, non-ASCII characters as they are."""

    name: str
    arguments: str


class _State(Enum):
    TEXT = auto()
    FUNCTION = auto()  # after <tool_call>
    NAME = auto()
    BODY = auto()  # between parameters
    KEY = auto()
    VALUE = auto()
    END = auto()  # after </function>


class ToolCallParser:
    """Text in; pieces of text and calls out, in order. `tools` are OpenAI's tool objects."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._types = ToolTypes(tools)
        self._state = _State.TEXT
        self._text, self._at = "", 0  # what is not consumed yet begins at `at`
        self._raw: list[str] = []  # what was consumed of a call, should it be none
        self._name = self._key = ""
        self._value: list[str] = []
        self._arguments: dict[str, str] = {}
        self._out: list[str | ToolCall] = []

    def feed(self, text: str) -> list[str | ToolCall]:
        """What `text` makes certain."""
        self._text += text
        while self._step():
            pass
        self._text, self._at = self._text[self._at :], 0
        return self._take_out()

    def finish(self) -> list[str | ToolCall]:
        """The end of the text: a call that is not complete is text after all."""
        if self._state is _State.END and END_TOOL_CALL.startswith(self._text):
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
        self._arguments = {}
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
            arguments = self._types.arguments(self._name, self._arguments)
            self._out.append(ToolCall(self._name, json.dumps(arguments, ensure_ascii=False)))
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
            self._name, self._state = name, _State.BODY
        else:
            self._key, self._state = name, _State.VALUE
        return True

    def _step_value(self) -> bool:
        found = self._text.find(_END_PARAMETER, self._at)
        if found < 0:
            self._take_value(max(self._at, len(self._text) - open_end(self._text, (_END_PARAMETER,))))
            return False
        self._take_value(found)
        self._consume(found + len(_END_PARAMETER))
        # One newline each side is the format's; all other white space is the value's.
        self._arguments[self._key] = self._joined_value().removeprefix("\n").removesuffix("\n")
        self._state = _State.BODY
        return True

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
        self._state = _State.TEXT

    def _emit(self, text: str) -> None:
        if text:
            self._out.append(text)

    def _take_out(self) -> list[str | ToolCall]:
        out, self._out = self._out, []
        return out
