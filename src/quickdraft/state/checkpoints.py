"""Checkpoints: copies of recurrent states in the prefix index, and which of them stay.

A checkpoint is a state after an exact number of tokens. It hangs at the last full block of its text
and the tokens after that, and always has its KV in the index: evicting those blocks drops it too.
There are as many as there are checkpoint slots; a new one takes the place of the one whose loss
costs least. Knows tokens, nodes and slot numbers, no buffer and no request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from quickdraft.state.prefix import Match, Node, PrefixIndex, block_after, noticed
from quickdraft.state.slots import SlotPool
from quickdraft.state.tokens import TOKEN_BYTES

_UNLIKELY: Final = 1 / 4  # a state every so many tokens is insurance: texts rarely part just after it
_KEPT_PER_EVICTION: Final = 64  # one more goes per so many, so that looking at all is not each one's price


class Checkpoint:
    """The recurrent state after the tokens up to `node` and then `tail` (bytes, less than a block)."""

    __slots__ = ("hit", "likely", "node", "position", "slot", "tail", "used")

    def __init__(self, node: Node, tail: bytes, slot: int, likely: bool, clock: int) -> None:
        self.node, self.tail, self.slot, self.likely = node, tail, slot, likely
        self.position = node.end + len(tail) // TOKEN_BYTES
        self.used, self.hit = clock, False


class Checkpoints:
    """The checkpoints of one index."""

    def __init__(self, index: PrefixIndex, slots: SlotPool) -> None:
        self._index, self._slots = index, slots
        self._at: dict[Node, dict[bytes, Checkpoint]] = {}
        self.count = 0
        self.evicted = 0  # for room, or with their KV
        index.watch(self._kv_evicted, self._resumed)

    def find(self, match: Match, text: bytes, most: int) -> Checkpoint | None:
        """The last one on the way of `match`, which is one of `text`, at `most` tokens or before."""
        return next(self._along(match, text, most), None)

    def along(self, text: bytes) -> list[Checkpoint]:
        """All on the way of `text`, the last one first."""
        match = self._index.match(text, len(text) // TOKEN_BYTES)
        return list(self._along(match, text, match.tokens))

    def touch(self, checkpoint: Checkpoint) -> None:
        """A sequence resumes from it."""
        checkpoint.used, checkpoint.hit = self._index.clock, True

    def at(self, node: Node, tail: bytes) -> Checkpoint | None:
        """The one in this place; it counts as made again."""
        found = self._at.get(node, {}).get(tail)
        if found is not None:
            found.used = self._index.clock
        return found

    def take(self) -> int | None:
        """A slot for one more, perhaps an evicted one's; None when running sequences hold all."""
        if not self._slots.free_checkpoints and self.count:
            everyone = [each for group in self._at.values() for each in group.values()]
            everyone.sort(key=self._worth)
            for each in everyone[: 1 + self.count // _KEPT_PER_EVICTION]:
                self._evict(each)
        return self._slots.take_checkpoint()

    def give_back(self, slot: int) -> None:
        """A slot that was taken is not needed."""
        self._slots.give_back(slot)

    def put(self, node: Node, tail: bytes, slot: int, *, likely: bool) -> None:
        """Hang the state in `slot` there, whose KV is in the index; given back if there is one already."""
        if self.at(node, tail) is not None:
            self._slots.give_back(slot)
            return
        self._at.setdefault(node, {})[tail] = Checkpoint(node, tail, slot, likely, self._index.clock)
        self.count += 1

    def clear(self) -> None:
        """Forget all."""
        for each in [each for group in self._at.values() for each in group.values()]:
            self._drop(each)

    def _along(self, match: Match, text: bytes, most: int) -> Iterator[Checkpoint]:
        most = min(most, match.tokens)
        for node in (*reversed(match.path), self._index.root):
            group = self._at.get(node)
            if group is None or node.end > most:
                continue
            rest = block_after(node, text)[: (most - node.end) * TOKEN_BYTES]
            fitting = [each for tail, each in group.items() if rest.startswith(tail)]
            yield from sorted(fitting, key=lambda each: -each.position)

    def _worth(self, one: Checkpoint) -> float:
        """What losing it costs, per byte since all are equal: the tokens from the one before it on its
        way, by what one of them costs, by how likely it is wanted (see PrefixIndex)."""
        tokens = one.position - self._before(one)
        likely = (2.0 if one.hit else 1.0) * (1.0 if one.likely else _UNLIKELY)
        return float(tokens * noticed(one.position) * likely / (1 + self._index.clock - one.used) ** 0.5)

    def _before(self, one: Checkpoint) -> int:
        """The position of the checkpoint before `one` on its way; 0 when it is the first."""
        node, tail = one.node, one.tail
        while True:
            group = self._at.get(node)
            earlier = [each for key, each in group.items() if tail.startswith(key)] if group else []
            last = max((each.position for each in earlier if each is not one), default=0)
            if last or node.parent is None:
                return last
            node, tail = node.parent, node.tokens

    def _resumed(self, node: Node) -> bool:
        """Whether a checkpoint needs the KV of this block."""
        parent = node.parent
        assert parent is not None, "the root holds no block"
        return node in self._at or any(
            tail and node.tokens.startswith(tail) for tail in self._at.get(parent, ())
        )

    def _kv_evicted(self, node: Node, parent: Node) -> None:
        gone = list(self._at.get(node, {}).values())
        for tail, each in self._at.get(parent, {}).items():
            under = bool(tail) and node.tokens.startswith(tail)
            if under and not any(key.startswith(tail) for key in parent.children):
                gone.append(each)
        for each in gone:
            self._evict(each)

    def _evict(self, one: Checkpoint) -> None:
        self.evicted += 1
        self._drop(one)

    def _drop(self, one: Checkpoint) -> None:
        group = self._at[one.node]
        del group[one.tail]
        if not group:
            del self._at[one.node]
        self.count -= 1
        self._slots.give_back(one.slot)
        one.slot = -1
