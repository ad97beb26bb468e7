"""Steps through the recurrent ops: one layer stack of random rows, any backend, and what it leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quickdraft.state.spec import Recurrent

LAYERS = 2


@dataclass(frozen=True, slots=True)
class Heads:
    """Key heads, value heads, and their sizes."""

    keys: int = 2
    values: int = 6
    key_dim: int = 16
    value_dim: int = 40  # one tile of 32 columns and one of 8

    @property
    def spec(self) -> Recurrent:
        channels = 2 * self.keys * self.key_dim + self.values * self.value_dim
        return Recurrent(self.values, self.key_dim, self.value_dim, channels, 3)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one sequence in a step: from its own random rows, `start` on."""

    slot: int
    start: int
    count: int
    drafted: int = 0
    replay: int = 0


class World:
    """A backend, one recurrent cache and the random inputs of each sequence (by its slot)."""

    def __init__(self, ops: Any, heads: Heads = Heads(), *, rows: int = 160, slots: int = 6) -> None:
        self.ops, self.heads, spec = ops, heads, heads.spec
        self.state = ops.recurrent_cache(LAYERS, slots, slots - 2, spec, 15)
        rng = np.random.default_rng([heads.key_dim, heads.value_dim, 7])

        def random(*shape: int, scale: float = 1.0) -> NDArray[np.float32]:
            return (rng.standard_normal(shape) * scale).astype(np.float32)

        self.x = random(slots, 200, spec.channels)
        self.gates = random(slots, 200, 2 * heads.values, scale=3.0)
        self.gate = random(slots, 200, heads.values * heads.value_dim, scale=3.0)
        constants = [random(4, spec.channels, scale=0.5), -np.exp(random(heads.values)), random(heads.values)]
        self.weight, self.rate, self.bias = (ops.constant(values) for values in constants)
        self.norm = ops.constant(random(heads.value_dim))
        self.batch = ops.batch(rows, slots, 16, 16 * slots, 8)
        self.buffers = {
            "x": ops.empty(rows, spec.channels),
            "mixed": ops.empty(rows, spec.channels),
            "gates": ops.empty(rows, 2 * heads.values),
            "gate": ops.empty(rows, self.gate.shape[2]),
            "out": ops.empty(rows, self.gate.shape[2]),
            "normed": ops.empty(rows, self.gate.shape[2]),
            "gated": ops.empty(rows, self.gate.shape[2]),
        }
        self.program = ops.record(self._forward)

    def _forward(self) -> None:
        ops, b = self.ops, self.buffers
        for layer in range(LAYERS):
            ops.causal_conv(self.batch, b["x"], self.weight, self.state, layer, b["mixed"])
            ops.gated_delta(
                self.batch, b["mixed"], b["gates"], self.rate, self.bias, self.state, layer, b["out"]
            )
        ops.gated_norm(self.batch.rows, b["out"], b["gate"], self.norm, 1e-6, b["normed"])
        ops.sigmoid_gate(self.batch.rows, b["out"], b["gate"], b["gated"])

    def step(self, *parts: Part) -> dict[str, NDArray[np.float32]]:
        """Run these rows, and give what the ops wrote, rows in the order of the parts."""
        starts = np.cumsum([0, *(part.count for part in parts)]).astype(np.int32)
        for part, first in zip(parts, starts, strict=False):
            rows, source = slice(first, first + part.count), slice(part.start, part.start + part.count)
            for name, values in (("x", self.x), ("gates", self.gates), ("gate", self.gate)):
                self.buffers[name][rows] = values[part.slot % len(values), source]
        positions = np.concatenate([np.arange(p.start, p.start + p.count) for p in parts])
        tables = np.arange(16 * len(parts), dtype=np.int32).reshape(len(parts), 16)
        numbers = np.array([(p.slot, p.replay, p.drafted) for p in parts], np.int32)
        self.batch.set(
            np.zeros(starts[-1], np.int32),
            positions.astype(np.int32),
            starts,
            tables,
            np.zeros(0, np.int32),
            *(np.ascontiguousarray(column) for column in numbers.T),
        )
        self.program.run()
        wanted = ("mixed", "out", "normed", "gated")
        return {name: self.buffers[name][: starts[-1]].copy() for name in wanted}

    def bytes_of(self, slot: int) -> bytes:
        return b"".join(bytes(view) for view in self.state.views(slot))

    def floats_of(self, slot: int) -> NDArray[np.float32]:
        return np.frombuffer(self.bytes_of(slot), np.float32)
