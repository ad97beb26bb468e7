"""BlockPool: which KV blocks are free, and how many sequences share the others.

Integers only: no buffer, no token. A block is free, or has owners (sequences), or is kept by the
prefix index alone. Kept blocks without an owner count as free: when the free list runs short, the
index is asked to let go of the least useful ones.
"""

from __future__ import annotations

from collections.abc import Callable

from quickdraft.errors import CapacityError

Reclaim = Callable[[int], None]  # drop at least so many kept blocks without an owner


class BlockPool:
    """Free list and reference counts over blocks 0..count-1.

    `on_free(block)` is called whenever nobody holds a block any more (tests poison it there).
    """

    def __init__(self, count: int, on_free: Callable[[int], None] | None = None) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._owners = [0] * count
        self._kept = bytearray(count)
        self._on_free = on_free
        self._reclaim: Reclaim | None = None
        self.idle = 0  # kept blocks without an owner

    @property
    def free(self) -> int:
        """Blocks that can be taken: those nobody holds, and those only the prefix index holds."""
        return len(self._free) + self.idle

    def on_short(self, reclaim: Reclaim) -> None:
        """Whom to ask for kept blocks when the free list runs short."""
        self._reclaim = reclaim

    def take(self, count: int) -> list[int]:
        """`count` blocks owned once each; CapacityError, with nothing taken, when short."""
        assert count >= 0, f"take {count} blocks"
        if count > self.free:
            raise CapacityError(
                "KV blocks ran out", got=f"{count} wanted", expected=f"at most {self.free} free"
            )
        if count > len(self._free):
            assert self._reclaim is not None, "kept blocks, and nobody who keeps them"
            self._reclaim(count - len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._owners[block] = 1
        return taken

    def owners(self, block: int) -> int:
        """How many sequences hold this block."""
        return self._owners[block]

    def private(self, block: int) -> bool:
        """Whether one sequence and nobody else holds this block: it may be written."""
        return self._owners[block] == 1 and not self._kept[block]

    def share(self, block: int) -> None:
        """Add an owner to a block that is in use or kept."""
        assert self._owners[block] or self._kept[block], f"block {block} is free and cannot be shared"
        if not self._owners[block]:
            self.idle -= 1
        self._owners[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        """Drop one owner of each block; one that nobody holds any more is freed."""
        for block in blocks:
            assert self._owners[block] > 0, f"block {block} freed twice"
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if self._kept[block]:
                self.idle += 1
            else:
                self._release(block)

    def keep(self, block: int) -> None:
        """The prefix index holds this block, which is in use, from now on."""
        assert self._owners[block] and not self._kept[block], f"block {block} cannot be kept"
        self._kept[block] = 1

    def drop(self, block: int) -> None:
        """The prefix index lets go of a block it kept."""
        assert self._kept[block], f"block {block} was not kept"
        self._kept[block] = 0
        if not self._owners[block]:
            self.idle -= 1
            self._release(block)

    def _release(self, block: int) -> None:
        self._free.append(block)
        if self._on_free is not None:
            self._on_free(block)
