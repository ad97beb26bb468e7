"""A pool, its prefix cache and perhaps a folder, over a memory of one token per slot that is really read."""

from __future__ import annotations

import random
from pathlib import Path

from hypothesis import strategies as st

from quickdraft.errors import CapacityError
from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.state.blocks import BlockPool
from quickdraft.state.cache import PrefixCache
from quickdraft.state.persist import DiskStore
from quickdraft.state.sequence import SequenceState
from tests.support.toy import ToyModel


class World:
    """A pool, its cache, and a memory of one token per slot."""

    def __init__(self, blocks: int, folder: Path | None = None, budget: int = 1 << 20) -> None:
        self.memory = ToyModel(blocks)
        self.pool = BlockPool(blocks, self.memory.poison)
        store = DiskStore(folder, bytes(32), self.memory, budget) if folder else None
        self.cache = PrefixCache(self.pool, self.memory.copy_block, store)

    def compute(self, tokens: list[int], publish_at: int | None = None):
        """Resume and compute `tokens` as the engine does; the report, the state still held."""
        state = SequenceState(self.pool)
        cursor, report = self.cache.attach(state, tokens)
        assert state.committed == report.cached_tokens < len(tokens)
        self.check(state, tokens)
        try:
            while state.committed < len(tokens):
                step = min(publish_at or len(tokens), len(tokens) - state.committed)
                state.reserve(step)
                for position in range(state.committed, state.committed + step):
                    block = int(state.block_table[position // BLOCK_TOKENS])
                    assert self.pool.private(block)
                    self.memory.write(block, position % BLOCK_TOKENS, tokens[position])
                state.commit(step)
                cursor = self.cache.publish(cursor, state, tokens, partial=False)
        except CapacityError:
            self.leave(state, cursor, tokens)
            raise
        self.check(state, tokens)
        return report, state, cursor

    def check(self, state: SequenceState, tokens: list[int]) -> None:
        stored = [
            self.memory.read(int(state.block_table[p // BLOCK_TOKENS]), p % BLOCK_TOKENS)
            for p in range(state.committed)
        ]
        assert stored == tokens[: state.committed]

    def leave(self, state, cursor, tokens) -> None:
        self.cache.publish(cursor, state, tokens, partial=True)
        state.release()

    def ask(self, tokens: list[int]):
        report, state, cursor = self.compute(tokens)
        self.leave(state, cursor, tokens)
        return report


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def text(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1000) for _ in range(length)]


@st.composite
def texts(draw):
    """Texts that share beginnings of any length, down to within a block."""
    made: list[list[int]] = []
    for _ in range(draw(st.integers(1, 12))):
        base = draw(st.sampled_from(made)) if made else []
        keep = draw(st.integers(0, len(base)))
        tail = draw(st.lists(st.integers(0, 2), min_size=1, max_size=40))
        made.append(base[:keep] + tail)
    return made
