"""Tasks over documents: copy a text, extract a sentence of it, edit a word in it; three kinds in turn.

A document is an answer of a chat row, so the target wrote it, and the row's number decides all the rest.
Knows texts only.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

KINDS: Final = ("copy", "extract", "edit")
FIRST_INDEX: Final = 10_000_000  # of tasks: that of the document's chat row is added; a multiple of 20
FEWEST_WORDS: Final = 24  # of a document
_WORD: Final = re.compile(r"[A-Za-z]{4,}")
_PLACES: Final = ("first", "second", "last")
_COPY: Final = (
    "Repeat the following text exactly, word for word:\n\n{text}",
    "Copy this text without changing anything:\n\n{text}",
    "Write the text below once more, exactly as it is.\n\n{text}",
)


def is_document(text: str) -> bool:
    """Whether all kinds of task can be made of it."""
    return len(text.split()) >= FEWEST_WORDS and len(_sentences(text)) > 2 and len(set(_words(text))) > 8


def task(number: int, text: str) -> tuple[str, str]:
    """(kind, a user's turn) of task `number`, from 0, over a document."""
    kind, turn = KINDS[number % 3], number // 3
    text = text.strip()
    if kind == "copy":
        return kind, _COPY[turn % 3].format(text=text)
    if kind == "extract":
        place = _PLACES[turn % 3]
        return kind, f"Copy out the {place} sentence of this text, and nothing else:\n\n{text}"
    old, new = _pair(text)
    return kind, f'Rewrite this text with the word "{old}" replaced by "{new}" and no other change:\n\n{text}'


def _pair(text: str) -> tuple[str, str]:
    """The word that occurs most, and the longest other one; of several the first."""
    counts = Counter(_words(text))
    old = counts.most_common(1)[0][0]
    return old, max((word for word in counts if word.lower() != old.lower()), key=len)


def _words(text: str) -> list[str]:
    found: list[str] = _WORD.findall(text)
    return found


def _sentences(text: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.!?])\s+", text.strip()) if part]
