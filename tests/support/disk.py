"""A block memory whose right content is known: bytes at a position follow from all tokens up to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.state.persist import DiskStore
from quickdraft.state.sequence import blocks_for

KEY = bytes(range(32))
LAYERS, SLOT_BYTES = 2, 8
POISON = 0xEE


def content(tokens: Sequence[int]) -> np.ndarray:
    """[positions, 8] bytes; position p depends on tokens[: p + 1]."""
    state, found = 1, []
    for token in tokens:
        state = ((state ^ (token + 1)) * 6364136223846793005 + 1442695040888963407) % 2**64
        found.append(state)
    return np.array(found, "<u8").view(np.uint8).reshape(-1, SLOT_BYTES)


class Memory:
    """A BlockStorage of LAYERS layers, [layers, blocks, 16, 8] bytes."""

    def __init__(self, blocks: int = 64) -> None:
        self.data = np.full((LAYERS, blocks, BLOCK_TOKENS, SLOT_BYTES), POISON, np.uint8)
        self.bytes_per_block = self.data[:, 0].nbytes

    def views(self, block: int) -> list[memoryview]:
        return [layer[block].reshape(-1).data for layer in self.data]

    room = views

    def filled(self, block: int) -> None:
        pass

    def compute(self, tokens: Sequence[int], first_block: int, blocks: Sequence[int]) -> None:
        """What a model would leave in `blocks`, the token blocks first_block, first_block+1, ..."""
        right = content(tokens)
        for number, block in enumerate(blocks, first_block):
            slots = right[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
            for layer in range(LAYERS):
                self.data[layer, block] = POISON
                self.data[layer, block, : len(slots)] = slots ^ layer

    def assert_right(
        self, tokens: Sequence[int], matched: int, first_block: int, blocks: Sequence[int]
    ) -> None:
        """Every position below `matched` that is in `blocks` has the bytes of its tokens."""
        right = content(tokens[:matched])
        for number, block in enumerate(blocks, first_block):
            slots = right[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
            assert len(slots), "a block beyond the match was restored"
            for layer in range(LAYERS):
                assert (self.data[layer, block, : len(slots)] == slots ^ layer).all()


def file_bytes(tokens: int, memory: Memory) -> int:
    """Size of a segment file of this many tokens, as ARCHITECTURE.md has it."""
    return 92 + 4 * tokens + 4 * blocks_for(tokens) + 32 + blocks_for(tokens) * memory.bytes_per_block


def opened(folder: Path, memory: Memory, *, key: bytes = KEY, budget: int = 1 << 30) -> DiskStore:
    return DiskStore(folder, key, memory, budget)


def write_all(store: DiskStore, memory: Memory, tokens: Sequence[int]) -> bool:
    """Everything of `tokens` that is missing, segment by segment; False as soon as one was refused."""
    first = store.missing(tokens) // BLOCK_TOKENS
    for number in range(first, blocks_for(len(tokens)), 16):
        blocks = list(range(min(16, blocks_for(len(tokens)) - number)))
        memory.compute(tokens, number, blocks)
        if not store.write(tokens, number * BLOCK_TOKENS, blocks):
            return False
    return True


def restore_all(store: DiskStore, memory: Memory, tokens: Sequence[int]) -> int:
    """Restore all that matches, check every byte of it, and answer how many tokens that was."""
    matched = store.match(tokens)
    blocks = list(range(blocks_for(matched)))
    memory.data[:] = POISON
    restored = store.restore(tokens, 0, blocks)
    memory.assert_right(tokens, matched, 0, blocks[:restored])
    return min(matched, restored * BLOCK_TOKENS)


def segment_files(folder: Path) -> list[Path]:
    """The segment files of a cache folder, by time of use."""
    return sorted(folder.glob("*/*.kv"), key=lambda path: path.stat().st_mtime_ns)


def numbers(count: int, seed: int = 0) -> list[int]:
    """Some token ids."""
    return np.random.default_rng(seed).integers(0, 50_000, count).tolist()
