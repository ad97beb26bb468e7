"""Which forms a model's answers take: think blocks, and how it writes tool calls.

Chosen by what the chat template and the tokenizer show, or by name. Today's forms are those of the
Qwen3 family: `qwen3` for reasoning, `qwen3_coder` for tool calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from quickdraft.text.answer_parts import AnswerForm
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.markup import END_THINK, FUNCTION, THINK, TOOL_CALL
from quickdraft.text.tokenizer import Tokenizer

ReasoningName = Literal["auto", "qwen3", "none"]
ToolCallName = Literal["auto", "qwen3_coder", "none"]
REASONING_PARSERS: Final[tuple[ReasoningName, ...]] = ("auto", "qwen3", "none")
TOOL_CALL_PARSERS: Final[tuple[ToolCallName, ...]] = ("auto", "qwen3_coder", "none")


@dataclass(frozen=True, slots=True)
class Formats:
    """What is read out of this model's answers. `tool_calls` None: its template takes tools, but the
    form of its calls is not known."""

    reasoning: bool = False
    tool_calls: Literal["qwen3_coder", "none"] | None = None

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        reasoning: ReasoningName = "auto",
        tool_calls: ToolCallName = "auto",
    ) -> Formats:
        """The forms that were named; "auto" looks at the model's files."""
        mentions = template.mentions if template is not None else lambda text: False
        if reasoning == "auto":
            tokens = tokenizer is not None and all(map(tokenizer.has_token, (THINK, END_THINK)))
            thinks = tokens or mentions(END_THINK)
        else:
            thinks = reasoning == "qwen3"
        if tool_calls != "auto":
            return cls(thinks, tool_calls)
        return cls(thinks, "qwen3_coder" if mentions(TOOL_CALL) and mentions(FUNCTION) else None)

    def answer_form(
        self,
        *,
        thinking: bool,
        tools: tuple[Mapping[str, Any], ...] | None = None,
        one_call: bool = False,
    ) -> AnswerForm:
        """How to read one answer. `thinking`: its prompt ends with an open think block; `tools`: those
        it may call, None for none."""
        parsed = tools if self.tool_calls == "qwen3_coder" else None
        return AnswerForm(self.reasoning, self.reasoning and thinking, parsed, one_call)
