"""Recurrent layers on the card: the convolution window, the gated delta rule, and the states behind them.

A state lies as [value heads, value size, key size], so that a warp reads along the keys. The rule runs row
by row for any number of rows, prompts included: the chunk form has other bits, and costs little less here,
as a row's work is a few thousandths of its linears'. One program holds some value rows of one head: it
replays the kept rows of the last step, advances the state by the certain rows and goes on with pending
rows; then their inputs go into the history.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from quickdraft.ops.cuda.batch import CudaBatch
from quickdraft.ops.cuda.buffers import host_view, zeros
from quickdraft.ops.cuda.host_states import HostStates
from quickdraft.ops.cuda.launch import Launcher, ceil_divide, power_of_two
from quickdraft.ops.cuda.numbers import sigmoid_of
from quickdraft.ops.recurrent import L2_EPS, RecurrentCache, RecurrentShape, key_heads_of

CHANNELS = 256  # of a program of the convolution
CONV_ROWS = 16
KEEP_WIDTH = 1024
VALUES = 16  # value rows of a program of the delta rule


@triton.jit
def conv_input(x, windows, slot_at, t, c, inside, replayed, history, first_row, channels):
    """Row t of a sequence's inputs, t from -3 on: behind the window and its replayed rows come the step's."""
    if t >= 0:
        value = tl.load(x + (first_row + t) * channels + c, mask=inside, other=0.0)
    elif t + replayed >= 0:
        value = tl.load(history + (t + replayed) * channels + c, mask=inside, other=0.0)
    else:
        value = tl.load(windows + slot_at + (t + replayed + 3) * channels + c, mask=inside, other=0.0)
    return value


@triton.jit
def convolve(
    x, weight, windows, histories, slots, replay, drafted, row_starts, out, layer, layers, pending, channels,
    window_stride, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """See Ops.causal_conv: some rows and channels of one sequence. The program of its first rows also
    moves the window and writes the history, which no other program reads."""
    sequence, tile = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    inside = c < channels
    first = tl.load(row_starts + sequence)
    count = tl.load(row_starts + sequence + 1) - first
    slot = tl.load(slots + sequence).to(tl.int64)
    kept = tl.load(replay + sequence)
    slot_at = slot * window_stride
    history = histories + (slot * layers + layer) * pending * channels
    w0 = tl.load(weight + c, mask=inside, other=0.0)
    w1 = tl.load(weight + channels + c, mask=inside, other=0.0)
    w2 = tl.load(weight + 2 * channels + c, mask=inside, other=0.0)
    w3 = tl.load(weight + 3 * channels + c, mask=inside, other=0.0)
    start = tile * ROWS
    if start < count:
        a = conv_input(x, windows, slot_at, start - 3, c, inside, kept, history, first, channels)
        b = conv_input(x, windows, slot_at, start - 2, c, inside, kept, history, first, channels)
        d = conv_input(x, windows, slot_at, start - 1, c, inside, kept, history, first, channels)
        for t in range(start, tl.minimum(start + ROWS, count)):
            e = tl.load(x + (first + t) * channels + c, mask=inside, other=0.0)
            mixed = tl.fma(w3, e, tl.fma(w2, d, tl.fma(w1, b, w0 * a)))
            tl.store(out + (first + t) * channels + c, mixed * sigmoid_of(mixed), mask=inside)
            a, b, d = b, d, e
    if tile == 0:
        certain = count - tl.load(drafted + sequence)
        a = conv_input(x, windows, slot_at, certain - 3, c, inside, kept, history, first, channels)
        b = conv_input(x, windows, slot_at, certain - 2, c, inside, kept, history, first, channels)
        d = conv_input(x, windows, slot_at, certain - 1, c, inside, kept, history, first, channels)
        tl.store(windows + slot_at + c, a, mask=inside)
        tl.store(windows + slot_at + channels + c, b, mask=inside)
        tl.store(windows + slot_at + 2 * channels + c, d, mask=inside)
        for t in range(certain, count):
            e = tl.load(x + (first + t) * channels + c, mask=inside, other=0.0)
            tl.store(history + (t - certain) * channels + c, e, mask=inside)


@triton.jit
def delta_row(state, k, v, b, a, rate, eps):
    """The state [V, D] after one row; k as the convolution left it, b and a before their gates."""
    k *= 1.0 / tl.sqrt_rn(tl.sum(k * k, axis=0) + eps)
    softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
    keep = tl.exp(rate * softplus)
    held = tl.sum(state * k[None, :], axis=1)
    update = sigmoid_of(b) * (v - keep * held)
    return keep * state + update[:, None] * k[None, :]


@triton.jit
def delta_rule(
    qkv, gates, rates, biases, states, histories, slots, replay, drafted, row_starts, out,
    layer, layers, pending, heads, key_heads, key_dim, value_dim, state_stride, scale, eps,
    V: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """See Ops.gated_delta: V value rows of one head of one sequence."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    m = tl.program_id(2) * V + tl.arange(0, V)
    d = tl.arange(0, D)
    values_in, keys_in = m < value_dim, d < key_dim
    first = tl.load(row_starts + sequence)
    count = tl.load(row_starts + sequence + 1) - first
    slot = tl.load(slots + sequence).to(tl.int64)
    certain = count - tl.load(drafted + sequence)
    at_key = head // (heads // key_heads) * key_dim + d
    all_keys = key_heads * key_dim
    at_value = all_keys + head * value_dim + m
    width = all_keys + heads * value_dim  # keys and values of a row
    at = states + slot * state_stride + (head * value_dim + m)[:, None] * key_dim + d[None, :]
    inside = values_in[:, None] & keys_in[None, :]
    state = tl.load(at, mask=inside, other=0.0)
    rate, bias = tl.load(rates + head), tl.load(biases + head)
    past = histories + (slot * layers + layer) * pending * (width + 2 * heads)
    for r in range(tl.load(replay + sequence)):
        row = past + r * (width + 2 * heads)
        k = tl.load(row + at_key, mask=keys_in, other=0.0)
        v = tl.load(row + at_value, mask=values_in, other=0.0)
        b, a = tl.load(row + width + head), tl.load(row + width + heads + head)
        state = delta_row(state, k, v, b, a + bias, rate, eps)
    for t in range(count):
        if t == certain:
            tl.store(at, state, mask=inside)
        row = qkv + (first + t).to(tl.int64) * (width + all_keys)
        q = tl.load(row + at_key, mask=keys_in, other=0.0)
        k = tl.load(row + all_keys + at_key, mask=keys_in, other=0.0)
        v = tl.load(row + all_keys + at_value, mask=values_in, other=0.0)
        gate = gates + (first + t) * 2 * heads + head
        state = delta_row(state, k, v, tl.load(gate), tl.load(gate + heads) + bias, rate, eps)
        q *= scale / tl.sqrt_rn(tl.sum(q * q, axis=0) + eps)
        mixed = tl.sum(state * q[None, :], axis=1)
        tl.store(out + (first + t) * heads * value_dim + head * value_dim + m, mixed, mask=values_in)
    if certain == count:
        tl.store(at, state, mask=inside)


