"""Shelf: the files of one compatibility key as they are on disk now, their recency and the byte budget.

It scans the folder, keeps the tree of what was found and written, makes room by deleting the least
recently used leaf over all models, and counts. A failed deletion ends writing. The store (persist)
reads and writes what the files hold; this knows names, sizes and times only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from stat import S_ISREG
from typing import Final, TypeVar

from quickdraft.ops.interface import RecurrentCache
from quickdraft.state.disk_counters import DiskCounters
from quickdraft.state.disk_folder import TEMPORARY_NAME, OtherFiles, open_locked, own_folder, unusable
from quickdraft.state.file_io import passing
from quickdraft.state.segment_file import SEGMENT_NAME, BlockStorage, Segment, SegmentFiles, root_key
from quickdraft.state.segment_tree import Leaf, Node, SegmentTree
from quickdraft.state.state_file import STATE_NAME, State, StateFiles

_STAMP_NS: Final = 1 << 20  # between two uses; within one, deeper files get older stamps
_LATEST_NS: Final = 1 << 62  # in a hundred years; some file systems hold times that os.utime cannot set
_Found = TypeVar("_Found", Segment, State)


class Shelf:
    """The locked folder of one key. ConfigError when it cannot be used.

    `states`: where recurrent states live in memory; None leaves state files to be deleted, as no
    model of this key wrote them.
    """

    def __init__(
        self,
        folder: Path,
        compatibility: bytes,
        storage: BlockStorage,
        budget_bytes: int,
        states: RecurrentCache | None,
    ) -> None:
        self.folder = own_folder(folder, compatibility)
        self.tree = SegmentTree(root_key(compatibility))
        self.failure = ""  # why nothing is written any more
        self.counters = DiskCounters()
        self._budget, self._own_bytes, self._stamp = budget_bytes, 0, 0
        self.descriptor = open_locked(self.folder)
        self.segments = SegmentFiles(self.descriptor, compatibility, storage)
        self.states = StateFiles(self.descriptor, compatibility, states) if states is not None else None
        self._others = OtherFiles(folder, self.folder.name)
        try:
            self._scan()
        except OSError as error:
            self.close()
            raise unusable(self.folder, str(error)) from error
        self.make_room(0)

    def close(self) -> None:
        """Let the folder go; may be called again."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    @property
    def bytes(self) -> int:
        """Of all models."""
        return self._own_bytes + self._others.bytes

    def count(self, **more: int) -> None:
        """Raise counters."""
        self.counters = self.counters.plus(**more)

    def add(self, segment: Segment, size: int, used_ns: int) -> Node | None:
        """Note a segment's file; None when it does not fit the tree."""
        node = self.tree.add(segment, segment.name, size, used_ns)
        if node is not None:
            self._own_bytes += size
        return node

    def add_state(self, state: State, size: int, used_ns: int) -> bool:
        """Note a state's file; False when no segment holds its tokens."""
        added = self.tree.add_state(Leaf(state, size, used_ns))
        self._own_bytes += size if added else 0
        return added

    def remove(self, node: Node) -> None:
        """Delete a segment with nothing below it, and the states that need it."""
        for leaf in self.tree.remove(node):
            self._delete(leaf.state.name, leaf.size)
        self._delete(node.name, node.size)

    def remove_state(self, leaf: Leaf) -> None:
        """Delete a state."""
        self.tree.remove_state(leaf)
        self._delete(leaf.state.name, leaf.size)

    def make_room(self, size: int, before: Sequence[Node] = (), keep: Collection[Leaf] = ()) -> bool:
        """Evict, oldest first over all models, until `size` more bytes fit; never the nodes in `before`
        nor the states in `keep`."""
        staying = sum(node.size for node in before) + sum(leaf.size for leaf in keep)
        if size + staying > self._budget:
            return False
        kept = set(before)
        while self.bytes + size > self._budget:
            if self.failure or not self._evict(kept, keep):
                return False
        return True

    def touch(self, nodes: Sequence[Node]) -> int:
        """Mark a way from the top as used now; parents come out younger than their children."""
        self._stamp = max(time.time_ns(), self._stamp + _STAMP_NS)
        for node in dict.fromkeys(nodes):
            node.used_ns = self._stamp - node.segment.start
            self._set_time(node.name, node.used_ns)
        return self._stamp

    def touch_state(self, leaf: Leaf, stamp: int) -> None:
        """Mark a state as used with the way to it."""
        leaf.used_ns = stamp - leaf.state.position
        self._set_time(leaf.state.name, leaf.used_ns)

    def _set_time(self, name: str, used_ns: int) -> None:
        with contextlib.suppress(OSError):  # only the order of eviction after a restart depends on it
            os.utime(name, ns=(used_ns, used_ns), dir_fd=self.descriptor)

    def _evict(self, kept: set[Node], keep: Collection[Leaf]) -> bool:
        """Delete the least recently used file that may go; False when there is none."""
        node = self.tree.oldest_leaf(kept)
        states = (leaf for leaf in self.tree.states() if leaf not in keep)
        state = min(states, key=lambda leaf: leaf.used_ns, default=None)
        own = min((each.used_ns for each in (node, state) if each is not None), default=None)
        other = self._others.oldest_ns
        if other is not None and (own is None or other < own):
            gone = self._others.delete_oldest()
        elif state is not None and state.used_ns == own:
            self.remove_state(state)
            gone = not self.failure
        elif node is not None:
            self.remove(node)
            gone = not self.failure
        else:
            return False
        self.count(evicted_segments=int(gone))
        return True

    def _scan(self) -> None:
        segments: list[tuple[Segment, int, int]] = []
        states: list[tuple[State, int, int]] = []
        for entry in list(os.scandir(self.descriptor)):
            if TEMPORARY_NAME.fullmatch(entry.name):
                self._unlink(entry.name)
            elif SEGMENT_NAME.fullmatch(entry.name):
                segments += self._examine(entry, self.segments.read_header)
            elif STATE_NAME.fullmatch(entry.name):
                states += self._examine(entry, self.states.read_header if self.states else _no_state)
        for segment, size, used_ns in sorted(segments, key=lambda each: (each[0].start, -each[0].count)):
            if self.add(segment, size, used_ns) is None:
                self._reject(segment.name, size)
            self._stamp = max(self._stamp, used_ns)
        for state, size, used_ns in states:
            if not self.add_state(state, size, used_ns):
                self._reject(state.name, size)

    def _examine(
        self, entry: os.DirEntry[str], read_header: Callable[[str, int], _Found | None]
    ) -> list[tuple[_Found, int, int]]:
        """What a file holds, its size and time; nothing, and counted, when it is no good."""
        stat = entry.stat(follow_symlinks=False)
        if not S_ISREG(stat.st_mode):
            self.count(rejected_files=1)  # a link or a folder is not ours to delete
            return []
        try:
            found = read_header(entry.name, stat.st_size)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and passing(error):
                raise
            self._reject(entry.name, stat.st_size)
            return []
        if found is None:
            self._own_bytes += stat.st_size  # another key's, put here by hand: left alone
            self.count(rejected_files=1)
            return []
        return [(found, stat.st_size, min(stat.st_mtime_ns, _LATEST_NS))]

    def _reject(self, name: str, size: int) -> None:
        self.count(rejected_files=1)
        if not self._unlink(name):
            self._own_bytes += size

    def _delete(self, name: str, size: int) -> None:
        if self._unlink(name):
            self._own_bytes -= size

    def _unlink(self, name: str) -> bool:
        try:
            os.unlink(name, dir_fd=self.descriptor)
        except FileNotFoundError:
            return True
        except OSError as error:
            self.failure = f"deleting from {self.folder} failed: {error.strerror}"
            return False
        return True


def _no_state(name: str, size: int) -> State | None:
    raise ValueError("a state where no model has one")
