"""Log-probabilities in the shape of OpenAI's old completions.

It owns that shape only; the chat form is in shapes.py, the numbers come from the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quickdraft.text.detokenizer import Detokenizer
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import TokenLogprob


class LegacyLogprobs:
    """The old shape of one choice's log-probabilities: parallel lists, and where in the text of the
    choice each token begins."""

    def __init__(self, tokenizer: Tokenizer, offset: int) -> None:
        self._tokenizer, self._offset = tokenizer, offset
        self._detokenizer = Detokenizer(tokenizer)

    def show(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The next entries, in order."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(entry.token))
        return {
            "tokens": [self._text(entry.token) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {self._text(token): value for token, value in (*entry.top, (entry.token, entry.logprob))}
                for entry in entries
            ],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        """The token as text; bytes that are no text by themselves as OpenAI writes them."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode() if raw else self._tokenizer.token_text(token)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
