"""DiskStore: the prefix cache's files on disk, so that a restart does not read every prompt again.

Owns which segments are on disk, their byte budget and their recency; the format is in segment_file,
the tree in segment_tree, the folder and its lock in disk_folder. Used from one thread, and has none.
After it has opened, nothing on the disk can make it raise: a damaged file is a miss, a failed write
ends writing, and both are counted. A file is whole under its name or absent (temporary file, rename),
and never flushed: what a power loss tears, checksums turn into misses. It knows no request and no
model; the compatibility key stands for all that the bytes of a block depend on beside the tokens.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from stat import S_ISREG
from typing import Final

from quickdraft.ops.interface import BLOCK_TOKENS, RecurrentCache
from quickdraft.state.disk_counters import DiskCounters
from quickdraft.state.disk_folder import OtherFiles, open_locked, own_folder, unusable
from quickdraft.state.segment_file import (
    SEGMENT_BLOCKS,
    SEGMENT_NAME,
    TEMPORARY_NAME,
    BlockStorage,
    Segment,
    SegmentFiles,
    root_key,
)
from quickdraft.state.segment_tree import Node, SegmentTree, TreePath, lineage, subtree
from quickdraft.state.tokens import TOKEN_BYTES, Tokens, token_bytes

UNPAID_BYTES: Final = 4 << 30
_STAMP_NS: Final = 1 << 20  # between two uses; within one, deeper segments get older stamps
_LATEST_NS: Final = 1 << 62  # in a hundred years; some file systems hold times that os.utime cannot set
_PASSING: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # says nothing about the file or the disk


class DiskStore:
    """Segments of KV blocks in a folder, found by the exact tokens they follow.

    compatibility: 32 bytes; blocks written under another key are never found. budget_bytes: of all
    files in `folder`, other models' included. ConfigError when the folder cannot be used.
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
        self._folder, self._storage = own_folder(folder, compatibility), storage
        self._budget = budget_bytes
        self._tree = SegmentTree(root_key(compatibility))
        self._own_bytes = self._stamp = self._unpaid_bytes = 0
        self._failure = ""
        self._counters = DiskCounters()
        self._descriptor = open_locked(self._folder)
        self._files = SegmentFiles(self._descriptor, compatibility, storage)
        self._others = OtherFiles(folder, self._folder.name)
        try:
            self._scan()
        except OSError as error:
            self.close()
            raise unusable(self._folder, str(error)) from error
        self._make_room(0, [])

    def close(self) -> None:
        """Let the folder go; may be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # -- what is there ------------------------------------------------------------------------
    def match(self, tokens: Tokens) -> int:
        """How many leading tokens are on disk, down to the token."""
        return self._tree.path(token_bytes(tokens)).tokens

    def missing(self, tokens: Tokens) -> int:
        """The first position, at a block's start, that is not on disk yet; len(tokens) when all are."""
        matched = self.match(tokens)
        return matched if matched == len(tokens) else matched // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def not_writing(self) -> str:
        """Why nothing is written any more, or for now; empty while the store writes."""
        if self._failure:
            return self._failure
        limit = max(self._budget, UNPAID_BYTES)
        if self._unpaid_bytes > limit:
            return f"{self._unpaid_bytes} bytes were written since one was last read; the limit is {limit}"
        return ""

    @property
    def counters(self) -> DiskCounters:
        """A snapshot."""
        return replace(
            self._counters,
            segments=len(self._tree.nodes),
            bytes_on_disk=self._bytes,
            not_writing=self.not_writing,
        )

    # -- reading ------------------------------------------------------------------------------
    def restore(self, tokens: Tokens, first_block: int, blocks: Sequence[int]) -> int:
        """Fill `blocks` with token blocks first_block, first_block+1, ...; how many were restored.

        It ends early where the match ends and at the first block that is not whole, whose segment
        is dropped with all below it. Of the last block only the matched tokens are meant, and what
        the memory of blocks beyond the answer holds is undefined.
        """
        assert self._descriptor >= 0, "the store is closed"
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

    def _read(self, node: Node, first: int, blocks: Sequence[int]) -> int:
        try:
            whole = self._files.read_blocks(node.segment, first, blocks)
        except OSError as error:
            if error.errno in _PASSING:
                return 0
            whole = 0
        if whole < len(blocks):
            for lost in subtree(node):
                self._remove(lost)
                self._count(rejected_files=1)
        return whole

    def _restored(self, path: TreePath, first_block: int, blocks: int) -> None:
        if not blocks:
            return
        end = first_block + blocks
        self._touch([node for node, _ in path.steps[:end]])
        self._unpaid_bytes = 0
        self._count(
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
        assert self._descriptor >= 0, "the store is closed"
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
        size = self._files.size(len(own) // TOKEN_BYTES)
        before = list(lineage(parent))
        if not self._make_room(size, before):
            return False
        stamp = self._touch(before)
        prefix, start = path.key_after(first, self._tree.root), first * BLOCK_TOKENS
        try:
            segment = self._files.write(prefix, start, own, blocks, stamp - start)
        except OSError as error:
            if error.errno not in _PASSING:
                self._failure = f"writing to {self._folder} failed: {error.strerror}"
            return False
        node = self._attach(segment, size, stamp - start)
        assert node is not None
        for old in self._tree.superseded(node):
            self._remove(old)
        self._unpaid_bytes += size
        self._count(written_segments=1, written_bytes=size)
        return True

    # -- the folder ---------------------------------------------------------------------------
    @property
    def _bytes(self) -> int:
        return self._own_bytes + self._others.bytes

    def _scan(self) -> None:
        found: list[tuple[Segment, int, int]] = []
        for entry in list(os.scandir(self._descriptor)):
            if TEMPORARY_NAME.fullmatch(entry.name):
                self._unlink(entry.name)
            elif SEGMENT_NAME.fullmatch(entry.name):
                found += self._examine(entry)
        for segment, size, used_ns in sorted(found, key=lambda each: (each[0].start, -each[0].count)):
            if self._attach(segment, size, used_ns) is None:
                self._reject(segment.name, size)
            self._stamp = max(self._stamp, used_ns)

    def _examine(self, entry: os.DirEntry[str]) -> list[tuple[Segment, int, int]]:
        """The segment of a file, its size and time; nothing, and counted, when it is no good."""
        stat = entry.stat(follow_symlinks=False)
        if not S_ISREG(stat.st_mode):
            self._count(rejected_files=1)  # a link or a folder is not ours to delete
            return []
        try:
            segment = self._files.read_header(entry.name, stat.st_size)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _PASSING:
                raise
            self._reject(entry.name, stat.st_size)
            return []
        if segment is None:
            self._own_bytes += stat.st_size  # another key's, put here by hand: left alone
            self._count(rejected_files=1)
            return []
        return [(segment, stat.st_size, min(stat.st_mtime_ns, _LATEST_NS))]

    def _attach(self, segment: Segment, size: int, used_ns: int) -> Node | None:
        node = self._tree.add(segment, segment.name, size, used_ns)
        if node is not None:
            self._own_bytes += size
        return node

    def _reject(self, name: str, size: int) -> None:
        self._count(rejected_files=1)
        if not self._unlink(name):
            self._own_bytes += size

    def _remove(self, node: Node) -> None:
        self._tree.remove(node)
        if self._unlink(node.name):
            self._own_bytes -= node.size

    def _unlink(self, name: str) -> bool:
        try:
            os.unlink(name, dir_fd=self._descriptor)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._failure = f"deleting from {self._folder} failed: {error.strerror}"
            return False
        return True

    def _make_room(self, size: int, before: Sequence[Node]) -> bool:
        """Evict, oldest first over all models, until `size` more bytes fit; never the nodes in `before`."""
        if size + sum(node.size for node in before) > self._budget:
            return False
        kept = set(before)
        while self._bytes + size > self._budget:
            if self._failure:
                return False
            leaf, other = self._tree.oldest_leaf(kept), self._others.oldest_ns
            if other is not None and (leaf is None or other < leaf.used_ns):
                gone = self._others.delete_oldest()
            elif leaf is not None:
                self._remove(leaf)
                gone = not self._failure
            else:
                return False
            self._count(evicted_segments=int(gone))
        return True

    def _touch(self, nodes: Sequence[Node]) -> int:
        """Mark a way from the top as used now; parents come out younger than their children."""
        self._stamp = max(time.time_ns(), self._stamp + _STAMP_NS)
        for node in dict.fromkeys(nodes):
            node.used_ns = self._stamp - node.segment.start
            with contextlib.suppress(OSError):  # only the order of eviction after a restart depends on it
                os.utime(node.name, ns=(node.used_ns, node.used_ns), dir_fd=self._descriptor)
        return self._stamp

    def _count(self, **more: int) -> None:
        self._counters = self._counters.plus(**more)
