"""The tags that models write around thinking and tool calls, and the end of a text that may become one.

Shared by the splitter and the parser of the output, and by the tokenizer, for which they are text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

THINK: Final = "<think>"
END_THINK: Final = "</think>"
TOOL_CALL: Final = "<tool_call>"
END_TOOL_CALL: Final = "</tool_call>"
FUNCTION: Final = "<function="
# Text wherever they stand, also in a vocabulary that calls them control tokens.
SHOWN: Final = frozenset({THINK, END_THINK, TOOL_CALL, END_TOOL_CALL})


def open_end(text: str, words: Iterable[str]) -> int:
    """Length of the longest end of `text` with which one of `words` begins but is not complete."""
    words = tuple(words)
    longest = min(len(text), max(map(len, words)) - 1)
    for length in range(longest, 0, -1):
        if any(len(word) > length and text.endswith(word[:length]) for word in words):
            return length
    return 0
