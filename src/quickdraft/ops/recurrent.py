"""RecurrentCache: what a backend keeps for layers whose state does not grow with the text.

Part of ops/interface.py, from where it is imported. Knows no model, no scheduler and no checkpoint.
"""

from __future__ import annotations

from typing import Final, Protocol

L2_EPS: Final = 1e-6  # inside the root of gated_delta's l2 norm, added to the sum


class RecurrentShape(Protocol):
    """Sizes of a recurrent layer: a state S [heads, key_dim, value_dim], and the last `window` inputs of
    `channels` convolutions, which are queries, keys and values: channels = 2 Hk key_dim + heads value_dim."""

    @property
    def heads(self) -> int: ...  # value heads, Hv
    @property
    def key_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def window(self) -> int: ...  # 3


def key_heads_of(shape: RecurrentShape) -> int:
    """Hk, of which each serves heads / Hk value heads."""
    return (shape.channels - shape.heads * shape.value_dim) // (2 * shape.key_dim)


class RecurrentCache(Protocol):
    """States of all recurrent layers, one slot per sequence or checkpoint, all float32, zero at first.

    Slots 0..sequences-1 are sequences' and have a history; the others are checkpoints', which no step may
    name: on a card they lie in the host's memory. In a step, the
    last `drafted` rows of a sequence are *pending*, the others *certain*. First the first `replay` rows
    of the history advance the slot, then the certain rows do; pending rows go on from there on a copy,
    and leave their inputs in the history, from its start. So the next step, or `settle`, keeps as many
    of them as were accepted, by the same function of the same inputs, hence with the same bits.
    """

    @property
    def slots(self) -> int: ...
    @property
    def sequences(self) -> int: ...
    @property
    def max_pending(self) -> int: ...  # rows of history per sequence
    @property
    def bytes_per_slot(self) -> int: ...
    @property
    def checkpoints_in(self) -> str: ...  # where their slots lie, for people
    def clear(self, slot: int) -> None:
        """The state before the first token."""

    def copy(self, source: int, target: int) -> None:
        """The slot alone; a source with rows to replay is settled first."""

    def settle(self, slot: int, rows: int) -> None:
        """Apply the first `rows` pending rows now instead of in the next step."""

    def views(self, slot: int) -> list[memoryview]:
        """The bytes of a slot, to read: one run, layer by layer S, then window. Its memory, or a copy where
        the host cannot reach that."""

    def room(self, slot: int) -> list[memoryview]:
        """Where to write what a slot is to hold: its memory, or memory that `filled` moves there. Only one
        slot at a time."""

    def filled(self, slot: int) -> None:
        """What was written to `room(slot)` is there."""
