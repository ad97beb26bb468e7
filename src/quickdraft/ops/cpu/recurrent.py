"""CpuRecurrent: states and history of recurrent layers as the compiled module reads them.

Owns their layout (csrc/recurrent.h says the same); memory comes from the backend. Knows no step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.cpu import _cpu  # type: ignore[attr-defined]
from quickdraft.ops.recurrent import RecurrentCache, RecurrentShape, key_heads_of


def layer_floats(shape: RecurrentShape) -> int:
    """float32 numbers of one layer in a slot: S, then the window."""
    return shape.heads * shape.key_dim * shape.value_dim + shape.window * shape.channels


def history_floats(shape: RecurrentShape) -> int:
    """float32 numbers of one pending row in one layer: conv input, keys, values, beta and keep."""
    return shape.channels + key_heads_of(shape) * shape.key_dim + shape.heads * (shape.value_dim + 2)


class CpuRecurrent:
    """See ops.interface.RecurrentCache; memory that `zeros` makes is taken when it is touched."""

    checkpoints_in = "memory"

    def __init__(
        self,
        engine: Any,
        zeros: Callable[[tuple[int, ...]], NDArray[np.float32]],
        layers: int,
        slots: int,
        sequences: int,
        shape: RecurrentShape,
        max_pending: int,
    ) -> None:
        self._engine = engine
        self.slots, self.sequences, self.max_pending = slots, sequences, max_pending
        self._states = states = zeros((slots, layers, layer_floats(shape)))
        history = zeros((sequences, layers, max_pending, history_floats(shape)))
        self.square_floats = shape.heads * shape.key_dim * shape.value_dim  # of S in one layer
        self.bytes_per_slot = states.nbytes // max(self.slots, 1)
        self.raw = _cpu.Recurrent(
            states, history, key_heads_of(shape), shape.heads, shape.key_dim, shape.value_dim
        )

    def clear(self, slot: int) -> None:
        self._states[slot] = 0.0

    def copy(self, source: int, target: int) -> None:
        self._states[target] = self._states[source]

    def settle(self, slot: int, rows: int) -> None:
        if rows:
            _cpu.Program(self._engine, [_cpu.settle(self._engine, self.raw, slot, rows)]).run()

    def views(self, slot: int) -> list[memoryview]:
        return [self._states[slot].reshape(-1).view(np.uint8).data]

    room = views

    def filled(self, slot: int) -> None:
        pass


def raw_state(state: RecurrentCache) -> Any:
    """The state as the module takes it."""
    if not isinstance(state, CpuRecurrent):
        raise TypeError(f"a recurrent state of another backend: {type(state).__name__}")
    return state.raw
