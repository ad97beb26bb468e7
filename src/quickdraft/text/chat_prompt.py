"""A conversation as token ids, through a chat template, and where a later one may differ from it.

Users are kept out of the structure: every string of the messages that reads like a control token
gets a sentinel character inside before rendering, so that after it only the template's own control
tokens still match; the sentinel is taken out of the literal pieces before BPE. The sentinel is a
Unicode noncharacter that occurs nowhere in the messages. Only a template that rewrites contents
(deletes from within them, changes their case, completes them) can still make a control token of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from quickdraft.errors import ContextTooLong, RequestError
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.markup import THINK
from quickdraft.text.tokenizer import Tokenizer

_SENTINELS: Final = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
_LATER: Final = "\uffff"  # what will be said next, which nobody knows: like no text of a template
_ANSWER: Final = {"role": "assistant", "content": _LATER}
_CALL: Final = {"id": _LATER, "type": "function", "function": {"name": _LATER, "arguments": {}}}
# How a conversation may go on: a new question, or the result of a tool.
_NEXT_QUESTION: Final = (_ANSWER, {"role": "user", "content": _LATER})
_NEXT_RESULT: Final = ({**_ANSWER, "tool_calls": [_CALL]}, {"role": "tool", "content": _LATER})


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered conversation. `marks`: positions within `ids`, ascending, from which a later rendering
    of the same conversation may differ (an older turn loses its think block, say).
    `thinking`: it ends with an open think block."""

    ids: list[int]
    marks: tuple[int, ...] = ()
    thinking: bool = False


def chat_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    max_context: int | None = None,
    **variables: Any,
) -> ChatPrompt:
    """The rendered chat; control tokens come from the template only, never from contents.

    No BOS is added: a template that wants one writes it. ContextTooLong for text that cannot fit
    `max_context` however it is cut: tokenizing it would take hundreds of bytes for each of its own.
    """
    sentinel = _unused_sentinel([messages, variables])
    guard = _guard(tokenizer.control_tokens)
    if guard is not None:
        messages, variables = (_map_strings(v, guard, sentinel) for v in (messages, variables))
    text = template.render(messages, add_generation_prompt=add_generation_prompt, **variables)
    pieces: list[str | int] = []
    for piece in tokenizer.split_special(text):
        if isinstance(piece, str) and sentinel in piece:
            # Taking sentinels out may complete a user-defined token, which is found in any text.
            pieces += tokenizer.split_plain(piece.replace(sentinel, ""))
        else:
            pieces.append(piece)
    fewest = tokenizer.fewest_tokens(pieces)
    if max_context is not None and fewest >= max_context:
        raise ContextTooLong(fewest, max_context, at_least=True)
    encoded = tokenizer.piece_ids(pieces)
    marks: set[int] = set()
    for at in _divergences(template, messages, text, variables) if add_generation_prompt else ():
        marks.add(_token_position(tokenizer, pieces, encoded, at - text.count(sentinel, 0, at)))
    ids = [token for part in encoded for token in part]
    thinking = text.rstrip().endswith(THINK)
    return ChatPrompt(ids, tuple(sorted(marks - {0, len(ids)})), thinking)


def chat_prompt_ids(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **options: Any
) -> list[int]:
    """The token ids of `chat_prompt`."""
    return chat_prompt(tokenizer, template, messages, **options).ids


def _divergences(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], text: str, variables: Mapping[str, Any]
) -> Iterator[int]:
    """Where `text` stops being the beginning of later renderings, in characters; nothing where it never
    does. Found by rendering the conversation as it may go on."""
    for following in (_NEXT_QUESTION, _NEXT_RESULT) if variables.get("tools") else (_NEXT_QUESTION,):
        try:
            later = template.render([*messages, *following], add_generation_prompt=False, **variables)
        except RequestError:  # a conversation that the template refuses will not come
            continue
        shared = _shared_length(text, later)
        if shared < len(text):
            yield shared


def _shared_length(left: str, right: str) -> int:
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _token_position(
    tokenizer: Tokenizer, pieces: Sequence[str | int], encoded: Sequence[Sequence[int]], at: int
) -> int:
    """How many tokens lie before character `at` of the text the pieces make."""
    lengths = [len(p) if isinstance(p, str) else len(tokenizer.token_text(p)) for p in pieces]
    ends = list(accumulate(lengths))
    index = next((i for i, end in enumerate(ends) if at < end), len(pieces))
    before = sum(map(len, encoded[:index]))
    if index == len(pieces):
        return before
    piece, offset = pieces[index], at - (ends[index] - lengths[index])
    return before + (tokenizer.tokens_within(piece, offset) if isinstance(piece, str) and offset else 0)


def _guard(control_tokens: Sequence[str]) -> re.Pattern[str] | None:
    """Matches the first character of every control token, overlapping ones too."""
    if not control_tokens:
        return None
    return re.compile(f"(?=(?:{'|'.join(map(re.escape, control_tokens))}))(.)", re.DOTALL)


def _map_strings(value: Any, guard: re.Pattern[str], sentinel: str) -> Any:
    if isinstance(value, str):
        return guard.sub(rf"\1{sentinel}", value)
    if isinstance(value, Mapping):
        return {
            _map_strings(key, guard, sentinel): _map_strings(item, guard, sentinel)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_map_strings(item, guard, sentinel) for item in value]
    return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _unused_sentinel(value: Any) -> str:
    free = set(_SENTINELS)
    for text in _strings(value):
        free -= {sentinel for sentinel in free if sentinel in text}
    if not free:
        raise RequestError("the messages use every Unicode noncharacter U+FDD0..U+FDEF")
    return min(free)
