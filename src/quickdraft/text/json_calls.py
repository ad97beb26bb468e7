"""Tool calls that models write as JSON, read as they stream (what it keeps to: tool_calls.py).

    {"name": NAME, "arguments": {...}}

`arguments` may be called `parameters`, `name` may be called `function`, and `{"type": "function",
"function": {...}}` may stand around both; a list holds several. The form `hermes` has such objects
between <tool_call> and </tool_call>. The form `json` takes them at the beginning of an answer, in a
code fence, or after the marks that models put before calls, and only with the name of a tool that
was given: else every answer in JSON might be a call. A call is certain once its name and the
beginning of its arguments were read.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final

from quickdraft.text.json_call import CallObject
from quickdraft.text.json_reader import NotJson, after_space
from quickdraft.text.markup import END_TOOL_CALL, TOOL_CALL, open_end
from quickdraft.text.tool_calls import CallEnd, CallName, CallPiece, CallText

# What may stand before calls -> what ends them.
HERMES_MARKS: Final[Mapping[str, str]] = {TOOL_CALL: END_TOOL_CALL}
JSON_MARKS: Final[Mapping[str, str]] = {
    TOOL_CALL: END_TOOL_CALL, "<|python_tag|>": "", "[TOOL_CALLS]": "", "```json\n": "```", "```\n": "```",
}  # fmt: skip
_SLICE_CHARS: Final = 256
_MOST_SPACE_CHARS: Final = 16  # before calls without a mark


class JsonCallParser:
    """Text in; pieces of text and calls out, in order.

    `marks`: what may stand before calls, and what ends them then. `names`: those that calls may have,
    None for any. `bare`: calls may begin the text without a mark.
    """

    def __init__(
        self, marks: Mapping[str, str], names: frozenset[str] | None = None, *, bare: bool = False
    ) -> None:
        self._marks, self._names = marks, names
        # An empty line may stand before a mark.
        self._openings = tuple(f"{lines}{mark}" for mark in marks for lines in ("", "\n", "\n\n"))
        self._bare = bare
        self._text = ""  # not looked at yet, or perhaps the beginning of a mark
        self._reader: Generator[None, str, None] | None = None  # of what stands after a mark
        self._raw: list[str] = []  # what the reader took and did not give out, should it be no call
        self._matched = 0  # characters of the mark at the end that the reader has just seen
        self._call = CallObject(self, None)
        self._out: list[str | CallPiece] = []

    @classmethod
    def generic(cls, tools: Sequence[Mapping[str, Any]]) -> JsonCallParser:
        """The form `json`, for calls of these tools (OpenAI's tool objects)."""
        return cls(JSON_MARKS, frozenset(tool["function"]["name"] for tool in tools), bare=True)

    def feed(self, text: str) -> list[str | CallPiece]:
        """What `text` makes certain."""
        for at in range(0, len(text), _SLICE_CHARS):  # what is left of a text is looked at after each call
            self._text += text[at : at + _SLICE_CHARS]
            while self._read_calls() if self._reader is not None else self._read_text():
                pass
        return self._take_out()

    def finish(self) -> list[str | CallPiece]:
        """The end of the text: what was held back is no call, or one that was cut off."""
        raw = "".join(self._raw)
        # Only space, or the beginning of the end mark, behind a call: the mark was cut off.
        self._emit(("" if self._matched or not raw.strip() else raw) + self._text)
        self._raw, self._text, self._reader = [], "", None
        return self._take_out()

    def begin(self, name: str) -> None:
        """A call is certain."""
        self._raw = []
        self._out.append(CallName(name))

    def more(self, text: str) -> None:
        """Of its arguments."""
        self._out.append(CallText(text))

    def end(self) -> None:
        """Its arguments are complete."""
        self._raw = []
        self._out.append(CallEnd())

    def _read_text(self) -> bool:
        """Give out text up to the next mark; False when there is none yet."""
        text, marks = self._text, tuple(self._marks)
        if self._bare:
            start = len(text) - len(text.lstrip())
            rest = text[start:]
            if start == len(text) <= _MOST_SPACE_CHARS:
                return False
            if rest and any(mark.startswith(rest) and mark != rest for mark in self._marks):
                return False
            self._bare = False
            if start <= _MOST_SPACE_CHARS and rest.startswith(("{", "[")) and not rest.startswith(marks):
                self._enter(0, start, "")
                return True
        found = min(((at, mark) for mark in self._marks if (at := text.find(mark)) >= 0), default=None)
        if found is None:
            end = len(text) - open_end(text, self._openings)
            self._emit(text[:end])
            self._text = text[end:]
            return False
        at, mark = found
        begin = at
        while begin > 0 and at - begin < 2 and text[begin - 1] == "\n":
            begin -= 1
        self._enter(begin, at + len(mark), self._marks[mark])
        return True

    def _enter(self, begin: int, end: int, end_mark: str) -> None:
        """Read calls from `end` on; what stands from `begin` on is theirs."""
        self._emit(self._text[:begin])
        self._raw, self._text = [self._text[begin:end]], self._text[end:]
        self._call = CallObject(self, self._names)
        self._reader = self._read_block(end_mark)
        next(self._reader)

    def _read_calls(self) -> bool:
        """Let the reader have the text; False when it took all of it."""
        assert self._reader is not None
        for at, character in enumerate(self._text):
            if not self._call.begun:
                self._raw.append(character)
            try:
                self._reader.send(character)
            except (NotJson, StopIteration) as ended:
                self._text = self._text[at + 1 :]
                if isinstance(ended, NotJson):
                    self._give_up(character)
                self._reader, self._raw, self._matched = None, [], 0
                return True
        self._text = ""
        return False

    def _give_up(self, character: str) -> None:
        """What was read since the last complete construct is text, up to what may be a mark."""
        raw = "".join(self._raw) or character
        back = 1 + self._matched
        self._emit(raw[: len(raw) - back])
        self._text = raw[len(raw) - back :] + self._text
        self._call.begun = False

    def _read_block(self, end_mark: str) -> Generator[None, str, None]:
        """Call objects, one after the other or in a list, and the mark that ends them."""
        character = yield from after_space()
        listed = character == "["
        if listed:
            character = yield from after_space()
        while True:
            if character != "{":
                raise NotJson
            self._call = CallObject(self, self._names)
            behind = yield from self._call.read()
            if not behind:
                self._raw = []
            character = yield from after_space(behind)
            if character == "]" and listed:
                self._raw, listed = [], False
                character = yield from after_space()
            elif character in (",", ";"):
                character = yield from after_space()
            if character != "{" and not listed:
                yield from self._read_end(character, end_mark)
                return

    def _read_end(self, character: str, end_mark: str) -> Generator[None, str, None]:
        if not end_mark:
            raise NotJson
        for index, expected in enumerate(end_mark):
            if index:
                character = yield
            if character != expected:
                raise NotJson
            self._matched = index + 1

    def _emit(self, text: str) -> None:
        if text:
            self._out.append(text)

    def _take_out(self) -> list[str | CallPiece]:
        """What is to be given out, neighbouring arguments joined."""
        joined: list[str | CallPiece] = []
        pieces: list[str] = []
        for one in self._out:
            if isinstance(one, CallText):
                pieces.append(one.text)
                continue
            if pieces:
                joined.append(CallText("".join(pieces)))
                pieces = []
            joined.append(one)
        if pieces:
            joined.append(CallText("".join(pieces)))
        self._out = []
        return joined
