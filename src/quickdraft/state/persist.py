"""DiskStore: the prefix cache's files on disk, so that a restart does not read every prompt again.

It reads and writes what the files hold; the formats are in segment_file and state_file, the tree in
segment_tree, the files' room and recency in shelf, the folder and its lock in disk_folder. Used from
one thread, and has none. After it has opened, nothing on the disk can make it raise: a damaged file
is a miss, a failed write ends writing, and both are counted. It knows no request and no model; the
compatibility key stands for all that the bytes of a block depend on beside the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Final

from quickdraft.ops.interface import BLOCK_TOKENS, RecurrentCache
from quickdraft.state.disk_counters import DiskCounters
from quickdraft.state.file_io import passing
from quickdraft.state.segment_file import SEGMENT_BLOCKS, BlockStorage
from quickdraft.state.segment_tree import Leaf, Node, TreePath, lineage, subtree
from quickdraft.state.shelf import Shelf
from quickdraft.state.tokens import TOKEN_BYTES, Tokens, token_bytes

UNPAID_BYTES: Final = 4 << 30


class DiskStore:
    """Segments of KV blocks in a folder, found by the exact tokens they follow; and recurrent states.

    compatibility: 32 bytes; blocks written under another key are never found. budget_bytes: of all
    files in `folder`, other models' included. `states`: the model's recurrent states, if it has any.
    ConfigError when the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        compatibility: bytes,
        storage: BlockStorage,
        budget_bytes: int,
        states: RecurrentCache | None = None,
    ) -> None:
        assert len(compatibility) == 32, "a compatibility key is 32 bytes"
        self._storage, self._budget, self._states = storage, budget_bytes, states
        self._unpaid_bytes = 0
        self._shelf = Shelf(folder, compatibility, storage, budget_bytes, states)
        self._tree = self._shelf.tree

    def close(self) -> None:
        """Let the folder go; may be called again."""
        self._shelf.close()

    # -- what is there ------------------------------------------------------------------------
    def match(self, tokens: Tokens) -> int:
        """How many leading tokens are on disk, down to the token."""
        return self._tree.path(token_bytes(tokens)).tokens

    def missing(self, tokens: Tokens) -> int:
        """The first position, at a block's start, that is not on disk yet; len(tokens) when all are."""
        matched = self.match(tokens)
        return matched if matched == len(tokens) else matched // BLOCK_TOKENS * BLOCK_TOKENS

    def last_state(self, tokens: Tokens, most: int) -> int:
        """The last position, `most` at most, after which the recurrent state is on disk; 0: none."""
        leaves = self._tree.states_along(token_bytes(tokens[:most]))
        return leaves[0].state.position if leaves else 0

    @property
    def not_writing(self) -> str:
        """Why nothing is written any more, or for now; empty while the store writes."""
        if self._shelf.failure:
            return self._shelf.failure
        limit = max(self._budget, UNPAID_BYTES)
        if self._unpaid_bytes > limit:
            return f"{self._unpaid_bytes} bytes were written since one was last read; the limit is {limit}"
        return ""

    @property
    def counters(self) -> DiskCounters:
        """A snapshot; any thread may ask."""
        return replace(
            self._shelf.counters,
            segments=len(self._tree.nodes),
            states=self._tree.state_count,
            bytes_on_disk=self._shelf.bytes,
            not_writing=self.not_writing,
        )

    # -- reading ------------------------------------------------------------------------------
    def restore(self, tokens: Tokens, first_block: int, blocks: Sequence[int]) -> int:
        """Fill `blocks` with token blocks first_block, first_block+1, ...; how many were restored.

        It ends early where the match ends and at the first block that is not whole, whose segment
        is dropped with all below it. Of the last block only the matched tokens are meant, and what
        the memory of blocks beyond the answer holds is undefined.
        """
        assert self._shelf.descriptor >= 0, "the store is closed"
        path = self._tree.path(token_bytes(tokens))
        steps = path.steps[first_block : first_block + len(blocks)]
        restored = 0
        for node, group in groupby(steps, key=lambda step: step[0]):
            run = [index for _, index in group]
            whole = self._read(node, run[0], blocks[restored : restored + len(run)])
            restored += whole
            if whole < len(run):
                break
        self._restored(path, first_block, restored)
        return restored

    def restore_state(self, tokens: Tokens, slot: int) -> bool:
        """Fill `slot` with the state after all of `tokens`; False when it is not there or not whole, and
        then it is dropped, and what the slot holds is undefined."""
        leaf = self._state_of(token_bytes(tokens))
        if leaf is None or self._shelf.states is None:
            return False
        try:
            whole = self._shelf.states.read(leaf.state, slot)
        except OSError as error:
            if passing(error):
                return False
            whole = False
        if not whole:
            self._shelf.remove_state(leaf)
            self._shelf.count(rejected_files=1)
            return False
        nodes = dict.fromkeys(node for node, _ in self._tree.path(token_bytes(tokens)).steps)
        self._shelf.touch_state(leaf, self._shelf.touch(list(nodes)))
        self._unpaid_bytes = 0
        self._shelf.count(restored_states=1, restored_bytes=leaf.size)
        return True

    def _read(self, node: Node, first: int, blocks: Sequence[int]) -> int:
        try:
            whole = self._shelf.segments.read_blocks(node.segment, first, blocks)
        except OSError as error:
            if passing(error):
                return 0
            whole = 0
        if whole < len(blocks):
            for lost in subtree(node):
                self._shelf.remove(lost)
                self._shelf.count(rejected_files=1)
        return whole

    def _restored(self, path: TreePath, first_block: int, blocks: int) -> None:
        if not blocks:
            return
        end = first_block + blocks
        self._shelf.touch([node for node, _ in path.steps[:end]])
        self._unpaid_bytes = 0
        self._shelf.count(
            hits=1,
            restored_tokens=min(path.tokens, end * BLOCK_TOKENS) - first_block * BLOCK_TOKENS,
            restored_bytes=blocks * self._storage.bytes_per_block,
        )

    # -- writing ------------------------------------------------------------------------------
    def write(self, tokens: Tokens, start: int, blocks: Sequence[int]) -> bool:
        """Put tokens[start : start + 16 * len(blocks)] on disk as one segment; True when they are.

        start is a multiple of 16, `blocks` hold the KV of those tokens and are at most 16; what is
        on disk already is not written again. False, with nothing written, when what comes before
        `start` is not on disk, when the budget has no room (room is made by evicting the least
        recently used leaves, but never what comes before `start`), or while the store is not writing.
        """
        assert self._shelf.descriptor >= 0, "the store is closed"
        assert start % BLOCK_TOKENS == 0 and 1 <= len(blocks) <= SEGMENT_BLOCKS
        assert len(tokens) > start + (len(blocks) - 1) * BLOCK_TOKENS, "more blocks than tokens"
        end = min(len(tokens), start + len(blocks) * BLOCK_TOKENS)
        data = token_bytes(tokens[:end])
        path = self._tree.path(data)
        if path.tokens == end:
            return True
        if path.tokens < start or self.not_writing:
            return False
        first = path.tokens // BLOCK_TOKENS
        return self._write(path, first, data, blocks[first - start // BLOCK_TOKENS :])

    def _write(self, path: TreePath, first: int, data: bytes, blocks: Sequence[int]) -> bool:
        parent = path.steps[first - 1][0] if first else None
        own = data[first * BLOCK_TOKENS * TOKEN_BYTES :]
        size = self._shelf.segments.size(len(own) // TOKEN_BYTES)
        before = list(lineage(parent))
        if not self._shelf.make_room(size, before):
            return False
        stamp = self._shelf.touch(before)
        prefix, start = path.key_after(first, self._tree.root), first * BLOCK_TOKENS
        try:
            segment = self._shelf.segments.write(prefix, start, own, blocks, stamp - start)
        except OSError as error:
            return self._write_failed(error)
        node = self._shelf.add(segment, size, stamp - start)
        assert node is not None
        for old in self._tree.superseded(node):
            self._shelf.remove(old)
        self._unpaid_bytes += size
        self._shelf.count(written_segments=1, written_bytes=size)
        return True

    def write_state(self, tokens: Tokens, position: int, slot: int) -> bool:
        """Put the recurrent state after tokens[:position], which is in `slot`, on disk; True when it is.

        False, with nothing written, when those tokens' KV is not on disk, when the budget has no room
        (what is evicted is neither KV nor a later state of `tokens`), or while the store is not writing.
        """
        assert self._shelf.descriptor >= 0 and self._shelf.states is not None, "no states, or closed"
        data = token_bytes(tokens[:position])
        if self._state_of(data) is not None:
            return True
        path = self._tree.path(data)
        if path.tokens < position or self.not_writing:
            return False
        full = position // BLOCK_TOKENS
        prefix, tail = path.key_after(full, self._tree.root), data[full * BLOCK_TOKENS * TOKEN_BYTES :]
        size = self._shelf.states.size(tail)
        way = list(lineage(self._tree.path(token_bytes(tokens)).steps[-1][0]))
        later = [leaf for leaf in self._along(tokens) if leaf.state.position > position]
        if not self._shelf.make_room(size, way, later):
            return False
        used_ns = self._shelf.touch(list(lineage(path.steps[-1][0]))) - position
        try:
            state = self._shelf.states.write(prefix, tail, position, slot, used_ns)
        except OSError as error:
            return self._write_failed(error)
        added = self._shelf.add_state(state, size, used_ns)
        assert added, "a segment holds its tokens, and no state was there"
        self._unpaid_bytes += size
        self._shelf.count(written_states=1, written_bytes=size)
        return True

    def _along(self, tokens: Tokens) -> list[Leaf]:
        return self._tree.states_along(token_bytes(tokens))

    def _state_of(self, data: bytes) -> Leaf | None:
        """The state after all of these tokens."""
        leaves = self._tree.states_along(data)
        return leaves[0] if leaves and leaves[0].state.position * TOKEN_BYTES == len(data) else None

    def _write_failed(self, error: OSError) -> bool:
        if not passing(error):
            self._shelf.failure = f"writing to {self._shelf.folder} failed: {error.strerror}"
        return False
