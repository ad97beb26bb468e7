"""What a parser of tool calls gives out, and what it must keep to.

A parser reads the text of an answer and tells calls from text. What has come out after some text
depends on that text only, not on how it was cut. A call comes out as soon as it is certain to be
one: its name, then its arguments in pieces, then its end. The pieces of a call that has ended are
a JSON object when joined. A call whose end never comes was cut off, or the model broke its form:
its pieces are the beginning of an object, and what broke it is text. Text that is no call comes out
as text, where it stands; nothing is lost. Every character is looked at a bounded number of times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CallName:
    """A call begins; what follows of calls is this one's, until its end or the next name."""

    name: str


@dataclass(frozen=True, slots=True)
class CallText:
    """More of the arguments' JSON, non-ASCII characters as they are."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments are complete."""


CallPiece = CallName | CallText | CallEnd


class CallParser(Protocol):
    """Text in; pieces of text and of calls out, in order."""

    def feed(self, text: str) -> list[str | CallPiece]:
        """What `text` makes certain."""

    def finish(self) -> list[str | CallPiece]:
        """The end of the text: what was held back is no call after all."""
