"""Which forms a model's answers take: think blocks, and how it writes tool calls.

Chosen by what the chat template and the tokenizer show, or by name. `qwen3` is a form of reasoning;
`qwen3_coder` (Qwen3-Coder, Qwen3.5 and later), `hermes` (Qwen2.5, Qwen3, Hermes) and `json` (Llama 3,
Mistral) are forms of tool calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        return cls(thinks, takes_tools, _shown_form(mentions))

    def explain(self) -> str:
        """One line for the start of a server."""
        reasoning = "split at think blocks" if self.reasoning else "not told from the answer"
        match self.tool_calls:
            case None:
                known = "in no known form"
            case ToolCallParser.NONE:
                known = "left in the text"
            case form:
                known = f"read in the form {form}"
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
        inside = self.reasoning and thinking
        if self.tool_calls in (None, ToolCallParser.NONE):
            return AnswerForm(self.reasoning, inside)
        return AnswerForm(self.reasoning, inside, tools, one_call, self.tool_calls)


def _shown_form(mentions: Callable[[str], bool]) -> ToolCallParser | None:
    """The form of calls that a template writes, by what only that form has."""
    if mentions(TOOL_CALL) and mentions(FUNCTION):
        return ToolCallParser.QWEN3_CODER
    if mentions(TOOL_CALL) and mentions("arguments"):
        return ToolCallParser.HERMES
    if mentions("[TOOL_CALLS]") or (mentions('"parameters"') and mentions('"name"')):
        return ToolCallParser.JSON
    return None
