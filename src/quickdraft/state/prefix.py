"""PrefixIndex: which committed tokens the kept KV blocks hold, as a radix tree of blocks.

A node is one block of a token prefix: 16 tokens, or fewer at the end of what was computed. A hit
reaches down to the last shared token: full blocks are shared, the block where the texts part is
for the caller to copy. Knows token ids and block numbers, no buffer and no request.

A sequence that uses a node owns every block on the path to it (`publish` swaps duplicates for the
kept block), so a kept block without an owner has none below it either and all of them can go.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.state.blocks import BlockPool
from quickdraft.state.tokens import TOKEN_BLOCK_BYTES, TOKEN_BYTES, most_common_tokens

# Where a token's attention costs about as much as its linear layers: what a cached block saves
# grows with its position. A few thousand for small models; only the order of eviction depends on it.
EVEN_TOKENS: Final = 4096
# A prompt of so many tokens takes about as long as the rest of a short request: of a shorter one
# hardly anything is saved, so titles and greetings do not push out long conversations.
UNNOTICED_TOKENS: Final = 1024
_LEAVES_PER_BLOCK: Final = 64  # looked at, per block evicted
_LOST_KEYS: Final = 64  # evicted children remembered per node, to tell a miss from an eviction
_NOT_RESUMED: Final = 1 / 16  # worth of a block that no recurrent state lets a sequence resume in


def noticed(end: int) -> float:
    """What computing a token again costs at the end of `end` tokens, as far as one notices it there."""
    return (1.0 + end / EVEN_TOKENS) * end / (end + UNNOTICED_TOKENS)


class Node:
    """One kept block: `tokens` (bytes) after the path of its parents; `end` counts tokens to its end."""

    __slots__ = ("block", "children", "end", "hit", "lost", "parent", "saved", "tokens", "used")

    def __init__(self, parent: Node | None, tokens: bytes, block: int) -> None:
        self.parent, self.tokens, self.block = parent, tokens, block
        self.end: int = (parent.end if parent else 0) + len(tokens) // TOKEN_BYTES
        self.children: dict[bytes, Node] = {}
        self.lost: dict[bytes, None] = {}
        # What it saves: computing it again, as far as one notices that in a whole request. Twice as
        # much once it was hit; more hits would not say more, a long dead conversation has many.
        self.saved = noticed(self.end)
        self.hit = False
        self.used = 0  # the index's clock when it was last published or hit


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a text, and why it is no longer.

    `path` are the full blocks to share; `partial` holds the tokens from `path` to `tokens`, if any.
    """

    tokens: int
    path: tuple[Node, ...]
    partial: Node | None
    reason: str  # see types.CacheReport
    cached_token: int | None = None


