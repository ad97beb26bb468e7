"""The step's description on the card: one array of int32, of which what kernels read are parts.

A step is written down in pinned memory and crosses with one copy that waits for nothing. What grids are
sized by stays on the host: counts, the longest sequence, how many spans of positions there are. A captured
program sees these as numbers of its shape, everything else in the tensors. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quickdraft.ops.batch import check_batch, check_states
from quickdraft.ops.cuda.launch import ceil_divide
from quickdraft.ops.interface import BLOCK_TOKENS

PADDED_ROWS: Final = (0, 1, 2, 4, 8, 16, 32, 64)
SPANS_GROW: Final = 4  # spans of a captured shape: 1, 4, 16, ..; programs behind the last one end at once
ALIGNED: Final = 4  # numbers: parts begin at multiples of 16 bytes, which kernels are compiled for


class Count:
    """See ops.interface.RowCount. `batch`: whose rows they are, and whether those wanted."""

    __slots__ = ("batch", "count", "wanted")

    def __init__(self, batch: CudaBatch | None = None, *, wanted: bool = False) -> None:
        self.count, self.batch, self.wanted = 0, batch, wanted


class Shape(NamedTuple):
    """All that captured starts depend on beside the contents of tensors: numbers, padded but for the
    sequences."""

    rows: int
    wanted: int
    sequences: int
    spans: int


class Staging:
    """int32 numbers on their way to the card. Pinned there, so that a copy waits neither for what the card
    computes nor makes the host wait; `numbers` may be written once `free` has returned."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._memory = torch.zeros(count, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.numbers: NDArray[np.int32] = self._memory.numpy()
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def free(self) -> None:
        """Wait until the last copy has read them."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, target: torch.Tensor, count: int) -> None:
        """Copy the first `count` into `target`, in the order of what the card is asked to do."""
        target[:count].copy_(self._memory[:count], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


def padded_rows(count: int) -> int | None:
    """The row count of the next captured shape; None beyond the largest."""
    return next((rows for rows in PADDED_ROWS if rows >= count), None)


def all_spans(most: int) -> list[int]:
    """The spans of all captured shapes, up to `most`."""
    found = [1]
    while found[-1] < most:
        found.append(min(found[-1] * SPANS_GROW, most))
    return found


class CudaBatch:
    """See ops.interface.Batch. Tensors have their full size from the start; `span`: positions that attention
    reduces in one piece."""

    def __init__(
        self,
        device: torch.device,
        max_rows: int,
        max_sequences: int,
        table_width: int,
        pool_blocks: int,
        vocabulary: int,
        span: int,
    ) -> None:
        self.limits = (max_rows, max_sequences, table_width, pool_blocks, vocabulary)
        self.rows, self.wanted, self.span = Count(self), Count(self, wanted=True), span
        sizes = [max_sequences + 1, *[max_sequences] * 4, *[max_rows] * 4, max_sequences * table_width]
        places = np.cumsum([0, *(ceil_divide(size, ALIGNED) * ALIGNED for size in sizes)]).tolist()
        self._staging = Staging(places[-1], device)
        self._packed = torch.zeros(places[-1], dtype=torch.int32, device=device)
        self._tables_at = places[-2]
        pieces = [slice(at, at + size) for at, size in zip(places, sizes, strict=False)]
        self._host = [self._staging.numbers[piece] for piece in pieces]
        parts = [self._packed[piece] for piece in pieces]
        self.row_starts, self.slots, self.replay, self.drafted, self.seen_from = parts[:5]
        self.tokens, self.positions, self.sequence_of, self.wanted_rows, tables = parts[5:]
        self.block_tables = tables.view(max_sequences, table_width)
        self.starts: list[int] = [0]  # row_starts on the host
        self.has_slots, self.spans = False, 0  # `spans`: from position 0 to the last of any sequence
        self._spans_of: list[int] = []  # the same of each sequence
        self.slot_numbers: list[tuple[int, int, int]] = []  # slot, replay, drafted of each sequence
        self.longest, self.most_pending = 0, 0  # rows, and pending rows, of the sequence with most of them

    @property
    def sequences(self) -> int:
        return len(self.starts) - 1

    def set(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        row_starts: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        wanted: NDArray[np.int32],
        slots: NDArray[np.int32] | None = None,
        replay: NDArray[np.int32] | None = None,
        drafted: NDArray[np.int32] | None = None,
        seen_from: NDArray[np.int32] | None = None,
    ) -> None:
        check_batch(tokens, positions, row_starts, block_tables, wanted, self.limits)
        check_states(row_starts, slots, replay, drafted, seen_from, positions)
        sequences = len(row_starts) - 1
        none = np.zeros(sequences, np.int32)
        self.has_slots = slots is not None
        slots, replay = none if slots is None else slots, none if replay is None else replay
        drafted, seen_from = none if drafted is None else drafted, none if seen_from is None else seen_from
        owner = np.repeat(np.arange(sequences, dtype=np.int32), np.diff(row_starts))
        self._staging.free()
        values = row_starts, slots, replay, drafted, seen_from, tokens, positions, owner, wanted
        for target, numbers in zip(self._host, values, strict=False):
            target[: len(numbers)] = numbers
            # a padded row is token 0 at position 0 of the first sequence
            target[len(numbers) : padded_rows(len(numbers))] = 0
        max_sequences, table_width = self.limits[1:3]
        tables = self._host[-1].reshape(max_sequences, table_width)
        tables[:sequences, : block_tables.shape[1]] = block_tables
        self._staging.send(self._packed, self._tables_at + sequences * table_width)
        self.rows.count, self.wanted.count = len(tokens), len(wanted)
        self.starts = [int(start) for start in row_starts]
        self._spans_of = [ceil_divide(int(positions[end - 1]) + 1, self.span) for end in self.starts[1:]]
        self.spans = max(self._spans_of)
        self.longest, self.most_pending = int(np.diff(row_starts).max()), int(drafted.max())
        self.slot_numbers = list(zip(slots.tolist(), replay.tolist(), drafted.tolist(), strict=True))

    def states(self) -> tuple[torch.Tensor, ...]:
        """What recurrent layers read of each sequence: slots, replay, drafted, row starts."""
        return self.slots, self.replay, self.drafted, self.row_starts

    def parts(self) -> list[tuple[range, int, int]]:
        """Rows that attention takes together, of how many sequences, and their spans: all of a step that
        may be captured; of a larger one each sequence by itself, as the longest context would size all."""
        if self.rows.count <= PADDED_ROWS[-1]:
            return [(range(self.rows.count), self.sequences, self.spans)]
        rows = map(range, self.starts, self.starts[1:])
        return [(of, 1, spans) for of, spans in zip(rows, self._spans_of, strict=True)]

    def shape(self) -> Shape | None:
        """The captured shape this step fits in; None: it has too many rows for any."""
        rows, wanted = padded_rows(self.rows.count), padded_rows(self.wanted.count)
        if rows is None or wanted is None or rows > self.limits[0]:
            return None
        return Shape(rows, wanted, self.sequences, self.padded_spans(self.spans))

    def padded_spans(self, spans: int) -> int:
        """The spans of the next captured shape, at most those a block table reaches."""
        most = ceil_divide(self.limits[2] * BLOCK_TOKENS, self.span)
        return next(padded for padded in all_spans(most) if padded >= spans)

    @contextmanager
    def padded(self, shape: Shape) -> Iterator[None]:
        """The counts on the host are those of the shape meanwhile."""
        before = self.rows.count, self.wanted.count, self.longest, self.most_pending, self.spans
        self.rows.count, self.wanted.count, self.spans = shape.rows, shape.wanted, shape.spans
        self.longest = self.most_pending = shape.rows
        try:
            yield
        finally:
            self.rows.count, self.wanted.count, self.longest, self.most_pending, self.spans = before
