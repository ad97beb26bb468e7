"""State by hand: bytes of layers, budgets, blocks, the two halves of a sequence."""

from __future__ import annotations

import pytest

from quickdraft.errors import CapacityError, ConfigError
from quickdraft.ops.reference.backend import ReferenceOps
from quickdraft.state.blocks import BlockPool
from quickdraft.state.budget import MAX_CHECKPOINTS, checkpoint_slots, kv_blocks
from quickdraft.state.sequence import SequenceState, blocks_for
from quickdraft.state.slots import SlotPool
from quickdraft.state.spec import PagedKV, Recurrent, bytes_per_block, bytes_per_sequence
from tests.support.toy_recurrent import ToyRecurrent


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bytes_of_a_block_are_what_the_cache_allocates(dtype) -> None:
    cache = ReferenceOps().kv_cache(layers=3, blocks=2, kv_heads=3, head_dim=64, dtype=dtype)
    assert bytes_per_block([PagedKV(3, 64, dtype)] * 3) == cache.bytes_per_block


def test_a_hybrid_counts_each_kind_where_it_belongs() -> None:
    layers = [Recurrent(heads=2, key_dim=4, value_dim=8, channels=10, window=3), PagedKV(1, 8, "float16")]
    assert bytes_per_block(layers) == 2 * 8 * 16 * 2
    assert bytes_per_sequence(layers) == 4 * (2 * 4 * 8 + 10 * 3)


def test_a_budget_is_whole_blocks() -> None:
    assert kv_blocks(100, 1099) == 10
    with pytest.raises(ConfigError, match="99 bytes"):
        kv_blocks(100, 99)


def test_a_short_pool_changes_nothing() -> None:
    pool = BlockPool(4)
    state = SequenceState(pool)
    state.reserve(33)
    state.commit(33)
    table = state.block_table.tolist()
    with pytest.raises(CapacityError):
        state.reserve(40)
    assert (pool.free, state.committed, state.pending) == (1, 33, 0)
    assert state.block_table.tolist() == table


def test_commit_frees_what_only_rejected_rows_needed() -> None:
    freed: list[int] = []
    pool = BlockPool(8, freed.append)
    state = SequenceState(pool)
    state.reserve(16)
    state.commit(16)
    state.reserve(40)
    table = state.block_table.tolist()
    state.commit(1)
    assert state.block_table.tolist() == table[:2]
    assert sorted(freed) == sorted(table[2:])
    state.reserve(5)
    state.commit(0)
    assert (state.committed, state.blocks) == (17, 2)


def test_a_fork_shares_full_blocks_and_copies_the_partial_one() -> None:
    freed: list[int] = []
    copied: list[tuple[int, int]] = []
    pool = BlockPool(6, freed.append)
    state = SequenceState(pool)
    state.reserve(40)
    state.commit(40)
    twin = state.fork(lambda source, target: copied.append((source, target)))
    mine, other = state.block_table.tolist(), twin.block_table.tolist()
    assert mine[:2] == other[:2] and mine[2] != other[2]
    assert copied == [(mine[2], other[2])]
    assert [pool.owners(block) for block in mine] == [2, 2, 1]
    state.release()
    assert freed == [mine[2]], "a shared block was freed under the twin"
    twin.release()
    assert pool.free == 6


def test_a_fork_without_room_changes_nothing() -> None:
    pool = BlockPool(1)
    state = SequenceState(pool)
    state.reserve(3)
    state.commit(3)
    with pytest.raises(CapacityError):
        state.fork(lambda source, target: None)
    assert pool.owners(0) == 1
    state.reserve(13)  # up to the block's end
    state.commit(13)
    twin = state.fork(lambda source, target: pytest.fail("nothing to copy"))
    assert twin.block_table.tolist() == [0] and pool.owners(0) == 2


def test_double_free_and_misuse_are_detected() -> None:
    pool = BlockPool(2)
    taken = pool.take(1)
    pool.give_back(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.give_back(taken)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(taken[0])
    state = SequenceState(pool)
    state.reserve(1)
    with pytest.raises(AssertionError, match="not committed"):
        state.reserve(1)
    with pytest.raises(AssertionError, match="commit 2 of 1"):
        state.commit(2)
    state.release()
    state.release()
    assert pool.free == 2


def test_checkpoints_are_whole_states() -> None:
    assert checkpoint_slots(100, 1099) == 10
    assert checkpoint_slots(1, 1 << 40) == MAX_CHECKPOINTS
    with pytest.raises(ConfigError, match="99 bytes"):
        checkpoint_slots(100, 99)


def test_slots_are_conserved_and_of_two_kinds() -> None:
    freed: list[int] = []
    pool = SlotPool(ToyRecurrent(2, 3), freed.append)
    sequences = [pool.take_sequence() for _ in range(2)]
    checkpoints = [pool.take_checkpoint() for _ in range(3)]
    assert sequences == [0, 1] and sorted(checkpoints) == [2, 3, 4]
    assert pool.take_checkpoint() is None
    with pytest.raises(CapacityError, match="at most 2"):
        pool.take_sequence()
    for slot in (4, 1):
        pool.give_back(slot)
    assert (pool.free_sequences, pool.free_checkpoints, freed) == (1, 1, [4, 1])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.give_back(1)


def test_what_is_kept_of_a_draft_is_replayed() -> None:
    slots = SlotPool(ToyRecurrent(1, 0))
    state = SequenceState(BlockPool(8), slots)
    state.begin()
    for count, drafted, keep, replay in [
        (20, 0, 20, 0),
        (8, 7, 4, 3),
        (6, 5, 1, 0),
        (3, 2, 3, 2),
        (1, 0, 1, 0),
    ]:
        state.reserve(count, drafted)
        state.commit(keep)
        assert state.replay == replay
    state.release()
    state.release()
    assert slots.free_sequences == 1 and state.slot == -1


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens) == blocks
