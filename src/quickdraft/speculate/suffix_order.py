"""SuffixOrder: where in a text the last tokens of another one occur, for the longest run of them.

The positions of a text are kept in the order of the tokens before them, read backwards. So the
positions that share most of the last tokens lie side by side, and one binary search finds them. The
text is bytes: ids of 4 bytes, big-endian and last token first, whose slices compare as their tokens
do. It may be a memory map (speculate/corpus.py) or in memory (speculate/prediction.py). Pure.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

LONGEST_MATCH: Final = 32  # tokens that positions are ordered by; no match is longer
ID_BYTES: Final = 4
SEPARATOR: Final = 2**32 - 1  # stands between two texts: no id, so no match and no draft crosses it
Order = NDArray[np.uint32]


class Bytes(Protocol):
    """bytes or a memory map."""

    def __getitem__(self, index: slice, /) -> bytes: ...


def backwards(tokens: Sequence[int] | NDArray[np.uint32]) -> bytes:
    """Ids in 0..2^32-1 as the text of a SuffixOrder."""
    return np.asarray(tokens, np.uint32)[::-1].astype(">u4").tobytes()


def sorted_positions(text: bytes) -> Order:
    """The order of a text: every place in it that has a token on both sides, separators not counted.

    By doubling: places sorted by their next n tokens are sorted by 2n through the rank of the place n on.
    """
    ids = np.frombuffer(text, ">u4").astype(np.int64)
    count = len(ids)
    rank = np.unique(ids, return_inverse=True)[1].astype(np.int64) + 1  # 0: the text is at its end
    width = 1
    order: NDArray[np.int64] = np.argsort(rank, kind="stable")
    while width < LONGEST_MATCH:
        behind = np.zeros(count, np.int64)
        behind[: max(0, count - width)] = rank[width:]
        key = rank * (count + 1) + behind
        order = np.argsort(key, kind="stable")
        rank[order] = np.cumsum(np.diff(key[order], prepend=-1) != 0)
        width *= 2
    usable = (ids != SEPARATOR) & (np.roll(ids, 1) != SEPARATOR) & (np.arange(count) > 0)
    places: Order = order[usable[order]].astype(np.uint32)
    return places


class SuffixOrder:
    """Searches one text of `count` tokens: `text[start:]` is as `backwards` makes it, `order` as
    `sorted_positions` does. A wrong order gives bad matches, never a place outside of the text."""

    def __init__(self, text: Bytes, count: int, order: Order, start: int = 0) -> None:
        self._text, self._count, self._order, self._start = text, count, order, start

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(match length, a position whose preceding tokens are the last ones of `tokens`), at the longest
        match; (0, 0) without one. What follows there is the token at the position."""
        key = backwards(tokens[-LONGEST_MATCH:])
        rank = bisect_left(range(len(self._order)), key, key=self._before)
        near = range(max(0, rank - 1), min(len(self._order), rank + 1))
        length, found = max(((_common(key, self._before(one)), -one) for one in near), default=(0, 0))
        return (length, self._position(-found)) if length else (0, 0)

    def all_of(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        """Every position that follows exactly these 1 to LONGEST_MATCH tokens, in no particular order."""
        key, ranks = backwards(tokens), range(len(self._order))
        first = bisect_left(ranks, key, key=lambda rank: self._before(rank)[: len(key)])
        last = bisect_right(ranks, key, key=lambda rank: self._before(rank)[: len(key)])
        return self._count - self._order[first:last].astype(np.int64)

    def following(self, position: int, count: int) -> tuple[int, ...]:
        """At most `count` tokens from a position on: fewer where the text ends or another begins."""
        place = self._count - position
        count = min(count, place)
        ids = struct.unpack(f">{count}I", self._slice(place - count, place))[::-1]
        return ids[: ids.index(SEPARATOR)] if SEPARATOR in ids else ids

    def _position(self, rank: int) -> int:
        return self._count - int(self._order[rank])

    def _before(self, rank: int) -> bytes:
        """The tokens before a position, last one first."""
        place = int(self._order[rank])
        return self._slice(place, min(self._count, place + LONGEST_MATCH))

    def _slice(self, first: int, last: int) -> bytes:
        return self._text[self._start + ID_BYTES * first : self._start + ID_BYTES * last]


def _common(one: bytes, other: bytes) -> int:
    """How many of the first tokens are equal."""
    size = min(len(one), len(other))
    differing = int.from_bytes(one[:size], "big") ^ int.from_bytes(other[:size], "big")
    return (8 * size - differing.bit_length()) // (8 * ID_BYTES)
