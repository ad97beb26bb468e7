"""Which token each piece of released text came from, under any label that its token carries.

Text is released when characters are complete and no stop string can begin there, so it may lag
behind its tokens; the labels wait for it here. Knows nothing of what a label means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from quickdraft.text.detokenizer import Detokenizer, TokenBytes


@dataclass(frozen=True, slots=True)
class Origin:
    """Text of one token, and where that token came from."""

    text: str
    source: str


class TokenOrigins:
    """Follows one answer. A character belongs to the token that completed it; a token without text (a
    control token, half a character, stop text) gets no Origin, one whose text came out in parts several."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._waiting: deque[tuple[int, str]] = deque()  # characters that are not out yet, and their source
        self._last = ""

    def feed(self, tokens: Sequence[int], sources: Sequence[str], text: str) -> list[Origin]:
        """`text`, released with these tokens, cut where tokens meet; the texts joined are `text`."""
        for token, source in zip(tokens, sources, strict=True):
            self._waiting.append((len(self._detokenizer.push(token)), source))
            self._last = source
        origins: list[Origin] = []
        at = 0
        while at < len(text):
            # The end of an answer may release a replacement character that no token completed.
            length, source = self._waiting.popleft() if self._waiting else (len(text), self._last)
            taken = text[at : at + length]
            if len(taken) < length:
                self._waiting.appendleft((length - len(taken), source))
            if taken:
                origins.append(Origin(taken, source))
            at += len(taken)
        return origins
