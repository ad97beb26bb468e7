"""A limit on thinking: the think block of an answer is closed after so many tokens of it.

Counts the tokens that stand in the block, neither its opening nor its closing; where the limit is reached
the closing tokens are the only ones allowed, one after the other. Knows the block by the same splitter that
tells reasoning from content, so that what is counted here is what a client sees there.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import BadParameter
from quickdraft.text.detokenizer import Detokenizer
from quickdraft.text.markup import END_THINK
from quickdraft.text.reasoning import ReasoningSplitter
from quickdraft.text.tokenizer import Tokenizer

_CLOSING = f"\n{END_THINK}\n\n"  # as the templates of such models write it


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """At most `tokens` >= 0 tokens of thinking. `inside`: the prompt ends with an open think block;
    `tool_calls`: a tool call ends it too."""

    tokens: int
    tokenizer: Tokenizer
    inside: bool
    tool_calls: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or isinstance(self.tokens, bool) or self.tokens < 0:
            raise BadParameter(
                "thinking_budget", got=repr(self.tokens)[:80], expected="an integer, 0 or more"
            )

    def start(self) -> BudgetMatcher:
        closing = tuple(self.tokenizer.encode(_CLOSING, special=True, add_bos=False))
        splitter = ReasoningSplitter(inside=self.inside, tool_calls=self.tool_calls)
        return BudgetMatcher(
            self.tokens, closing, splitter, Detokenizer(self.tokenizer), self.tokenizer.vocabulary_size
        )


class BudgetMatcher:
    """speculate.constraint.Matcher: free until the limit, then closing token by closing token, then free."""

    def __init__(
        self,
        left: int,
        closing: tuple[int, ...],
        splitter: ReasoningSplitter,
        detokenizer: Detokenizer,
        vocabulary_size: int,
    ) -> None:
        self._left, self._closing = left, closing
        self._splitter, self._detokenizer = splitter, detokenizer
        self._vocabulary_size = vocabulary_size
        self._done = False

    @property
    def active(self) -> bool:
        return bool(self._due)

    @property
    def _due(self) -> tuple[int, ...]:
        """Closing tokens that must come now."""
        return self._closing if not self._done and self._splitter.thought and self._left <= 0 else ()

    def allows(self, token: int) -> bool:
        return not self._due or token == self._due[0]

    def allowed(self) -> NDArray[np.bool_]:
        if not self._due:
            return np.ones(self._vocabulary_size, np.bool_)
        mask = np.zeros(self._vocabulary_size, np.bool_)
        mask[self._due[0]] = True
        return mask

    def forced(self, most: int) -> Sequence[int]:
        return self._due[:most]

    def fitting(self, tokens: Sequence[int]) -> int:
        if self._done:
            return len(tokens)
        twin = self.copy()
        for count, token in enumerate(tokens):
            if not twin.allows(token):
                return count
            twin.push(token)
        return len(tokens)

    def push(self, token: int) -> None:
        if self._done:
            return
        if self._due:
            self._closing = self._closing[1:]
            self._done = not self._closing
            return
        counts = self._splitter.thought
        self._splitter.feed(self._detokenizer.push(token))
        self._done = self._splitter.decided
        self._left -= counts and not self._done

    def copy(self) -> BudgetMatcher:
        twin = copy(self)
        twin._splitter, twin._detokenizer = copy(self._splitter), self._detokenizer.copy()
        return twin
