"""DiskTier: the prefix cache's second level. Restores what memory lacks, writes what disk lacks.

Joins the index and the pool with a DiskStore, which knows only tokens and blocks. Writing is cut
into pieces of one segment each, for the engine to take when it has nothing else to do; a text that
left memory before its turn came is not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.state.blocks import BlockPool
from quickdraft.state.checkpoints import Checkpoints
from quickdraft.state.persist import DiskStore
from quickdraft.state.prefix import Match, PrefixIndex
from quickdraft.state.segment_file import SEGMENT_BLOCKS
from quickdraft.state.sequence import blocks_for
from quickdraft.state.tokens import TOKEN_BYTES

MAX_QUEUED: Final = 64  # texts waiting to be written; the oldest are forgotten first


class DiskTier:
    """What lies between one index over one pool and one store."""

    def __init__(
        self, index: PrefixIndex, pool: BlockPool, store: DiskStore, checkpoints: Checkpoints | None
    ) -> None:
        self._index, self._pool, self._store, self._checkpoints = index, pool, store, checkpoints
        self._queue: dict[bytes, None] = {}

    def restore(self, text: bytes, limit: int, match: Match, resumed: int) -> bool:
        """Bring tokens that `match` lacks, up to `limit`, into memory.

        True when it tried: whatever came of it, room was made and `match` may name evicted blocks.
        """
        on_disk = min(self._store.match(_tokens(text)), limit)
        if on_disk <= match.tokens:
            return False
        held = [node.block for node in match.path]
        for block in held:
            self._pool.share(block)  # making room must not evict what the restored tokens follow
        try:
            count = min(blocks_for(on_disk) - len(held), self._pool.free)
            if count:
                self._read(text[: on_disk * TOKEN_BYTES], match, count)
            return count > 0
        finally:
            self._pool.give_back(held)

    def _read(self, text: bytes, match: Match, count: int) -> None:
        first = len(match.path)
        blocks = self._pool.take(count)
        try:
            count = self._store.restore(_tokens(text), first, blocks)
            parent = match.path[-1] if match.path else self._index.root
            start, end = first * BLOCK_TOKENS * TOKEN_BYTES, (first + count) * BLOCK_TOKENS * TOKEN_BYTES
            _, held = self._index.publish(parent, text[start:end], blocks[:count])
            blocks[:count] = held
        finally:
            self._pool.give_back(blocks)

    def queue(self, text: bytes) -> None:
        """These tokens are in memory, committed; write them when there is time."""
        self._queue.pop(text, None)
        self._queue[text] = None
        if len(self._queue) > MAX_QUEUED:
            del self._queue[next(iter(self._queue))]

    def write_next(self) -> bool:
        """Write at most one segment; False when nothing is left to write."""
        while self._queue and not self._store.not_writing:
            text = next(iter(self._queue))
            if self._write_next(text):
                return True
            del self._queue[text]
        self._queue.clear()
        return False

    def _write_next(self, text: bytes) -> bool:
        tokens = _tokens(text)
        start = self._store.missing(tokens)
        nodes = list(self._index.path(text))[start // BLOCK_TOKENS :][:SEGMENT_BLOCKS]
        if start == len(tokens) or not nodes:
            return False
        return self._store.write(tokens[: nodes[-1].end], start, [node.block for node in nodes])

    @property
    def counters(self) -> Mapping[str, int]:
        """The store's counters that are numbers."""
        return {name: value for name, value in asdict(self._store.counters).items() if isinstance(value, int)}

    @property
    def not_writing(self) -> str:
        """Why nothing is written; empty while it is."""
        return self._store.not_writing

    def close(self) -> None:
        """Let the folder go."""
        self._store.close()


def _tokens(text: bytes) -> NDArray[np.int32]:
    return np.frombuffer(text, "<i4")
