"""check_batch: the one statement of what a valid step description is, for every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.interface import BLOCK_TOKENS


def check_states(
    row_starts: NDArray[Any],
    slots: NDArray[Any] | None,
    replay: NDArray[Any] | None,
    drafted: NDArray[Any] | None,
    seen_from: NDArray[Any] | None,
    positions: NDArray[Any],
) -> None:
    """Raise ValueError unless what is stated per sequence fits the sequences of a step (see Batch.set)."""
    sequences = len(row_starts) - 1
    if seen_from is not None:
        firsts = positions[row_starts[:-1]]
        if len(seen_from) != sequences or (seen_from < 0).any() or (seen_from > firsts).any():
            raise ValueError(f"seen from {seen_from.tolist()}; expected 0..first position, {firsts.tolist()}")
    if slots is None:
        if replay is not None or drafted is not None:
            raise ValueError("replay or drafted without slots")
        return
    if any(len(part) != sequences for part in (slots, replay, drafted) if part is not None):
        raise ValueError(f"slots, replay and drafted; expected one of each for {sequences} sequences")
    if slots.min() < 0 or len(set(slots.tolist())) != sequences:
        raise ValueError(f"slots {slots.tolist()}; expected one of its own for each sequence")
    if replay is not None and replay.min() < 0:
        raise ValueError(f"replay {replay.tolist()}; expected 0 or more")
    if drafted is not None and ((drafted < 0) | (drafted > np.diff(row_starts))).any():
        raise ValueError(f"drafted {drafted.tolist()}; expected 0..rows of the sequence")


def check_batch(
    tokens: NDArray[Any],
    positions: NDArray[Any],
    row_starts: NDArray[Any],
    block_tables: NDArray[Any],
    wanted: NDArray[Any],
    limits: tuple[int, int, int, int, int],
) -> None:
    """Raise ValueError unless the arrays describe a step within (rows, sequences, table width, pool blocks,
    vocabulary).

    Kernels trust what passes here, so every index a kernel forms is covered.
    """
    max_rows, max_sequences, table_width, pool_blocks, vocabulary = limits
    count, sequences = len(tokens), len(row_starts) - 1
    if not 1 <= count <= max_rows or len(positions) != count:
        raise ValueError(f"{count} tokens and {len(positions)} positions; expected 1..{max_rows} of each")
    if not 1 <= sequences <= max_sequences or block_tables.ndim != 2 or len(block_tables) != sequences:
        raise ValueError(f"{sequences} sequences; expected 1..{max_sequences} with one block table each")
    if block_tables.shape[1] > table_width:
        raise ValueError(f"block tables of {block_tables.shape[1]}; expected at most {table_width}")
    if row_starts[0] != 0 or row_starts[-1] != count or (np.diff(row_starts) < 1).any():
        raise ValueError(f"row_starts {row_starts.tolist()}; expected increasing from 0 to {count}")
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ValueError(f"token ids {tokens.min()}..{tokens.max()}; expected 0..{vocabulary - 1}")
    if len(wanted) and (wanted[0] < 0 or wanted[-1] >= count or (np.diff(wanted) < 1).any()):
        raise ValueError(f"wanted rows {wanted.tolist()}; expected increasing in 0..{count - 1}")
    for sequence in range(sequences):
        mine = positions[row_starts[sequence] : row_starts[sequence + 1]]
        if mine[0] < 0 or (np.diff(mine) != 1).any():
            raise ValueError(f"positions {mine.tolist()[:8]}...; expected consecutive from 0 or more")
        used = int(mine[-1]) // BLOCK_TOKENS + 1
        if used > block_tables.shape[1] or block_tables[sequence, :used].min() < 0:
            raise ValueError(f"position {int(mine[-1])} lies beyond the sequence's block table")
        if block_tables[sequence, :used].max() >= pool_blocks:
            raise ValueError(f"block table names a block beyond the pool of {pool_blocks}")
