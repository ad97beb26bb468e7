"""Reasoning and content of an answer, told apart while it streams.

A pure state machine: what has come out after some text depends on that text only, not on how it was
cut. Reasoning ends at the first </think>, or just before a <tool_call>; the newlines that the format
puts around </think> belong to neither side. Where the prompt did not open a think block, one that
the answer itself begins with counts. Knows nothing of tokens, except that a tag may span several.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from quickdraft.text.detokenizer import Detokenizer, TokenBytes
from quickdraft.text.markup import END_THINK, THINK, TOOL_CALL, open_end

_OPENINGS: Final = (THINK, f"\n{THINK}", f"\n\n{THINK}")


class _State(Enum):
    START = auto()  # a think block may still be opened
    REASONING = auto()
    CONTENT = auto()


class ReasoningSplitter:
    """Text in; (reasoning, content) out, of which content follows reasoning.

    `inside`: the prompt ends with an open think block. `tool_calls`: a <tool_call> ends reasoning.
    """

    def __init__(self, *, inside: bool, tool_calls: bool = True) -> None:
        self._state = _State.REASONING if inside else _State.START
        self._ends = (END_THINK, TOOL_CALL) if tool_calls else (END_THINK,)
        self._held = ""
        self._newlines = 0  # newlines of the format that may follow here
        self.thought = inside  # there is reasoning, perhaps an empty one

    @property
    def decided(self) -> bool:
        """From here on all is content."""
        return self._state is _State.CONTENT

    def feed(self, text: str) -> tuple[str, str]:
        """What `text` makes certain."""
        text, self._held = self._held + text, ""
        if self._state is _State.START:
            text = self._open(text)
        text = self._skip_newlines(text)
        if self._state is not _State.REASONING:
            return "", text
        found = [(at, tag) for tag in self._ends if (at := text.find(tag)) >= 0]
        if not found:
            keep = open_end(text, [word for tag in self._ends for word in (tag, f"\n{tag}")])
            self._held = text[len(text) - keep :]
            return text[: len(text) - keep], ""
        at, tag = min(found)
        self._state = _State.CONTENT
        rest = text[at:]
        if tag == END_THINK:
            self._newlines = 2
            rest = self._skip_newlines(text[at + len(tag) :])
        return text[:at].removesuffix("\n"), rest

    def finish(self) -> tuple[str, str]:
        """The end of the text: what was held back is no tag after all."""
        held, self._held = self._held, ""
        return (held, "") if self._state is _State.REASONING else ("", held)

    def _open(self, text: str) -> str:
        """`text` without the opening tag, or nothing while it may still be one."""
        for opening in _OPENINGS:
            if text.startswith(opening):
                self._state, self._newlines, self.thought = _State.REASONING, 1, True
                return text[len(opening) :]
        if any(opening.startswith(text) for opening in _OPENINGS):
            self._held = text
            return ""
        self._state = _State.CONTENT
        return text

    def _skip_newlines(self, text: str) -> str:
        while self._newlines and text:
            if text[0] != "\n":
                self._newlines = 0
                break
            text, self._newlines = text[1:], self._newlines - 1
        return text


class ReasoningTokens:
    """Counts the tokens of an answer up to the one that ends its reasoning; all, while none does."""

    def __init__(self, tokenizer: TokenBytes, *, inside: bool, tool_calls: bool = True) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._splitter = ReasoningSplitter(inside=inside, tool_calls=tool_calls)
        self._seen = 0

    @property
    def count(self) -> int:
        return self._seen if self._splitter.thought else 0

    def push(self, token: int) -> None:
        """The next token of the answer."""
        if not self._splitter.decided:
            self._seen += 1
            self._splitter.feed(self._detokenizer.push(token))
