"""Recurrent layers in numpy: convolution window, gated delta rule row by row, and in chunks.

`ReferenceRecurrent` keeps float32 states like any backend; arithmetic between two roundings of the
state is float64. The chunk form is for parity only: no backend may use it where bits are promised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quickdraft.ops.recurrent import L2_EPS, RecurrentShape, key_heads_of
from quickdraft.ops.reference.rows import rms_norm

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


def sigmoid(x: NDArray[Any]) -> Float64:
    """1 / (1 + exp(-x)) in float64."""
    with np.errstate(over="ignore"):
        return 1.0 / (1.0 + np.exp(-x.astype(np.float64)))


def gated_norm(x: Float32, gate: Float32, weight: Float32, eps: float) -> Float32:
    """rms_norm of each head of x [T, H * len(weight)], times silu(gate)."""
    normed = rms_norm(x.reshape(-1, len(weight)), weight, eps).reshape(x.shape)
    return (normed * gate * sigmoid(gate)).astype(np.float32)


def unit(x: Float32, scale: float) -> Float64:
    """x [..., D] * scale / sqrt(sum x^2 + 1e-6), rounded to float32 as the history keeps it."""
    wide = x.astype(np.float64)
    normed = wide * scale / np.sqrt((wide * wide).sum(axis=-1, keepdims=True) + L2_EPS)
    rounded: Float64 = normed.astype(np.float32).astype(np.float64)
    return rounded


def delta_row(state: Float64, q: Float64, k: Float64, v: Float64, beta: Float64, keep: Float64) -> Any:
    """One row of all value heads: the new state [Hv, Dk, Dv] and the output [Hv, Dv]; q, k [Hv, Dk]."""
    held = np.einsum("hkv,hk->hv", state, k)
    update = beta[:, None] * (v - keep[:, None] * held)
    new = keep[:, None, None] * state + k[:, :, None] * update[:, None, :]
    return new, np.einsum("hkv,hk->hv", new, q)


def delta_chunk(state: Float64, q: Float64, k: Float64, v: Float64, beta: Float64, log_keep: Float64) -> Any:
    """The same for C rows at once (q, k [Hv, C, Dk], v [Hv, C, Dv], beta, log_keep [Hv, C]): the state after
    them and outputs [Hv, C, Dv]. A unit triangular system per head replaces the recurrence."""
    total = np.cumsum(log_keep, axis=1)
    decay = np.tril(np.exp(np.minimum(total[:, :, None] - total[:, None, :], 0.0)))
    system = np.tril(beta[:, :, None] * (k @ k.transpose(0, 2, 1)) * decay, -1) + np.eye(q.shape[1])
    from_state = beta[:, :, None] * np.exp(total)[:, :, None] * k
    update = np.linalg.solve(system, beta[:, :, None] * v - from_state @ state)
    out = (np.exp(total)[:, :, None] * q) @ state + ((q @ k.transpose(0, 2, 1)) * decay) @ update
    left = np.exp(total[:, -1:] - total)[:, :, None] * k
    return np.exp(total[:, -1])[:, None, None] * state + left.transpose(0, 2, 1) @ update, out


class ReferenceRecurrent:
    """See ops.interface.RecurrentCache."""

    checkpoints_in = "memory"

    def __init__(
        self, layers: int, slots: int, sequences: int, shape: RecurrentShape, max_pending: int
    ) -> None:
        self.slots, self.sequences, self.max_pending, self.shape = slots, sequences, max_pending, shape
        self.layers = layers
        square = shape.heads * shape.key_dim * shape.value_dim
        self.states = np.zeros((slots, layers, square + shape.window * shape.channels), np.float32)
        self.inputs: dict[tuple[int, int], Float32] = {}  # (slot, layer) -> rows before the convolution
        self.rows: dict[tuple[int, int], list[Any]] = {}  # (slot, layer) -> (k, v, beta, keep) of each row
        self.bytes_per_slot = self.states.nbytes // max(slots, 1)

    def clear(self, slot: int) -> None:
        self.states[slot] = 0.0

    def copy(self, source: int, target: int) -> None:
        self.states[target] = self.states[source]

    def settle(self, slot: int, rows: int) -> None:
        self.check(slot, rows)
        for layer in range(self.layers if rows else 0):
            part = LayerPart(self, slot, layer, 0)
            part.shift(self.inputs[slot, layer][:rows])
            part.replay(rows)

    def views(self, slot: int) -> list[memoryview]:
        return [self.states[slot].reshape(-1).view(np.uint8).data]

    room = views

    def filled(self, slot: int) -> None:
        pass

    def check(self, slot: int, pending: int) -> None:
        """ValueError unless this slot may have so many pending rows."""
        if not 0 <= slot < self.slots or (pending and slot >= self.sequences):
            raise ValueError(f"slot {slot} with {pending} pending rows; {self.sequences} of {self.slots} may")
        if not 0 <= pending <= self.max_pending:
            raise ValueError(f"{pending} pending rows; expected 0..{self.max_pending}")

    def parts(self, batch: Any, layer: int) -> Iterator[tuple[slice, LayerPart]]:
        """Rows of each sequence and its part of a layer."""
        if batch.slots is None:
            raise ValueError("the step names no slots")
        for index, slot in enumerate(batch.slots.tolist()):
            replay, drafted = int(batch.replay[index]), int(batch.drafted[index])
            self.check(slot, max(replay, drafted))
            rows = slice(int(batch.row_starts[index]), int(batch.row_starts[index + 1]))
            yield rows, LayerPart(self, slot, layer, drafted, replay)


class LayerPart:
    """One layer of one slot in a step: state and window as views, `drafted` pending rows at the end."""

    def __init__(self, cache: ReferenceRecurrent, slot: int, layer: int, drafted: int, replay: int = 0):
        self.cache, self.key, self.drafted, self.replayed = cache, (slot, layer), drafted, replay
        shape, flat = cache.shape, cache.states[slot, layer]
        square = shape.heads * shape.key_dim * shape.value_dim
        self.state = flat[:square].reshape(shape.heads, shape.key_dim, shape.value_dim)
        self.window = flat[square:].reshape(shape.window, shape.channels)

    def shift(self, rows: Float32) -> None:
        """The window after these rows."""
        self.window[:] = np.concatenate([self.window, rows])[len(rows) :]

    def replay(self, rows: int) -> None:
        for k, v, beta, keep in self.cache.rows[self.key][:rows] if rows else ():
            self.state[:] = delta_row(self.state.astype(np.float64), k, k, v, beta, keep)[0]

    def causal_conv(self, x: Float32, weight: Float32) -> Float32:
        if self.replayed:
            self.shift(self.cache.inputs[self.key][: self.replayed])
        taps = len(weight)
        past = np.concatenate([self.window, x]).astype(np.float64)
        mixed = sum(past[j : j + len(x)] * weight[j] for j in range(taps))
        certain = len(x) - self.drafted
        self.shift(x[:certain])
        if self.drafted:
            self.cache.inputs[self.key] = x[certain:].copy()
        return np.asarray(mixed * sigmoid(np.asarray(mixed)), np.float32)

    def gated_delta(self, qkv: Float32, gates: Float32, rate: Float32, bias: Float32) -> Float32:
        self.replay(self.replayed)
        q, k, v, beta, log_keep = split_rows(qkv, gates, rate, bias, self.cache.shape)
        keep = np.exp(log_keep)
        certain, state = len(qkv) - self.drafted, self.state.astype(np.float64)
        out = np.empty((len(qkv), self.state.shape[0] * self.state.shape[2]), np.float32)
        for row in range(len(qkv)):
            state, mixed = delta_row(state, q[row], k[row], v[row], beta[row], keep[row])
            state = state.astype(np.float32).astype(np.float64)
            out[row] = mixed.ravel()
            if row < certain:
                self.state[:] = state
        if self.drafted:
            self.cache.rows[self.key] = [
                (k[row].copy(), v[row].copy(), beta[row], keep[row]) for row in range(certain, len(qkv))
            ]
        return out


def split_rows(
    qkv: Float32, gates: Float32, rate: Float32, bias: Float32, shape: RecurrentShape
) -> tuple[Float64, Float64, Float64, Float64, Float64]:
    """What the rule takes: q, k [T, Hv, Dk] normalised, v [T, Hv, Dv], beta and log(keep) [T, Hv]."""
    heads, key_heads, rows = shape.heads, key_heads_of(shape), len(qkv)
    keys = key_heads * shape.key_dim

    def spread(part: Float32, scale: float) -> Float64:
        each = unit(part.reshape(rows, key_heads, shape.key_dim), scale)
        return np.repeat(each, heads // key_heads, axis=1)

    q, k = spread(qkv[:, :keys], shape.key_dim**-0.5), spread(qkv[:, keys : 2 * keys], 1.0)
    v = qkv[:, 2 * keys :].reshape(rows, heads, shape.value_dim).astype(np.float64)
    a = gates[:, heads:].astype(np.float64) + bias
    return q, k, v, sigmoid(gates[:, :heads]), rate.astype(np.float64) * np.logaddexp(0.0, a)