class PrefixIndex:
    """The tree over one pool. Keeps blocks as long as nobody needs the memory."""

    def __init__(self, pool: BlockPool) -> None:
        self.root = Node(None, b"", -1)
        self.evicted_blocks = 0
        self._pool = pool
        self._leaves: dict[Node, None] = {}
        self.clock = 0  # requests that were hit
        self._on_evicted: Callable[[Node, Node], None] | None = None
        self._resumed: Callable[[Node], bool] | None = None
        pool.on_short(self._evict)

    def watch(self, on_evicted: Callable[[Node, Node], None], resumed: Callable[[Node], bool]) -> None:
        """For recurrent layers: `on_evicted(node, parent)` hears of every eviction, and blocks of which
        `resumed(node)` is False go sooner."""
        self._on_evicted, self._resumed = on_evicted, resumed

    def match(self, text: bytes, limit: int) -> Match:
        """The longest cached prefix of `text`, at most `limit` tokens. Changes nothing."""
        node, path = self.root, []
        while node.end + BLOCK_TOKENS <= limit:
            child = node.children.get(block_after(node, text))
            if child is None:
                break
            path.append(child)
            node = child
        rest = block_after(node, text)
        shared, best = _nearest(node, rest)
        shared = min(shared, limit - node.end)
        tokens = node.end + shared
        reason, cached_token = ("none", None) if tokens == limit else _why(node, rest, best, shared)
        return Match(tokens, tuple(path), best if shared else None, reason, cached_token)

    def touch(self, match: Match) -> None:
        """A match is being used: it counts as a hit on every block of it."""
        self.clock += 1
        for node in (*match.path, match.partial):
            if node is not None:
                node.saved *= 1 if node.hit else 2
                node.hit = True
                node.used = self.clock

    def publish(self, parent: Node, text: bytes, blocks: list[int]) -> tuple[Node, list[int]]:
        """Keep `blocks`, which hold `text` (after the path to `parent`); the caller owns them.

        Returns the last full node, and the blocks that hold the text now: where it was kept already
        the kept block, of which the caller becomes an owner in exchange for its own. A last block
        that is not full is kept too, but stays its caller's to give back, not to write.
        """
        held = []
        for start, block in zip(range(0, len(text), TOKEN_BLOCK_BYTES), blocks, strict=True):
            tokens = text[start : start + TOKEN_BLOCK_BYTES]
            if len(tokens) < TOKEN_BLOCK_BYTES:
                self._publish_partial(parent, tokens, block)
                held.append(block)
                break
            node = parent.children.get(tokens)
            if node is None:
                node = self._insert(parent, tokens, block)
            elif node.block != block:
                self._pool.share(node.block)
                self._pool.give_back([block])
            node.used = self.clock
            held.append(node.block)
            parent = node
        return parent, held

    def clear(self) -> None:
        """Forget every block that no sequence holds."""
        self._evict(self._pool.idle)

    def path(self, text: bytes) -> Iterator[Node]:
        """The nodes that hold `text` exactly, from its start, as far as they are kept."""
        node = self.root
        while child := node.children.get(block_after(node, text)):
            yield child
            node = child

    def _publish_partial(self, parent: Node, tokens: bytes, block: int) -> None:
        for child in parent.children.values():
            if child.tokens.startswith(tokens):
                child.used = self.clock
                return
        self._insert(parent, tokens, block).used = self.clock

    def _insert(self, parent: Node, tokens: bytes, block: int) -> Node:
        """Add a node; one that holds only a beginning of the same tokens is of no more use."""
        for key in [key for key in parent.children if len(key) < len(tokens) and tokens.startswith(key)]:
            self._remove(parent.children[key])
        node = Node(parent, tokens, block)
        parent.children[tokens] = node
        parent.lost.pop(tokens, None)
        self._leaves.pop(parent, None)
        self._leaves[node] = None
        self._pool.keep(block)
        return node

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None and not node.children, "only leaves are removed"
        del parent.children[node.tokens], self._leaves[node]
        if not parent.children and parent is not self.root:
            self._leaves[parent] = None
        self._pool.drop(node.block)

    def _evict(self, count: int) -> None:
        """Drop `count` blocks without an owner, those first whose loss costs least.

        Of many texts a few more: so that looking at all of them is not the price of every block.
        """
        heap = [self._entry(node) for node in self._leaves if not self._pool.owners(node.block)]
        heapq.heapify(heap)
        for _ in range(max(count, min(len(heap) // _LEAVES_PER_BLOCK, self._pool.idle))):
            node = heapq.heappop(heap)[-1]
            parent = node.parent
            assert parent is not None
            parent.lost[node.tokens] = None
            if len(parent.lost) > _LOST_KEYS:
                del parent.lost[next(iter(parent.lost))]
            self._remove(node)
            self.evicted_blocks += 1
            if self._on_evicted is not None:
                self._on_evicted(node, parent)
            if parent in self._leaves and not self._pool.owners(parent.block):
                heapq.heappush(heap, self._entry(parent))

    def _entry(self, node: Node) -> tuple[float, int, int, Node]:
        """Worth of a block, per byte since all are equal: what it saves by how likely it is wanted,
        which falls with the square root of the requests since. Squared, as only the order matters."""
        saved = node.saved
        if self._resumed is not None and not self._resumed(node):
            saved *= _NOT_RESUMED
        return saved * saved / (1 + self.clock - node.used), -node.end, node.block, node


def block_after(node: Node, text: bytes) -> bytes:
    """The tokens of `text` in the block after `node`; fewer than a block at its end."""
    start = node.end * TOKEN_BYTES
    return text[start : start + TOKEN_BLOCK_BYTES]


def _why(node: Node, rest: bytes, best: Node | None, shared: int) -> tuple[str, int | None]:
    """The reason a match ends `shared` tokens below `node`, and the cached token there."""
    if most_common_tokens(node.lost, rest) > shared:
        return "evicted", None
    if best is None:
        return ("end" if node.parent else "empty"), None
    at = shared * TOKEN_BYTES
    if at == len(best.tokens):
        return "end", None
    return "differs", int.from_bytes(best.tokens[at : at + TOKEN_BYTES], "little", signed=True)


def _nearest(node: Node, rest: bytes) -> tuple[int, Node | None]:
    """How many tokens of `rest` the child shares that shares most, and that child; of several the
    most recently used."""
    shared = most_common_tokens(node.children, rest)
    begin = rest[: shared * TOKEN_BYTES]
    children = (child for key, child in node.children.items() if key.startswith(begin))
    return shared, max(children, key=lambda child: child.used, default=None)
