"""Context lookup: the continuation of the longest earlier occurrence of what was just written.

For match lengths 12 down to 3 the most recent earlier occurrence of the current suffix, in the
request's own tokens (prompt and output), is found in O(1) per token: one dictionary per length,
keyed by the exact tokens (packed into one integer, so there are no collisions), holding where the
latest occurrence ended. How much longer than 12 a match is, is counted then. The proposal is what
followed; where it runs into the end of the text it goes on periodically, reading its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quickdraft.speculate.draft import Draft, SequenceView, Verdict

MIN_MATCH, MAX_MATCH = 3, 12  # that are looked for
LONGEST_MATCH = 64  # that is told from a longer one
_TOKEN_BITS = 32


class LookupIndex:
    """Suffix index over one growing token sequence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._suffix = 0  # the last MAX_MATCH tokens, the last one lowest
        # per length: its mask over a packed suffix, and where the latest findable occurrence ended
        self._ends: list[tuple[int, dict[int, int]]] = [
            ((1 << (_TOKEN_BITS * n)) - 1, {}) for n in range(MIN_MATCH, MAX_MATCH + 1)
        ]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens, ids in 0..2^32-1; n-grams that end before the new last token become findable."""
        mask = self._ends[-1][0]
        end, suffix = len(self.tokens), self._suffix
        for token in tokens:
            # what ended at the old last token now has a token after it
            for length, (low, ends) in enumerate(self._ends, MIN_MATCH):
                if end < length:
                    break
                ends[suffix & low] = end
            suffix = (suffix << _TOKEN_BITS | token) & mask
            end += 1
        self._suffix = suffix
        self.tokens += tokens

    def find(self) -> tuple[int, int]:
        """(match length, position of the continuation), or (0, 0) without a match."""
        best = (0, 0)
        for length, (low, ends) in enumerate(self._ends, MIN_MATCH):
            if length > len(self.tokens):
                break
            end = ends.get(self._suffix & low)
            if end is None:
                break  # a longer suffix cannot occur where this one does not
            best = (length, end)
        return best

    def extent(self, length: int, end: int) -> int:
        """How many tokens before `end` are those at the end of the text, at most LONGEST_MATCH; `length` of
        them are known to be."""
        tokens, last = self.tokens, len(self.tokens)
        most = min(end, LONGEST_MATCH)
        while length < most and tokens[end - 1 - length] == tokens[last - 1 - length]:
            length += 1
        return length

    def continuation(self, start: int, count: int) -> tuple[int, ...]:
        """`count` tokens from position `start`, periodic past the end of the text."""
        known = self.tokens[start : start + count]
        period = len(self.tokens) - start
        return tuple(known[i] if i < period else known[i % period] for i in range(count))


class LookupDrafter:
    """speculate.draft.Drafter over one index per request; requests never see each other's text."""

    source = "lookup"

    def __init__(self) -> None:
        self._indexes: dict[str, LookupIndex] = {}

    def propose(self, view: SequenceView, budget: int) -> Draft:
        """The continuation of the longest match, `budget` tokens of it; empty without a match."""
        index = self._indexes.get(view.request_id)
        if index is None:
            index = self._indexes[view.request_id] = LookupIndex()
        index.extend(view.tokens[len(index.tokens) :])
        length, start = index.find()
        if not length or budget <= 0:
            return Draft()
        if length == MAX_MATCH:
            length = index.extent(length, start)
        tokens = index.continuation(start, budget)
        return Draft(tokens, self.source, (), length, in_output=start >= view.prompt_length)

    def observe(self, view: SequenceView, verdict: Verdict, taps: Any) -> None:
        """Nothing to learn: the tokens themselves are the state."""

    def forget(self, request_id: str) -> None:
        """Drop the request's index."""
        self._indexes.pop(request_id, None)
