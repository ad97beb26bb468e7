"""The text of an answer as what it means: reasoning, content and tool calls, in order.

It puts the splitter in front of the tool-call parser; both are pure, so the parts, with neighbours
of one kind joined, do not depend on how the text was cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quickdraft.text.detokenizer import TokenBytes
from quickdraft.text.json_calls import HERMES_MARKS, JsonCallParser
from quickdraft.text.qwen3_coder import Qwen3CoderParser
from quickdraft.text.reasoning import ReasoningSplitter, ReasoningTokens
from quickdraft.text.tool_calls import CallName, CallParser, CallPiece
from quickdraft.types import ToolCallParser


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """What the model said."""

    text: str


Part = Reasoning | Content | CallPiece


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the text of one answer is to be read. `reasoning`: reasoning is split from content;
    `inside`: the prompt ends with an open think block. `tools`: calls of these tools are parsed,
    None for no calls; `calls`: the form they are in; `one_call`: calls after the first are left out."""

    reasoning: bool = False
    inside: bool = False
    tools: tuple[Mapping[str, Any], ...] | None = None
    one_call: bool = False
    calls: ToolCallParser = ToolCallParser.QWEN3_CODER  # never AUTO or NONE

    def parser(self) -> AnswerParser:
        return AnswerParser(self)

    def counter(self, tokenizer: TokenBytes) -> ReasoningTokens | None:
        """Counts reasoning tokens; None where reasoning is not told apart."""
        if not self.reasoning:
            return None
        return ReasoningTokens(tokenizer, inside=self.inside, tool_calls=self.tools is not None)


class AnswerParser:
    """Text in, parts out."""

    def __init__(self, form: AnswerForm) -> None:
        calls = form.tools is not None
        self._splitter = ReasoningSplitter(inside=form.inside, tool_calls=calls) if form.reasoning else None
        self._calls = _call_parser(form.calls, form.tools) if form.tools is not None else None
        self._one_call, self._called = form.one_call, 0

    def feed(self, text: str) -> list[Part]:
        """What `text` makes certain."""
        reasoning, content = self._splitter.feed(text) if self._splitter is not None else ("", text)
        return self._parts(reasoning, self._content(content))

    def finish(self) -> list[Part]:
        """The end of the text."""
        reasoning, content = self._splitter.finish() if self._splitter is not None else ("", "")
        rest = self._content(content)
        if self._calls is not None:
            rest += self._calls.finish()
        return self._parts(reasoning, rest)

    def _content(self, text: str) -> list[str | CallPiece]:
        if self._calls is None:
            return [text] if text else []
        return self._calls.feed(text)

    def _parts(self, reasoning: str, rest: Sequence[str | CallPiece]) -> list[Part]:
        parts: list[Part] = [Reasoning(reasoning)] if reasoning else []
        for one in rest:
            if isinstance(one, str):
                parts.append(Content(one))
                continue
            self._called += isinstance(one, CallName)
            if self._called < 2 or not self._one_call:
                parts.append(one)
        return parts


def _call_parser(form: ToolCallParser, tools: Sequence[Mapping[str, Any]]) -> CallParser:
    match form:
        case ToolCallParser.QWEN3_CODER:
            return Qwen3CoderParser(tools)
        case ToolCallParser.HERMES:
            return JsonCallParser(HERMES_MARKS)
        case ToolCallParser.JSON:
            return JsonCallParser.generic(tools)
    raise AssertionError(f"{form} is not a form of calls")
