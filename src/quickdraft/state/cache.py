"""PrefixCache: resumes sequences from what earlier ones computed, and keeps what they leave.

It joins the index (which tokens are where), the block pool, the buffers (`copy_block`) and the disk
tier, if there is one. Only committed tokens are ever published. Knows no request: a sequence is its
state, its tokens, and a cursor, the index node up to which it is published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quickdraft.errors import CapacityError
from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.state.blocks import BlockPool
from quickdraft.state.disk_tier import DiskTier
from quickdraft.state.persist import DiskStore
from quickdraft.state.prefix import Match, Node, PrefixIndex
from quickdraft.state.sequence import SequenceState, blocks_for
from quickdraft.state.tokens import token_bytes
from quickdraft.types import CacheReport


class PrefixCache:
    """The prefix cache of one pool. `copy_block(source, target)` copies a block of all layers."""

    def __init__(
        self, pool: BlockPool, copy_block: Callable[[int, int], None], store: DiskStore | None = None
    ) -> None:
        self.index = PrefixIndex(pool)
        self.disk = DiskTier(self.index, pool, store) if store is not None else None
        self._pool, self._copy_block = pool, copy_block

    def shared_blocks(self, tokens: Sequence[int]) -> int:
        """Blocks of the cached prefix that other sequences hold already: resuming takes none for them."""
        match = self.index.match(token_bytes(tokens), len(tokens) - 1)
        return sum(self._pool.owners(node.block) > 0 for node in match.path)

    def attach(self, state: SequenceState, tokens: Sequence[int]) -> tuple[Node, CacheReport]:
        """Resume the empty `state` from the longest cached prefix of all tokens but the last.

        Full blocks are shared; the block where the texts part is copied, if there is room for that.
        """
        text, limit = token_bytes(tokens), len(tokens) - 1
        match = self.index.match(text, limit)
        in_memory = match.tokens
        if in_memory < limit and self.disk is not None and self.disk.restore(text, limit, match):
            match = self.index.match(text, limit)
        self.index.touch(match)
        cursor = match.path[-1] if match.path else self.index.root
        blocks = [node.block for node in match.path]
        for block in blocks:
            self._pool.share(block)
        copied = self._copied(match.partial.block) if match.partial else []
        cached = match.tokens if copied or not match.partial else cursor.end
        state.resume(blocks + copied, cached)
        return cursor, _report(match, cached, max(0, cached - in_memory), tokens)

    def publish(self, cursor: Node, state: SequenceState, tokens: Sequence[int], *, partial: bool) -> Node:
        """Make the committed tokens after `cursor` available to others; the new cursor.

        Without `partial` only full blocks, as the sequence still writes to its last one; with it the
        sequence is about to leave, and all its tokens are queued for the disk.
        """
        if partial and state.committed and self.disk is not None:
            self.disk.queue(token_bytes(tokens[: state.committed]))
        last = state.committed if partial else state.committed // BLOCK_TOKENS * BLOCK_TOKENS
        if last <= cursor.end:
            return cursor
        first = cursor.end // BLOCK_TOKENS
        blocks = state.block_table[first : blocks_for(last)].tolist()
        cursor, held = self.index.publish(cursor, token_bytes(tokens[cursor.end : last]), blocks)
        state.exchange(first, held)
        return cursor

    def clear(self) -> None:
        """Forget everything that no sequence uses now."""
        self.index.clear()

    def _copied(self, block: int) -> list[int]:
        self._pool.share(block)  # making room for the copy must not evict its source
        try:
            copied = self._pool.take(1)
            self._copy_block(block, copied[0])
        except CapacityError:
            copied = []
        finally:
            self._pool.give_back([block])
        return copied


def _report(match: Match, cached: int, restored: int, tokens: Sequence[int]) -> CacheReport:
    if match.reason == "none" and cached == match.tokens:
        return CacheReport(cached, restored, "none")
    reason = match.reason if cached == match.tokens else "evicted"  # no room to copy the last block
    return CacheReport(cached, restored, reason, tokens[cached], match.cached_token)
