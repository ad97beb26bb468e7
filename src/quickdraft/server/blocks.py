"""An answer as a list of blocks: reasoning, text and tool calls, where they stand.

The Responses and Anthropic APIs both show an answer so. A block grows by pieces and is closed when
another kind of part follows; which blocks come out depends on the parts only, never on how a stream
cut them. Knows nothing of either API.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from quickdraft.server.answer import AnswerPart, CallArguments, CallBegun
from quickdraft.text.answer_parts import Content, Reasoning

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """One block while it grows; of a call `id` and `name`, and its arguments as text."""

    index: int
    kind: Kind
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Opened:
    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    block: Block
    piece: str


@dataclass(frozen=True, slots=True)
class Closed:
    block: Block


Step = Opened | Grown | Closed


class Blocks:
    """Parts in, steps of blocks out."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    @classmethod
    def of(cls, parts: Iterable[AnswerPart]) -> Sequence[Block]:
        """The blocks of a whole answer."""
        blocks = cls()
        blocks.feed(parts)
        return blocks.all

    def feed(self, parts: Iterable[AnswerPart]) -> list[Step]:
        """What these parts do."""
        steps: list[Step] = []
        for part in parts:
            match part:
                case Reasoning(text):
                    steps += self._grow("reasoning", text)
                case Content(text):
                    steps += self._grow("text", text)
                case CallBegun(_, id_, name):
                    steps += self._close()
                    steps += self._begin("call", id_, name)
                case CallArguments(_, text):
                    steps += self._grow("call", text)
        return steps

    def finish(self) -> list[Step]:
        """The end of the answer."""
        return self._close()

    def _grow(self, kind: Kind, piece: str) -> list[Step]:
        steps: list[Step] = []
        if self._open is None or self._open.kind != kind:
            steps += self._close()
            steps += self._begin(kind)
        assert self._open is not None, "begun above"
        self._open.pieces.append(piece)
        return [*steps, Grown(self._open, piece)]

    def _begin(self, kind: Kind, id_: str = "", name: str = "") -> list[Step]:
        self._open = Block(len(self.all), kind, id_, name)
        self.all.append(self._open)
        return [Opened(self._open)]

    def _close(self) -> list[Step]:
        block, self._open = self._open, None
        return [Closed(block)] if block is not None else []
