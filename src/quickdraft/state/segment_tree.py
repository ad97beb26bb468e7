"""SegmentTree: which runs of tokens are on disk, and what hangs below what.

Segments form a tree: a child starts at the end of some full block of its parent, not only of its
last one. No two segments hold the same full block after the same prefix, so every block position
has one parent. Looking up compares tokens; keys are only needed to attach a segment. Recurrent states
hang where their tokens end, and go with the last segment that holds those. Knows no file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.state.segment_file import Segment, next_key
from quickdraft.state.state_file import State
from quickdraft.state.tokens import TOKEN_BLOCK_BYTES, TOKEN_BYTES, most_common_tokens


@dataclass(slots=True, eq=False)
class Node:
    """A segment in the tree."""

    segment: Segment
    name: str
    size: int  # bytes of its file
    used_ns: int
    parent: Node | None
    keys: list[bytes]  # of its start and of the end of each full block
    children: set[Node] = field(default_factory=set)

    def block(self, index: int) -> bytes:
        """Token ids of its block `index`."""
        return self.segment.tokens[index * TOKEN_BLOCK_BYTES : (index + 1) * TOKEN_BLOCK_BYTES]


@dataclass(slots=True, eq=False)
class Leaf:
    """A recurrent state in the tree."""

    state: State
    size: int  # bytes of its file
    used_ns: int


@dataclass(frozen=True, slots=True)
class TreePath:
    """The longest way along a list of tokens: (node, block of that node) per block, and its end."""

    steps: list[tuple[Node, int]]
    tokens: int  # the last step may hold only some of these

    def key_after(self, blocks: int, root: bytes) -> bytes:
        """The prefix key after this many full blocks of the path."""
        if blocks == 0:
            return root
        node, index = self.steps[blocks - 1]
        return node.keys[index + 1]


class SegmentTree:
    """Token runs by prefix; `root` is the key of position 0."""

    def __init__(self, root: bytes) -> None:
        self.root = root
        self.nodes: set[Node] = set()
        self._ends: dict[bytes, Node] = {}  # key -> whose full block ends there
        # key -> tokens of the blocks that begin there, and which blocks those are
        self._after: dict[bytes, dict[bytes, tuple[Node, int]]] = {root: {}}
        self._states: dict[bytes, dict[bytes, Leaf]] = {}  # key -> tokens after it -> state
        self.state_count = 0

    def path(self, tokens: bytes) -> TreePath:
        """The longest prefix of `tokens` (int32 bytes) that is held, down to the token.

        Of several segments that hold equally much of the last block, the most recently used.
        """
        steps: list[tuple[Node, int]] = []
        held, key = 0, self.root
        for first in range(0, len(tokens), TOKEN_BLOCK_BYTES):
            wanted = tokens[first : first + TOKEN_BLOCK_BYTES]
            best = self._best(key, wanted)
            if best is None or best[2] == 0:
                break
            node, index, common = best
            steps.append((node, index))
            held += common
            if common < BLOCK_TOKENS:
                break
            key = node.keys[index + 1]
        return TreePath(steps, held)

    def _best(self, key: bytes, wanted: bytes) -> tuple[Node, int, int] | None:
        """Of the blocks after `key`, the one that shares most tokens with `wanted`, and how many."""
        after = self._after[key]
        if len(wanted) == TOKEN_BLOCK_BYTES and wanted in after:
            return *after[wanted], BLOCK_TOKENS
        common = most_common_tokens(after, wanted)
        begin = wanted[: common * TOKEN_BYTES]
        found = (held for block, held in after.items() if block.startswith(begin))
        best = max(found, key=lambda held: held[0].used_ns, default=None)
        return (*best, common) if best is not None else None

    def add(self, segment: Segment, name: str, size: int, used_ns: int) -> Node | None:
        """Attach a segment; None when what comes before it is missing or its first block is held."""
        parent = self._ends.get(segment.prefix)
        if parent is None and segment.prefix != self.root:
            return None
        node = Node(segment, name, size, used_ns, parent, [segment.prefix])
        first = node.block(0)
        if any(block.startswith(first) for block in self._after[segment.prefix]):
            return None
        for index in range(segment.count // BLOCK_TOKENS):
            node.keys.append(next_key(node.keys[-1], node.block(index)))
        for index, key in enumerate(node.keys):
            if index:
                self._ends[key] = node
            after = self._after.setdefault(key, {})
            if index * BLOCK_TOKENS < segment.count:
                after[node.block(index)] = node, index
        if parent is not None:
            parent.children.add(node)
        self.nodes.add(node)
        return node

    def superseded(self, node: Node) -> list[Node]:
        """Segments of one partial block that `node`, at the same start, holds with more tokens."""
        tokens = node.segment.tokens
        after = self._after[node.keys[0]].values()
        others = (other for other, index in after if index == 0 and other is not node)
        return [other for other in others if tokens.startswith(other.segment.tokens)]

    def remove(self, node: Node) -> list[Leaf]:
        """Take a leaf out, and with it the states that no other segment has the tokens of: these."""
        assert not node.children, "a segment that others hang below cannot go first"
        self.nodes.discard(node)
        if node.parent is not None:
            node.parent.children.discard(node)
        for index, key in enumerate(node.keys):
            if index * BLOCK_TOKENS < node.segment.count:
                del self._after[key][node.block(index)]
        for key in node.keys[1:]:
            del self._ends[key], self._after[key]
        orphans = [leaf for key in node.keys for leaf in self._at(key) if not self._holds(leaf.state)]
        for leaf in orphans:
            self.remove_state(leaf)
        return orphans

    # -- recurrent states ---------------------------------------------------------------------
    def add_state(self, leaf: Leaf) -> bool:
        """Attach a state; False when its tokens are not held, or it is there already."""
        group = self._states.get(leaf.state.prefix, {})
        if not self._holds(leaf.state) or leaf.state.tail in group:
            return False
        self._states.setdefault(leaf.state.prefix, group)[leaf.state.tail] = leaf
        self.state_count += 1
        return True

    def remove_state(self, leaf: Leaf) -> None:
        """Take a state out."""
        group = self._states[leaf.state.prefix]
        del group[leaf.state.tail]
        self.state_count -= 1
        if not group:
            del self._states[leaf.state.prefix]

    def states(self) -> list[Leaf]:
        """All of them."""
        return [leaf for group in self._states.values() for leaf in group.values()]

    def states_along(self, tokens: bytes) -> list[Leaf]:
        """The states on the way of `tokens`, the last one first."""
        if not self._states:
            return []
        path, found = self.path(tokens), []
        for blocks in range(path.tokens // BLOCK_TOKENS, -1, -1):
            at = self._at(path.key_after(blocks, self.root))
            rest = tokens[blocks * TOKEN_BLOCK_BYTES : path.tokens * TOKEN_BYTES]
            fitting = [leaf for leaf in at if rest.startswith(leaf.state.tail)]
            found += sorted(fitting, key=lambda leaf: -leaf.state.position)
        return found

    def _at(self, key: bytes) -> list[Leaf]:
        return list(self._states.get(key, {}).values())

    def _holds(self, state: State) -> bool:
        """Whether a segment holds all its tokens."""
        after = self._after.get(state.prefix)
        if after is None:
            return False
        return not state.tail or any(block.startswith(state.tail) for block in after)

    # -- eviction -----------------------------------------------------------------------------
    def oldest_leaf(self, keep: Collection[Node]) -> Node | None:
        """The least recently used segment with nothing below it and not in `keep`."""
        leaves = (node for node in self.nodes if not node.children and node not in keep)
        return min(leaves, key=lambda node: node.used_ns, default=None)


def lineage(node: Node | None) -> Iterator[Node]:
    """The node, its parent, and so on to the top."""
    while node is not None:
        yield node
        node = node.parent


def subtree(node: Node) -> list[Node]:
    """The node and all below it, children before their parents."""
    found = [node]
    for at in found:
        found.extend(at.children)
    return found[::-1]
