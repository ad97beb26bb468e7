"""Token ids to text, one at a time. Only complete characters come out; the rest is held back.

For every way to cut a sequence of ids, the joined pieces equal Tokenizer.decode of the whole.
"""

from __future__ import annotations

import codecs
from copy import copy
from typing import Protocol


class TokenBytes(Protocol):
    """The one thing a detokenizer needs of a tokenizer."""

    def token_bytes(self, token: int) -> bytes: ...


class Detokenizer:
    """An incremental UTF-8 decoder over the bytes of tokens."""

    def __init__(self, tokenizer: TokenBytes) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The characters that `token` completes; "" while a character is still open."""
        return self._decoder.decode(self._token_bytes(token))

    def copy(self) -> Detokenizer:
        """Another one that stands here."""
        twin = copy(self)
        twin._decoder = copy(self._decoder)
        return twin

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was never completed, else ""."""
        return self._decoder.decode(b"", final=True)
