"""Follow: which models that draft follow the text of one request, as following takes time too.

A model drafts from states of its own, which are made of every token that is kept. Where it has not been the
best choice for long, or its credit is used up, it is left behind; when it would be again, or is due to be
tried, it follows again, and may draft after WARM tokens. Knows gains and credits only as answers. Pure.
"""

from __future__ import annotations

from typing import Final

WARM: Final = 16  # tokens to follow before a draft rests on anything
IDLE: Final = 64  # tokens without being the best choice


class Follow:
    """Of one request; at first every model follows, as its prompt was read with it."""

    __slots__ = ("_emitted", "_since", "_wanted")

    def __init__(self) -> None:
        self._emitted = 0
        self._since: dict[str, int | None] = {}  # by source: since when, None: left behind
        self._wanted: dict[str, int] = {}  # when it was last the best choice

    def sources(self) -> list[str]:
        """Those that follow."""
        return [source for source, since in self._since.items() if since is not None]

    def follows(self, source: str) -> bool:
        """Whether the model follows."""
        return self._since.get(source, 0) is not None

    def ready(self, source: str) -> bool:
        """Whether it may draft."""
        since = self._since.setdefault(source, -WARM)
        return since is not None and self._emitted - since >= WARM

    def emitted(self, tokens: int) -> None:
        """The text went on."""
        self._emitted += tokens

    def settle(self, source: str, wanted: bool, can_pay: bool) -> None:
        """In this step the model is `wanted`, as it would gain most or is due to be tried; `can_pay`: its
        credit lasts for that."""
        if wanted:
            self._wanted[source] = self._emitted
        follows = self.follows(source)
        if not can_pay:
            if follows:
                self._since[source] = None
        elif not follows and wanted:
            self._since[source] = self._emitted
        elif follows and self._emitted - self._wanted.get(source, 0) >= IDLE:
            self._since[source] = None
