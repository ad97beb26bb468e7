"""THE definition of decoding: plain decoding, run over logits rows that were computed ahead.

A draft only decides which rows exist. There is no other path: with no draft this is the plain
loop, one row at a time, so every processor and stop rule is exact under speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quickdraft.speculate.choose import LogitsRow
from quickdraft.speculate.draft import Verdict
from quickdraft.types import FinishReason


class Walker(Protocol):
    """The part of a request that decoding needs."""

    def choose(self, row: LogitsRow) -> int:
        """The next token, given everything pushed so far."""

    def push(self, token: int) -> FinishReason | None:
        """Emit the token; the reason when the request ends with it."""


def walk(request: Walker, rows: Sequence[LogitsRow], draft: Sequence[int]) -> Verdict:
    """Emit tokens while rows last: row 0 follows the known tokens, row i + 1 follows draft[i].

    len(rows) == len(draft) + 1. Emits at least one token and at most len(rows).
    """
    assert len(rows) == len(draft) + 1, f"{len(rows)} rows for {len(draft)} drafted tokens"
    emitted: list[int] = []
    for index, row in enumerate(rows):
        token = request.choose(row)
        finish = request.push(token)
        emitted.append(token)
        if finish is not None or index == len(draft) or token != draft[index]:
            break
    return Verdict(tuple(emitted), len(draft), finish)
