"""The text side of one running request: emitted tokens in, releasable text out.

The engine pushes every emitted token except those it stopped at by id (EOS, stop ids): those are
its business and never text.
"""

from __future__ import annotations

from collections.abc import Sequence

from quickdraft.text.detokenizer import Detokenizer, TokenBytes
from quickdraft.text.stop import StopScanner


class TextStream:
    """Tokens in, releasable text out: complete characters only, never stop text (a TextSink)."""

    def __init__(self, tokenizer: TokenBytes, stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._scanner = StopScanner(stop)
        self._ready: list[str] = []

    def push(self, token: int, allow_stop: bool) -> bool:
        """Add one emitted token; True when it completed a stop string."""
        released, hit = self._scanner.feed(self._detokenizer.push(token), allow_stop=allow_stop)
        self._ready.append(released)
        return hit

    @property
    def stopped_at(self) -> str | None:
        """The stop string that was completed."""
        return self._scanner.hit

    def finish(self) -> None:
        """No more tokens: release what was held back."""
        released, _ = self._scanner.feed(self._detokenizer.finish(), allow_stop=False)
        self._ready += [released, self._scanner.finish()]

    def take(self) -> str:
        """Text released since the last take; the takes joined are the whole text."""
        text = "".join(self._ready)
        self._ready.clear()
        return text
