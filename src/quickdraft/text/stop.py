"""Stop strings, and the text side of one running request.

StopScanner releases text as soon as it cannot be part of a stop string, and never releases a stop
string. The result does not depend on how the text was cut: the stop string that ends first wins,
and among those ending together the longest. TextStream joins it with a Detokenizer; it is what the
engine pushes emitted tokens into. Stop ids and EOS are the engine's business, not known here.
"""

from __future__ import annotations

from collections.abc import Sequence

from quickdraft.text.detokenizer import Detokenizer, TokenBytes


class StopScanner:
    """Watches a stream of text for any of `stop` (each non-empty).

    One Knuth-Morris-Pratt automaton per stop string: its state is how many characters at the end
    of the text begin that string, so the longest state is exactly what must be held back.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._failure = tuple(_failure_table(text) for text in self._stop)
        self._state = [0] * len(self._stop)
        self._held = ""
        self.hit = False

    def feed(self, text: str, *, allow_stop: bool = True) -> tuple[str, bool]:
        """(text safe to release, a stop string is complete). After a hit everything is dropped.

        With `allow_stop` False a stop string that ends in `text` is ordinary text.
        """
        if self.hit or not text:
            return "", self.hit
        self._held += text
        if not self._stop:
            return self._release(0), False
        begin = len(self._held) - len(text)
        for offset, character in enumerate(text):
            matched = self._advance(character)
            if matched and allow_stop:
                self.hit = True
                released, self._held = self._held[: begin + offset + 1 - matched], ""
                return released, True
        return self._release(max(self._state)), False

    def finish(self) -> str:
        """The end of the text: what was held back is no stop string after all."""
        return "" if self.hit else self._release(0)

    def _release(self, keep: int) -> str:
        end = len(self._held) - keep
        released, self._held = self._held[:end], self._held[end:]
        return released

    def _advance(self, character: str) -> int:
        """Move every automaton by one character; the length of the longest string completed."""
        matched = 0
        for index, (text, failure) in enumerate(zip(self._stop, self._failure, strict=True)):
            state = self._state[index]
            while state and text[state] != character:
                state = failure[state - 1]
            if text[state] == character:
                state += 1
            if state == len(text):
                matched = max(matched, state)
                state = failure[state - 1]
            self._state[index] = state
        return matched


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

    def finish(self) -> None:
        """No more tokens: release what was held back."""
        released, _ = self._scanner.feed(self._detokenizer.finish(), allow_stop=False)
        self._ready += [released, self._scanner.finish()]

    def take(self) -> str:
        """Text released since the last take; the takes joined are the whole text."""
        text = "".join(self._ready)
        self._ready.clear()
        return text


def _failure_table(text: str) -> tuple[int, ...]:
    """table[i]: length of the longest proper prefix of text[:i+1] that is also its suffix."""
    table = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = table[length - 1]
        if text[index] == text[length]:
            length += 1
        table[index] = length
    return tuple(table)
