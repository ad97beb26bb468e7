"""Any order of reserve, commit, fork and release: blocks are conserved and contents stay apart."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from quickdraft.errors import CapacityError
from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.state.blocks import BlockPool
from quickdraft.state.sequence import SequenceState, blocks_for

BLOCKS = 9


class Sequences(RuleBasedStateMachine):
    """Sequences over one small pool, each with the tokens it should hold; memory holds the truth."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[list[int | None]] = [[None] * BLOCK_TOKENS for _ in range(BLOCKS)]
        self.pool = BlockPool(BLOCKS, self.poison)
        self.alive: list[tuple[SequenceState, list[int]]] = []
        self.next_token = 0

    def poison(self, block: int) -> None:
        self.memory[block] = [None] * BLOCK_TOKENS

    def write(self, state: SequenceState, count: int) -> list[int]:
        """Pending rows write fresh tokens into their slots."""
        written = []
        for position in range(state.committed, state.committed + count):
            block, slot = state.block_table[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            assert self.pool.owners(block) == 1, "a shared block was written"
            self.memory[block][slot] = self.next_token
            written.append(self.next_token)
            self.next_token += 1
        return written

    @rule(target=sequences)
    def start(self):
        pair = (SequenceState(self.pool), [])
        self.alive.append(pair)
        return pair

    @rule(pair=sequences, count=st.integers(0, 40), share=st.floats(0, 1))
    def step(self, pair, count: int, share: float) -> None:
        state, tokens = pair
        before = (self.pool.free, state.committed, state.block_table.tolist())
        try:
            state.reserve(count)
        except CapacityError:
            assert before == (self.pool.free, state.committed, state.block_table.tolist())
            assert blocks_for(state.committed + count) - state.blocks > self.pool.free
            return
        written = self.write(state, count)
        keep = round(share * count)
        state.commit(keep)
        tokens += written[:keep]

    @rule(target=sequences, pair=sequences)
    def fork(self, pair):
        state, tokens = pair
        try:
            twin = state.fork(self.copy)
        except CapacityError:
            return pair
        self.alive.append((twin, list(tokens)))
        return self.alive[-1]

    def copy(self, source: int, target: int) -> None:
        self.memory[target] = list(self.memory[source])

    @rule(pair=consumes(sequences))
    def release(self, pair) -> None:
        pair[0].release()
        pair[0].release()
        pair[1].clear()

    @invariant()
    def contents_are_their_own(self) -> None:
        for state, tokens in self.alive:
            assert state.committed == len(tokens)
            assert state.blocks == blocks_for(len(tokens))
            table = state.block_table
            stored = [self.memory[table[p // BLOCK_TOKENS]][p % BLOCK_TOKENS] for p in range(len(tokens))]
            assert stored == tokens

    @invariant()
    def blocks_are_conserved(self) -> None:
        held: dict[int, int] = {}
        for state, _ in self.alive:
            for block in state.block_table.tolist():
                held[block] = held.get(block, 0) + 1
        assert [self.pool.owners(block) for block in range(BLOCKS)] == [held.get(b, 0) for b in range(BLOCKS)]
        assert self.pool.free == BLOCKS - len(held)


Sequences.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestSequences = Sequences.TestCase
