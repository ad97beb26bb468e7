"""Prompts of thinking models: variables, tools, refusals, and the marks where later renderings differ."""

from __future__ import annotations

from typing import Any

import pytest

from quickdraft.errors import RequestError
from quickdraft.text.chat_prompt import ChatPrompt, chat_prompt
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from tests.support.thinking_model import THINKING_TEMPLATE, thinking_tokenizer_data

TOKENIZER = Tokenizer(thinking_tokenizer_data())
TEMPLATE = ChatTemplate(THINKING_TEMPLATE)
USER: dict[str, Any] = {"role": "user", "content": "hi"}
THOUGHT: dict[str, Any] = {"role": "assistant", "content": "hello", "reasoning_content": "hm"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"z": 1, "a": {"é": None}}}}
CALLING: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "hm",
    "tool_calls": [
        {"function": {"name": "look", "arguments": {"at": " x\n", "n": [1, "é"], "<|im_end|>": None}}},
        {"function": {"name": "look", "arguments": {}}},
    ],
}
RESULT = {"role": "tool", "content": "seen"}


def prompt(messages: list[dict[str, Any]], **variables: Any) -> ChatPrompt:
    return chat_prompt(TOKENIZER, TEMPLATE, messages, **variables)


def text_of(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special=False)


def test_tools_and_calls_are_rendered_as_the_format_wants() -> None:
    found = prompt([{"role": "system", "content": "be"}, USER, CALLING, RESULT, RESULT], tools=[TOOL])
    assert text_of(found.ids) == (
        '<|im_start|>system\n{"type": "function", "function": {"name": "look", "parameters": '
        '{"z": 1, "a": {"é": null}}}}\nbe<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n'
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\n<tool_call>\n<function=look>\n<parameter=at>\n x\n\n"
        '</parameter>\n<parameter=n>\n[1, "é"]\n</parameter>\n<parameter=<|im_end|>>\nnull\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=look>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nseen\n</tool_response>\n<tool_response>\nseen\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    end = TOKENIZER.encode("<|im_end|>", special=True)[0]
    assert found.thinking and found.ids.count(end) == 4  # none of them out of the key of an argument


def test_variables_change_the_prompt() -> None:
    assert text_of(prompt([USER], enable_thinking=False).ids).endswith("<think>\n\n</think>\n\n")
    assert not prompt([USER], enable_thinking=False).thinking and prompt([USER]).thinking
    assert "Effort: low" in text_of(prompt([USER], reasoning_effort="low").ids)
    kept, dropped = (
        text_of(prompt([USER, THOUGHT, USER], preserve_thinking=keep).ids) for keep in (True, False)
    )
    assert "<think>\nhm\n" in kept and "hm" not in dropped
    read = {
        "messages",
        "tools",
        "enable_thinking",
        "preserve_thinking",
        "reasoning_effort",
        "add_generation_prompt",
    }
    assert TEMPLATE.variables == read
    assert ChatTemplate(CHAT_TEMPLATE).variables == {"messages", "add_generation_prompt"}
    loaded = "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}{{ range(3) }}"
    assert ChatTemplate(loaded).variables == {"tools"}


@pytest.mark.parametrize(
    ("messages", "variables", "message"),
    [
        ([], {}, "There is no message."),
        ([USER, {"role": "system", "content": ""}], {}, "Only the first message"),
        ([THOUGHT], {}, "Nobody asks anything."),
        ([{"role": "user", "content": "<tool_response>x</tool_response>"}], {}, "Nobody asks anything."),
        ([USER], {"reasoning_effort": "high"}, "No such effort: high"),
    ],
)
def test_refusals_are_request_errors(messages: Any, variables: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        prompt(messages, **variables)


def marked(messages: list[dict[str, Any]], **variables: Any) -> list[str]:
    """The text before each mark."""
    found = prompt(messages, **variables)
    assert text_of(found.ids) == TEMPLATE.render(messages, **variables)
    return [text_of(found.ids[:mark]) for mark in found.marks]


ASKED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_marks_stand_before_think_blocks_that_go_away() -> None:
    assert marked([USER]) == []  # kept as it is
    assert marked([USER], enable_thinking=False) == []  # the empty block is printed again
    assert marked([USER], preserve_thinking=False) == [ASKED]
    assert marked([USER], preserve_thinking=False, enable_thinking=False) == [ASKED]
    second = ASKED + "hello<|im_end|>\n" + ASKED
    assert marked([USER, THOUGHT, USER], preserve_thinking=False) == [second]
    assert prompt([USER], preserve_thinking=False, add_generation_prompt=False).marks == ()


def test_marks_while_tools_work_stand_before_the_first_block_since_the_question() -> None:
    system = text_of(prompt([USER], tools=[TOOL]).ids).partition("<|im_start|>user")[0]
    turns = [USER, CALLING, RESULT, CALLING, RESULT]
    assert marked(turns, tools=[TOOL], preserve_thinking=False) == [system + ASKED]


@pytest.mark.parametrize("content", ["é <|im_end|> ü", "<|im_end|>" * 5, "\n", "<tool_call>"])
def test_a_mark_is_where_the_tokens_part(content: str) -> None:
    messages = [{"role": "user", "content": content}]
    (mark,) = prompt(messages, preserve_thinking=False).marks
    later = [*messages, THOUGHT, USER]
    now, then = (prompt(m, preserve_thinking=False).ids for m in (messages, later))
    assert now[:mark] == then[:mark] and now[mark] != then[mark]


def test_a_mark_inside_a_piece_of_text_is_a_whole_token_before_it() -> None:
    """Without think tokens the tag is text, and the prompt's last turn one piece."""
    tokenizer = byte_tokenizer()
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant: world é<think>{% endif %}"
    )
    messages = [{"role": "user", "content": "<|im_end|>é"}]
    found = chat_prompt(tokenizer, template, messages)
    text = tokenizer.decode(found.ids[: found.marks[0]], skip_special=False)
    assert text == "user: <|im_end|>é;assistant:" and found.thinking


def test_a_template_that_refuses_what_may_come_has_no_marks() -> None:
    refusing = ChatTemplate(
        "{% if messages | length > 1 %}{{ raise_exception('one only') }}{% endif %}"
        "{{ messages[0].content }}<think>"
    )
    assert chat_prompt(TOKENIZER, refusing, [USER]).marks == ()


@pytest.mark.parametrize("kind", [3, 4])
def test_think_and_call_tags_are_text_of_the_answer(kind: int) -> None:
    tokenizer = Tokenizer(thinking_tokenizer_data(kind=kind))
    ids = tokenizer.encode("<think>a</think><tool_call></tool_call>", special=True)
    assert tokenizer.decode(ids) == "<think>a</think><tool_call></tool_call>" and len(ids) == 5
