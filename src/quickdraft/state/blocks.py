"""BlockPool: which KV blocks are free, and how many sequences share the others.

Integers only: no buffer, no token. A block is free or has owners; the last owner to let go frees
it. The prefix index will hold blocks as one more owner.
"""

from __future__ import annotations

from collections.abc import Callable

from quickdraft.errors import CapacityError


class BlockPool:
    """Free list and reference counts over blocks 0..count-1.

    `on_free(block)` is called whenever a block's last owner lets go (tests poison it there).
    """

    def __init__(self, count: int, on_free: Callable[[int], None] | None = None) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._owners = [0] * count
        self._on_free = on_free

    @property
    def free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` blocks owned once each; CapacityError, with nothing taken, when short."""
        assert count >= 0, f"take {count} blocks"
        if count > len(self._free):
            raise CapacityError(
                "KV blocks ran out", got=f"{count} wanted", expected=f"at most {self.free} free"
            )
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._owners[block] = 1
        return taken

    def owners(self, block: int) -> int:
        """How many sequences hold this block; 0 when it is free."""
        return self._owners[block]

    def share(self, block: int) -> None:
        """Add an owner to a block in use."""
        assert self._owners[block] > 0, f"block {block} is free and cannot be shared"
        self._owners[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        """Drop one owner of each block; the last one frees it."""
        for block in blocks:
            assert self._owners[block] > 0, f"block {block} freed twice"
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)
                if self._on_free is not None:
                    self._on_free(block)
