"""DiskTier: the prefix cache's second level. Restores what memory lacks, writes what disk lacks.

Joins the index and the pool with a DiskStore, which knows only tokens, blocks and slots. Writing is
cut into pieces of one segment or one recurrent state, for the engine to take when it has nothing else
to do; a text that left memory before its turn came is not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.state.blocks import BlockPool
from quickdraft.state.checkpoints import Checkpoint, Checkpoints
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
        # texts to write; of one whose blocks are written the checkpoints that are not, the last one last
        self._queue: dict[bytes, list[Checkpoint] | None] = {}

    def shared(self, text: bytes, limit: int) -> int:
        """How many leading tokens of `text` are on disk, `limit` at most."""
        return min(self._store.match(_tokens(text)), limit)

    def restore(self, text: bytes, limit: int, match: Match, resumed: int) -> bool:
        """Bring tokens that `match` lacks, up to `limit`, into memory; with recurrent layers the last
        state beyond `resumed` and the tokens before it.

        True when it tried: whatever came of it, room was made and `match` may name evicted blocks.
        """
        if self._checkpoints is None:
            return self._restore_blocks(text, limit, match)
        tried, tokens = False, _tokens(text)
        while (position := self._store.last_state(tokens, limit)) > resumed:
            limit = position - 1
            match = self._index.match(text, position)
            if match.tokens < position and blocks_for(position) - len(match.path) <= self._pool.free:
                tried = self._restore_blocks(text, position, match) or tried
                match = self._index.match(text, position)
            if match.tokens == position:
                tried = True
                if self._restore_state(self._checkpoints, match, text[: position * TOKEN_BYTES]):
                    break
        return tried

    def _restore_state(self, checkpoints: Checkpoints, match: Match, text: bytes) -> bool:
        """Read the state after all of `text`, whose KV is in memory, into a checkpoint."""
        slot = checkpoints.take()
        if slot is None:
            return False
        if not self._store.restore_state(_tokens(text), slot):
            checkpoints.give_back(slot)
            return False
        node = match.path[-1] if match.path else self._index.root
        checkpoints.put(node, text[node.end * TOKEN_BYTES :], slot, likely=True)
        return True

    def _restore_blocks(self, text: bytes, limit: int, match: Match) -> bool:
        on_disk = self.shared(text, limit)
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
        """Write at most one segment or one state; False when nothing is left to write."""
        while self._queue and not self._store.not_writing:
            text = next(iter(self._queue))
            if self._write_next(text) or self._write_state(text):
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

    def _write_state(self, text: bytes) -> bool:
        if self._checkpoints is None:
            return False
        waiting = self._queue[text]
        if waiting is None:
            written = self._store.match(_tokens(text))
            waiting = [each for each in self._checkpoints.along(text) if each.position <= written]
            waiting = self._queue[text] = waiting[::-1]
        while waiting:
            one = waiting.pop()
            if one.slot >= 0 and self._store.last_state(_tokens(text), one.position) < one.position:
                return self._store.write_state(_tokens(text), one.position, one.slot)
        return False

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
