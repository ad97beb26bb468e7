"""Constraint: what may be written, beyond what a model would write by itself. Protocols, and how two join.

A grammar, a limit on thinking, a tool call that must come: each is a Constraint, a value handed to the engine
beside a prompt, and each request starts its own Matcher from it. A matcher stands after the tokens emitted so
far and answers for the next one only from them, so drafts cannot change what it says. How it knows is the
business of whoever implements it; nothing here knows a grammar, a text or a library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from quickdraft.errors import RequestError

FORCED: Final = "forced"  # the draft source: tokens that no choice could replace


class ConstraintFailed(RequestError):
    """A matcher cannot go on; the request it belongs to ends with this error."""


class Matcher(Protocol):
    """Where one request stands in its constraint. Every method may raise ConstraintFailed."""

    @property
    def active(self) -> bool:
        """Whether it may forbid a token now; False where the next token is free."""

    def allows(self, token: int) -> bool:
        """Whether `token` may come next; the same answer as `allowed()[token]`, often far sooner."""

    def allowed(self) -> NDArray[np.bool_]:
        """Which ids may come next; ids beyond its length may not. Read-only."""

    def forced(self, most: int) -> Sequence[int]:
        """At most `most` tokens that must come next, in this order: after each, the next is the only one
        allowed. Perhaps fewer than there are; empty where there is a choice."""

    def fitting(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, from the first on, could be emitted in this order; rather too many than too
        few, where to know costs more than to verify."""

    def push(self, token: int) -> None:
        """`token` was emitted; it was allowed."""

    def copy(self) -> Matcher:
        """Another one that stands here; what is pushed to it changes nothing in this one."""


class Constraint(Protocol):
    """What many requests may share: they start from it, and it never changes."""

    def start(self) -> Matcher:
        """A matcher before the first token."""


class Joined:
    """Both of two constraints. Where the first forces tokens, the second must allow them."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Constraint, second: Constraint) -> None:
        self._first, self._second = first, second

    def start(self) -> Matcher:
        return _Both(self._first.start(), self._second.start())


class _Both:
    __slots__ = ("_first", "_second")

    def __init__(self, first: Matcher, second: Matcher) -> None:
        self._first, self._second = first, second

    @property
    def active(self) -> bool:
        return self._first.active or self._second.active

    def allows(self, token: int) -> bool:
        return self._first.allows(token) and self._second.allows(token)

    def allowed(self) -> NDArray[np.bool_]:
        if not self._first.active:
            return self._second.allowed()
        if not self._second.active:
            return self._first.allowed()
        first, second = self._first.allowed(), self._second.allowed()
        both = min(len(first), len(second))
        return first[:both] & second[:both]

    def forced(self, most: int) -> Sequence[int]:
        for one, other in ((self._first, self._second), (self._second, self._first)):
            tokens = one.forced(most)
            if tokens:
                return tokens[: other.fitting(tokens)]
        return ()

    def fitting(self, tokens: Sequence[int]) -> int:
        return self._first.fitting(tokens[: self._second.fitting(tokens)])

    def push(self, token: int) -> None:
        self._first.push(token)
        self._second.push(token)

    def copy(self) -> Matcher:
        return _Both(self._first.copy(), self._second.copy())