@triton.jit
def keep_rows(
    qkv, gates, histories, slots, drafted, row_starts, layer, layers, pending, all_keys, width, gate_width,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Keys, values and gates of the pending rows into the history; after delta_rule, which reads it."""
    sequence, r = tl.program_id(0), tl.program_id(1)
    c = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    kept = tl.load(drafted + sequence)
    row = tl.load(row_starts + sequence + 1) - kept + r
    if r < kept:
        is_gate = c >= width
        value = tl.load(qkv + row.to(tl.int64) * (width + all_keys) + all_keys + c, mask=c < width, other=0.0)
        inside = is_gate & (c < width + gate_width)
        gate = tl.load(gates + row * gate_width + c - width, mask=inside, other=0.0)
        line = (tl.load(slots + sequence).to(tl.int64) * layers + layer) * pending + r
        at = histories + line * (width + gate_width) + c
        tl.store(at, tl.where(is_gate, gate, value), mask=c < width + gate_width)


class CudaRecurrent:
    """See ops.interface.RecurrentCache. A slot is one run of float32: per layer its state, then its
    window. Slots of sequences lie on the device, those of checkpoints in the host's memory."""

    def __init__(
        self, device: torch.device, launcher: Launcher, layers: int, slots: int, sequences: int,
        shape: RecurrentShape, max_pending: int,
    ) -> None:  # fmt: skip
        self.slots, self.sequences, self.max_pending, self.layers = slots, sequences, max_pending, layers
        self.shape, self._launcher = shape, launcher
        self.constants: dict[
            int, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # rate and bias of each layer that ran
        self.square = shape.heads * shape.key_dim * shape.value_dim
        one = layers, self.square + 3 * shape.channels
        self.states = zeros((sequences, *one), torch.float32, device)
        self.kept = HostStates(slots - sequences, one, device)
        self.checkpoints_in = self.kept.where

        def history(width: int) -> torch.Tensor:
            return zeros((sequences, layers, max_pending, width), torch.float32, device)

        self.inputs = history(shape.channels)  # of the convolution
        self.all_keys = key_heads_of(shape) * shape.key_dim
        self.rows = history(shape.channels - self.all_keys + 2 * shape.heads)  # keys, values, gates
        self.bytes_per_slot = 4 * one[0] * one[1]
        self._room: torch.Tensor | None = None  # on the host, of the slot that is being filled

    def _host(self, slot: int) -> torch.Tensor | None:
        """A checkpoint's memory; None for a sequence's slot."""
        return self.kept.host(slot - self.sequences) if slot >= self.sequences else None

    def clear(self, slot: int) -> None:
        host = self._host(slot)
        (self.states[slot] if host is None else host).zero_()

    def copy(self, source: int, target: int) -> None:
        first, last = source - self.sequences, target - self.sequences
        if first < 0 and last < 0:
            self.states[target] = self.states[source]
        elif first < 0:
            self.kept.store(self.states[source], last)
        elif last < 0:
            self.kept.load(first, self.states[target])
        else:
            self.kept.host(last).copy_(self.kept.host(first))

    def settle(self, slot: int, rows: int) -> None:
        """A step of no rows for this slot, which replays."""
        self.check(slot, rows)
        if not rows:
            return
        device = self.states.device

        def ints(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        step = ints(slot), ints(rows), ints(0), ints(0, 0)
        nothing = torch.zeros(4 * self.shape.channels, device=device)
        for layer in range(self.layers):
            self.start_conv(step, nothing, nothing, layer, nothing, 1, 0)
            rate, bias = self.constants[layer]
            self.start_delta(step, nothing, nothing, rate, bias, layer, nothing, 1, 0)

    def views(self, slot: int) -> list[memoryview]:
        host = self._host(slot)
        return _bytes_of(self.states[slot].cpu() if host is None else host)

    def room(self, slot: int) -> list[memoryview]:
        host = self._host(slot)
        self._room = torch.empty_like(self.states[slot], device="cpu") if host is None else host
        return _bytes_of(self._room)

    def filled(self, slot: int) -> None:
        assert self._room is not None, "room comes before filled"
        if slot < self.sequences:
            self.states[slot] = self._room.to(self.states.device)
        self._room = None

    def check(self, slot: int, pending: int) -> None:
        """ValueError unless it is a sequence's slot, as kernels reach no other, with so many pending rows."""
        if not 0 <= slot < self.sequences:
            owner = "a checkpoint, on the host" if 0 <= slot < self.slots else "none"
            raise ValueError(f"slot {slot} is {owner}; a step takes slots 0..{self.sequences - 1}")
        if not 0 <= pending <= self.max_pending:
            raise ValueError(f"{pending} pending rows; expected 0..{self.max_pending}")

    def check_step(self, batch: CudaBatch) -> None:
        if not batch.has_slots:
            raise ValueError("the step names no slots")
        for slot, replay, drafted in batch.slot_numbers:
            self.check(slot, max(replay, drafted))

    def start_conv(
        self, step: tuple[torch.Tensor, ...], x: torch.Tensor, weight: torch.Tensor, layer: int,
        out: torch.Tensor, sequences: int, longest: int,
    ) -> None:  # fmt: skip
        """`step`: slots, replay, drafted, row starts; `longest`: rows of the longest sequence."""
        channels = self.shape.channels
        windows = self.states[0, layer, self.square :]
        grid = sequences, max(ceil_divide(longest, CONV_ROWS), 1), ceil_divide(channels, CHANNELS)
        self._launcher.start(
            convolve, grid, x, weight, windows, self.inputs, *step, out, layer, self.layers, self.max_pending,
            channels, self.states.stride(0), ROWS=CONV_ROWS, WIDTH=CHANNELS, exact=True,
        )  # fmt: skip

    def start_delta(
        self, step: tuple[torch.Tensor, ...], qkv: torch.Tensor, gates: torch.Tensor, rate: torch.Tensor,
        bias: torch.Tensor, layer: int, out: torch.Tensor, sequences: int, pending: int,
    ) -> None:  # fmt: skip
        """`pending`: the most rows of a sequence that are."""
        shape = self.shape
        self.constants[layer] = rate, bias
        slots, _, drafted, row_starts = step
        sizes = layer, self.layers, self.max_pending
        self._launcher.start(
            delta_rule, (sequences, shape.heads, ceil_divide(shape.value_dim, VALUES)), qkv, gates, rate,
            bias,
            self.states[0, layer], self.rows, *step, out, *sizes, shape.heads, key_heads_of(shape),
            shape.key_dim, shape.value_dim, self.states.stride(0), shape.key_dim**-0.5, L2_EPS,
            V=VALUES, D=power_of_two(shape.key_dim), warps=1,
        )  # fmt: skip
        if pending:
            width = shape.channels - self.all_keys
            blocks = ceil_divide(width + 2 * shape.heads, KEEP_WIDTH)
            self._launcher.start(
                keep_rows, (sequences, pending, blocks), qkv, gates, self.rows, slots, drafted, row_starts,
                *sizes, self.all_keys, width, 2 * shape.heads, WIDTH=KEEP_WIDTH,
            )  # fmt: skip


def _bytes_of(state: torch.Tensor) -> list[memoryview]:
    return [host_view(state).reshape(-1).view(np.uint8).data]


def raw_state(state: RecurrentCache) -> CudaRecurrent:
    if not isinstance(state, CudaRecurrent):
        raise TypeError(f"a recurrent state of another backend: {type(state).__name__}")
    return state
