"""A tokenizer with think and tool tokens, and a chat template with the constructs of thinking models.

The template is the tests' own: tools and effort in the system turn, think blocks that may be kept or
dropped, calls and results of tools, refusals, and a generation prompt with an open or an empty block.
"""

from __future__ import annotations

import dataclasses

from quickdraft.types import TokenizerData
from tests.support.byte_tokenizer import byte_tokenizer_data

MARKUP = ("</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
# What such a model says with a tool look(n: integer, at): a thought, a sentence and two calls.
CALL = (
    "<tool_call>\n<function=look>\n<parameter=n>\n3\n</parameter>\n<parameter=at>\n é\n</parameter>\n"
    "</function>\n</tool_call>"
)
REPLY = "hm, wörld\n</think>\n\nLet me look.\n\n" + CALL + "\n" + CALL.replace("3", "4")
THINKING_TEMPLATE = """
{%- set found = namespace(question=-1) %}
{%- if not messages %}{{ raise_exception('There is no message.') }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('Only the first message may be of the system.') }}
    {%- elif message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set found.question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if found.question < 0 %}{{ raise_exception('Nobody asks anything.') }}{% endif %}
{%- set effort = reasoning_effort if reasoning_effort is defined else 'xhigh' %}
{%- if effort not in ['low', 'medium', 'xhigh'] %}
    {{- raise_exception('No such effort: ' + effort) }}
{%- endif %}
{%- set thinking = enable_thinking if enable_thinking is defined else true %}
{%- set keep = preserve_thinking if preserve_thinking is defined else true %}
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools or first or effort != 'xhigh' %}
    {{- '<|im_start|>system\\n' }}
    {%- if effort != 'xhigh' %}{{ 'Effort: ' + effort + '\\n' }}{% endif %}
    {%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
    {{- first + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if keep or loop.index0 > found.question %}
            {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls %}
            {{- '\\n\\n' if loop.first and message.content else '' if loop.first else '\\n' }}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\\n' }}
                {{- value if value is string else value | tojson }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if not loop.previtem or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' + ('' if thinking else '\\n</think>\\n\\n') }}
{%- endif %}
"""


def thinking_tokenizer_data(*, kind: int = 4, chat_template: str = THINKING_TEMPLATE) -> TokenizerData:
    """The byte tokenizer with MARKUP as tokens of that type (4: user-defined, 3: control)."""
    data = byte_tokenizer_data(chat_template=chat_template)
    return dataclasses.replace(
        data, tokens=(*data.tokens, *MARKUP), token_types=(*data.token_types, *[kind] * len(MARKUP))
    )
