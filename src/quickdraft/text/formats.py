"""Which forms a model's answers take: think blocks, and how it writes tool calls.

Chosen by what the chat template and the tokenizer show, or by name. Today's forms are those of the
Qwen3 family: `qwen3` for reasoning, `qwen3_coder` for tool calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quickdraft.text.answer_parts import AnswerForm
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.markup import END_THINK, FUNCTION, THINK, TOOL_CALL
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import ReasoningParser, ToolCallParser


@dataclass(frozen=True, slots=True)
class Formats:
    """What is read out of this model's answers. `takes_tools`: its template does. `tool_calls` None: the
    form of its calls is not known."""

    reasoning: bool = False
    takes_tools: bool = False
    tool_calls: ToolCallParser | None = None  # never AUTO

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        reasoning: ReasoningParser = ReasoningParser.AUTO,
        tool_calls: ToolCallParser = ToolCallParser.AUTO,
    ) -> Formats:
        """The forms that were named; AUTO looks at the model's files."""
        mentions = template.mentions if template is not None else lambda text: False
        tokens = tokenizer is not None and all(map(tokenizer.has_token, (THINK, END_THINK)))
        thinks = reasoning is ReasoningParser.QWEN3
        if reasoning is ReasoningParser.AUTO:
            thinks = tokens or mentions(END_THINK)
        takes_tools = template is not None and "tools" in template.variables
        if tool_calls is not ToolCallParser.AUTO:
            return cls(thinks, takes_tools, tool_calls)
        known = mentions(TOOL_CALL) and mentions(FUNCTION)
        return cls(thinks, takes_tools, ToolCallParser.QWEN3_CODER if known else None)

    def explain(self) -> str:
        """One line for the start of a server."""
        reasoning = "split at think blocks" if self.reasoning else "not told from the answer"
        calls = {
            ToolCallParser.QWEN3_CODER: "read in the form qwen3_coder",
            ToolCallParser.NONE: "left in the text",
        }
        known = calls[self.tool_calls] if self.tool_calls is not None else "in no known form"
        tools = f"tool calls: {known}" if self.takes_tools else "tools: not in the chat template"
        return f"reasoning: {reasoning}; {tools}"

    def answer_form(
        self,
        *,
        thinking: bool,
        tools: tuple[Mapping[str, Any], ...] | None = None,
        one_call: bool = False,
    ) -> AnswerForm:
        """How to read one answer. `thinking`: its prompt ends with an open think block; `tools`: those
        it may call, None for none."""
        parsed = tools if self.tool_calls is ToolCallParser.QWEN3_CODER else None
        return AnswerForm(self.reasoning, self.reasoning and thinking, parsed, one_call)
