"""PrefixCache: resumes sequences from what earlier ones computed, and keeps what they leave.

It joins the index (which tokens are where), the block pool, the buffers (`copy_block`), with
recurrent layers the checkpoints, and the disk tier, if there is one. Only committed tokens are ever
published. Knows no request: a sequence is its state, its tokens, and a cursor, the index node up to
which it is published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quickdraft.errors import CapacityError
from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.state.blocks import BlockPool
from quickdraft.state.checkpoints import Checkpoint, Checkpoints
from quickdraft.state.disk_tier import DiskTier
from quickdraft.state.persist import DiskStore
from quickdraft.state.prefix import Match, Node, PrefixIndex
from quickdraft.state.sequence import SequenceState, Snapshot, blocks_for
from quickdraft.state.slots import SlotPool
from quickdraft.state.tokens import token_bytes
from quickdraft.types import CacheReport

Earlier = Callable[[int], int]  # a number of tokens -> as many, or fewer


@dataclass(frozen=True, slots=True)
class _Point:
    """Where a sequence can resume: full blocks to share, perhaps one to copy, perhaps a state to copy."""

    tokens: int
    path: tuple[Node, ...]
    partial: Node | None = None
    checkpoint: Checkpoint | None = None


class PrefixCache:
    """The prefix cache of one pool. `copy_block(source, target)` copies a block of all layers; `slots`
    are given for a model with recurrent layers."""

    def __init__(
        self,
        pool: BlockPool,
        copy_block: Callable[[int, int], None],
        store: DiskStore | None = None,
        slots: SlotPool | None = None,
    ) -> None:
        self.index = PrefixIndex(pool)
        self.checkpoints = Checkpoints(self.index, slots) if slots is not None else None
        self.disk = DiskTier(self.index, pool, store, self.checkpoints) if store is not None else None
        self._pool, self._copy_block, self._slots = pool, copy_block, slots

    def shared_blocks(self, tokens: Sequence[int], earlier: Earlier | None = None) -> int:
        """Blocks that other sequences hold already and `attach` would share: it takes none for them."""
        text, limit = token_bytes(tokens), len(tokens) - 1
        match = self.index.match(text, limit)
        point = self._point(match, text, limit)
        if earlier is not None:
            point = self._point(match, text, earlier(point.tokens))
        return sum(self._pool.owners(node.block) > 0 for node in point.path)

    def attach(
        self, state: SequenceState, tokens: Sequence[int], earlier: Earlier | None = None
    ) -> tuple[Node, CacheReport]:
        """Resume the empty `state` from the longest cached prefix of all tokens but the last; without
        recurrent layers perhaps `earlier(its end)`, the rest of it being computed again.

        Full blocks are shared; the block where the texts part is copied, if there is room for that.
        With recurrent layers the state of the last checkpoint before that point is copied into the
        slot, and what is cached beyond it has to be computed again.
        """
        text, limit = token_bytes(tokens), len(tokens) - 1
        match = self.index.match(text, limit)
        point = self._point(match, text, limit)
        in_memory = point.tokens
        if in_memory < limit and self.disk is not None and self.disk.restore(text, limit, match, in_memory):
            match = self.index.match(text, limit)
            point = self._point(match, text, limit)
        self.index.touch(match)
        found = point.tokens
        if earlier is not None:
            assert self.checkpoints is None, "a recurrent state is resumed where it is"
            point = self._point(match, text, earlier(found))
        again = found - point.tokens
        while (blocks := self._blocks(point)) is None:
            point, again = self._point(match, text, len(point.path) * BLOCK_TOKENS), 0
        if point.checkpoint is not None:
            assert self.checkpoints is not None and self._slots is not None and state.slot >= 0
            self.checkpoints.touch(point.checkpoint)
            self._slots.storage.copy(point.checkpoint.slot, state.slot)
        state.resume(blocks, point.tokens)
        cursor = point.path[-1] if point.path else self.index.root
        shared = match.tokens
        if self.checkpoints is not None and self.disk is not None and shared < limit:
            shared = max(shared, self.disk.shared(text, limit))  # KV beyond the last state stays there
        cached = point.tokens + again
        report = self._report(match, shared, cached, max(0, cached - in_memory), tokens)
        return cursor, replace(report, cached_tokens=point.tokens, again_tokens=again)

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
        if state.snapshots:
            self._put(cursor, state, tokens, last)
        return cursor

    def checkpoint(self, cursor: Node, state: SequenceState, tokens: Sequence[int], *, likely: bool) -> None:
        """Keep a copy of the recurrent state after the committed tokens, which are published as far as
        they can be; others find it once all of them are.

        `likely`: a later text may well go on from here. Without room nothing is kept.
        """
        assert self.checkpoints is not None and self._slots is not None, "no recurrent layers"
        position = state.committed
        tail = token_bytes(tokens[cursor.end : position])
        if not position or self.checkpoints.at(cursor, tail) is not None:
            return
        if any(snapshot.position == position for snapshot in state.snapshots):
            return
        slot = self.checkpoints.take()
        if slot is None:
            return
        state.settle()
        self._slots.storage.copy(state.slot, slot)
        state.snapshots.append(Snapshot(position, slot, likely))
        published = not tail or any(key.startswith(tail) for key in cursor.children)
        if published:
            self._put(cursor, state, tokens, position)

    def clear(self) -> None:
        """Forget everything that no sequence uses now."""
        if self.checkpoints is not None:
            self.checkpoints.clear()
        self.index.clear()

    def _put(self, cursor: Node, state: SequenceState, tokens: Sequence[int], last: int) -> None:
        """Hang the snapshots up to `last` tokens, all of which are published, into the index."""
        assert self.checkpoints is not None
        for snapshot in [each for each in state.snapshots if each.position <= last]:
            state.snapshots.remove(snapshot)
            node = cursor
            while node.end > snapshot.position:
                assert node.parent is not None, "the root is before every position"
                node = node.parent
            tail = token_bytes(tokens[node.end : snapshot.position])
            self.checkpoints.put(node, tail, snapshot.slot, likely=snapshot.likely)

    def _point(self, match: Match, text: bytes, most: int) -> _Point:
        """The last point on the way of `match` where a sequence can resume, `most` tokens at most."""
        checkpoint = None
        tokens = min(match.tokens, most)
        if self.checkpoints is not None:
            checkpoint = self.checkpoints.find(match, text, tokens)
            tokens = checkpoint.position if checkpoint is not None else 0
        full, rest = divmod(tokens, BLOCK_TOKENS)
        partial = None
        if rest:
            partial = match.path[full] if full < len(match.path) else match.partial
        return _Point(tokens, match.path[:full], partial, checkpoint)

    def _blocks(self, point: _Point) -> list[int] | None:
        """The blocks of a point, owned; None when there is no room to copy its last one."""
        blocks = [node.block for node in point.path]
        for block in blocks:
            self._pool.share(block)
        if point.partial is None:
            return blocks
        source = point.partial.block
        self._pool.share(source)  # making room for the copy must not evict its source
        try:
            blocks += self._pool.take(1)
            self._copy_block(source, blocks[-1])
        except CapacityError:
            self._pool.give_back(blocks)
            return None
        finally:
            self._pool.give_back([source])
        return blocks

    def _report(
        self, match: Match, shared: int, cached: int, restored: int, tokens: Sequence[int]
    ) -> CacheReport:
        if cached == shared:
            token = None if match.reason == "none" else tokens[cached]
            return CacheReport(cached, restored, match.reason, token, match.cached_token, shared)
        if self.checkpoints is not None:
            return CacheReport(cached, restored, "no_checkpoint", tokens[cached], tokens[cached], shared)
        # no room to copy the last block
        return CacheReport(cached, restored, "evicted", tokens[cached], match.cached_token, shared)
