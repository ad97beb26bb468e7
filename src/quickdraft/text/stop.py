"""Stop strings in a stream of text.

StopScanner releases text as soon as it cannot be part of a stop string, and never releases a stop
string. The result does not depend on how the text was cut: the stop string that ends first wins,
and among those ending together the longest. Knows nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


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
        self.hit: str | None = None  # the stop string that ended the text

    def feed(self, text: str, *, allow_stop: bool = True) -> tuple[str, bool]:
        """(text safe to release, a stop string is complete). After a hit everything is dropped.

        With `allow_stop` False a stop string that ends in `text` is ordinary text.
        """
        if self.hit is not None or not text:
            return "", self.hit is not None
        self._held += text
        if not self._stop:
            return self._release(0), False
        begin = len(self._held) - len(text)
        for offset, character in enumerate(text):
            matched = self._advance(character)
            if matched and allow_stop:
                end = begin + offset + 1
                released, self.hit, self._held = (
                    self._held[: end - matched],
                    self._held[end - matched : end],
                    "",
                )
                return released, True
        return self._release(max(self._state)), False

    def finish(self) -> str:
        """The end of the text: what was held back is no stop string after all."""
        return "" if self.hit is not None else self._release(0)

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
