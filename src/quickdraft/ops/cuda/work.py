"""What a step of a Qwen3.8-27B-shaped model asks of the card: every op, how often, its bytes and its
arithmetic.

Ops run on tensors without memory and a launcher that only watches, so the kernel starts are those a card
would get. Bytes are those of all arguments of all starts of an op, each read or written once; the minimum
is what the op's formula cannot do without. Arithmetic is that of whole
tiles. Everything here is projected: nothing was measured on a card.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quickdraft.ops.cuda.attention import tile_pairs
from quickdraft.ops.cuda.backend import CudaOps
from quickdraft.ops.cuda.batch import Count
from quickdraft.ops.cuda.buffers import Buffer
from quickdraft.ops.cuda.launch import Started, Watching, ceil_divide
from quickdraft.ops.cuda.linear import tile_rows
from quickdraft.ops.cuda.weights import PackedDense, PackedGroups, splits_of
from quickdraft.ops.interface import BLOCK_TOKENS

WIDTH, FEED_FORWARD, VOCABULARY = 5120, 17408, 248_320
RECURRENT, ATTENTION = 48, 16  # layers of each kind
HEADS, KV_HEADS, HEAD_DIM, ROTARY = 24, 4, 256, 64
KEY_HEADS, VALUE_HEADS, STATE = 16, 48, 128
FACTOR = torch.bfloat16  # the model's own type, in which activations meet weights
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * STATE
REACHABLE_BYTES = 914e9  # a second, of the 936e9 of a 3090
HALF_FLOPS = 71e12  # a second, float16 factors and float32 sums
SEEN_TWICE = ("key_scales", "value_scales")  # the same memory as keys and values
COPIES = ("x", "half", "brain")  # 16-bit ones have more rows than the step
EFFICIENCY = 0.75  # of the roof, assumed
START_SECONDS = 1.5e-6  # of a kernel in a captured graph, assumed


@dataclass(frozen=True, slots=True)
class Work:
    """One op of a step."""

    name: str
    calls: int  # in a step
    starts: tuple[Started, ...]  # of one call
    bytes_moved: int  # of one call
    least_bytes: int
    flops: int

    @property
    def roof_s(self) -> float:
        """Time of one call at the roof of a 3090."""
        return max(self.bytes_moved / REACHABLE_BYTES, self.flops / HALF_FLOPS)

    @property
    def projected_s(self) -> float:
        """Of one call, with the assumed efficiency and starts."""
        return self.roof_s / EFFICIENCY + len(self.starts) * START_SECONDS


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of the recurrent layers (ops.interface.RecurrentShape)."""

    heads: int = VALUE_HEADS
    key_dim: int = STATE
    value_dim: int = STATE
    channels: int = CHANNELS
    window: int = 3


class Step:
    """One step of `rows` rows of one sequence that has `context` positions; all but the first are drafts."""

    def __init__(self, rows: int, context: int, kv_dtype: str = "bfloat16", *, drafted: bool = True) -> None:
        self.rows, self.context, self.kv_dtype = rows, context, kv_dtype
        self.launcher = Watching()
        self.ops = CudaOps("meta", self.launcher)
        blocks = ceil_divide(context + rows, BLOCK_TOKENS)
        self.batch = self.ops.batch(rows, 1, blocks, blocks, VOCABULARY)
        self.kv = self.ops.kv_cache(1, blocks, KV_HEADS, HEAD_DIM, kv_dtype)  # type: ignore[arg-type]
        pending = rows - 1 if drafted else 0
        self.state = self.ops.recurrent_cache(1, 1, 1, Heads(), max(pending, 1))

        def ints(*values: int) -> np.ndarray:
            return np.array(values, np.int32)

        positions = np.arange(context, context + rows, dtype=np.int32)
        table = np.arange(blocks, dtype=np.int32)[None]
        wanted = np.arange(rows, dtype=np.int32)
        tokens = np.zeros(rows, np.int32)
        states = ints(0), ints(pending // 2), ints(pending)
        self.batch.set(tokens, positions, ints(0, rows), table, wanted, *states)
        self.works: list[Work] = []

    def add(self, name: str, calls: int, run: Callable[[], None], least_bytes: int, flops: int) -> None:
        self.launcher.seen.clear()
        run()
        starts = tuple(self.launcher.seen)
        moved = 0
        for start in starts:
            for argument, part in zip(start.kernel.arg_names, start.arguments, strict=False):
                if isinstance(part, torch.Tensor) and argument not in SEEN_TWICE:
                    whole = part.ndim == 2 and len(part) > self.rows and argument in COPIES
                    moved += part.nbytes * self.rows // len(part) if whole else part.nbytes
        self.works.append(Work(name, calls, starts, moved, least_bytes, flops))


def int4(outputs: int, inputs: int, group: int = 128, *, zeros: bool = False) -> PackedGroups:
    """A 4-bit weight without memory, as a quantised folder has it."""
    return _packed(outputs, inputs, 4, group, zeros)


def int8(outputs: int, inputs: int, group: int = 32) -> PackedGroups:
    return _packed(outputs, inputs, 8, group, False)


def dense(outputs: int, inputs: int, kind: torch.dtype = torch.bfloat16) -> PackedDense:
    values = torch.empty((outputs, inputs), dtype=kind, device="meta")
    return PackedDense(values, splits_of(outputs, inputs // 128))


def _packed(outputs: int, inputs: int, bits: int, group: int, zeros: bool) -> PackedGroups:
    def empty(*shape: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    sub, count = 32 if group % 32 == 0 else 16, 16 // bits
    words = empty(ceil_divide(inputs, sub * count), outputs, sub, kind=torch.int16)
    scales = empty(ceil_divide(inputs, group), outputs, kind=torch.float16)
    offsets = torch.empty_like(scales) if zeros else None
    splits = splits_of(outputs, inputs // 128)
    offset = 2.0 ** (bits - 1)
    return PackedGroups(words, scales, offsets, None, offset, bits, group, inputs, None, splits, FACTOR)


def linear_work(
    step: Step, name: str, calls: int, weight: PackedGroups | PackedDense, *, copied: bool = True
) -> None:
    """`copied`: what wrote x made the copy that it reads, as norms and gates do from the second step on."""
    rows, ops, outputs = step.rows, step.ops, weight.outputs
    count = Count()
    count.count = rows
    x, out = ops.empty(rows, weight.inputs), ops.empty(rows, outputs)
    if copied:
        ops.linear(count, x, weight, out)
        x.copied = rows
    least = weight.nbytes + rows * ((2 if copied else 4) * weight.inputs + 4 * outputs)
    height = tile_rows(rows)  # a tile is computed whole
    flops = 2 * ceil_divide(rows, height) * height * weight.inputs * outputs
    step.add(name, calls, lambda: ops.linear(count, x, weight, out), least, flops)


def whole_step(rows: int, context: int, kv_dtype: str = "bfloat16", *, drafted: bool = True) -> list[Work]:
    """Every op of a step of the target model, weights in 4 bits (groups of 128), head and embedding in 8."""
    step = Step(rows, context, kv_dtype, drafted=drafted)
    both, queries = RECURRENT + ATTENTION, HEADS * HEAD_DIM
    weights: list[tuple[str, int, PackedGroups | PackedDense]] = [
        ("linear qkv of a recurrent layer", RECURRENT, int4(CHANNELS, WIDTH)),
        ("linear z", RECURRENT, int4(VALUE_HEADS * STATE, WIDTH)),
        ("linear b, a", RECURRENT, dense(2 * VALUE_HEADS, WIDTH)),
        ("linear qkv of an attention layer", ATTENTION, int4(queries + 2 * KV_HEADS * HEAD_DIM, WIDTH)),
        ("linear gate", ATTENTION, int4(queries, WIDTH)),
        ("linear out", both, int4(WIDTH, queries)),
        ("linear gate, up", both, int4(2 * FEED_FORWARD, WIDTH)),
        ("linear down", both, int4(WIDTH, FEED_FORWARD)),
    ]
    for name, calls, weight in weights:
        linear_work(step, name, calls, weight)
    linear_work(step, "linear head", 1, int8(VOCABULARY, WIDTH), copied=False)
    _attention_works(step)
    _recurrent_works(step)
    _row_works(step)
    return step.works


def _attention_works(step: Step) -> None:
    ops, rows, width = step.ops, step.rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv, mixed = ops.empty(rows, width), ops.empty(rows, HEADS * HEAD_DIM)
    written = rows * 2 * KV_HEADS * HEAD_DIM
    per_number = step.kv.bytes_per_block / (BLOCK_TOKENS * 2 * KV_HEADS * HEAD_DIM)
    kv = step.kv.key_tensor.nbytes + step.kv.value_tensor.nbytes
    pairs = rows * HEADS // KV_HEADS
    height = tile_pairs(pairs)
    flops = 4 * ceil_divide(pairs, height) * height * KV_HEADS * HEAD_DIM * (step.context + rows)
    least = kv + 4 * rows * 2 * HEADS * HEAD_DIM
    batch, cache = step.batch, step.kv
    step.add(
        "attention",
        ATTENTION,
        lambda: ops.attention(batch, qkv, HEADS, cache, 0, 0.0625, mixed),
        least,
        flops,
    )
    before = len(step.works)
    least = int(written * (4 + per_number))
    step.add("kv_write", ATTENTION, lambda: ops.kv_write(batch, qkv, HEADS, cache, 0), least, 0)
    _bytes_as_least(step, before)


def _recurrent_works(step: Step) -> None:
    ops, rows, batch, state = step.ops, step.rows, step.batch, step.state
    x, mixed = ops.empty(rows, CHANNELS), ops.empty(rows, CHANNELS)
    gates, out = ops.empty(rows, 2 * VALUE_HEADS), ops.empty(rows, VALUE_HEADS * STATE)
    weight = ops.constant(np.zeros((4, CHANNELS), np.float32))
    rate = ops.constant(np.zeros(VALUE_HEADS, np.float32))
    step.add(
        "causal_conv", RECURRENT, lambda: ops.causal_conv(batch, x, weight, state, 0, mixed),
        4 * CHANNELS * (3 * rows + 4 + 3), 8 * rows * CHANNELS,
    )  # fmt: skip
    _bytes_as_least(step, len(step.works) - 1)
    square = VALUE_HEADS * STATE * STATE
    step.add(
        "gated_delta", RECURRENT, lambda: ops.gated_delta(batch, mixed, gates, rate, rate, state, 0, out),
        8 * square + 4 * rows * (2 * CHANNELS + 4 * VALUE_HEADS), 7 * square * (rows + rows // 2),
    )  # fmt: skip
    _bytes_as_least(step, len(step.works) - 1)
    norm, gate = ops.constant(np.zeros(STATE, np.float32)), ops.empty(rows, VALUE_HEADS * STATE)
    least = (3 * 4 + 2) * rows * VALUE_HEADS * STATE
    _with_copy(step, out)
    step.add(
        "gated_norm", RECURRENT, lambda: ops.gated_norm(batch.rows, out, gate, norm, 1e-6, out), least, 0
    )
    _bytes_as_least(step, len(step.works) - 1)


def _row_works(step: Step) -> None:
    ops, rows, batch = step.ops, step.rows, step.batch
    x, gate_up, act = ops.empty(rows, WIDTH), ops.empty(rows, 2 * FEED_FORWARD), ops.empty(rows, FEED_FORWARD)
    mixed, heads = ops.empty(rows, HEADS * HEAD_DIM), ops.empty(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    norm, head = (ops.constant(np.zeros(size, np.float32)) for size in (WIDTH, HEAD_DIM))
    table, logits = ops.constant(np.zeros((64, ROTARY), np.float32)), ops.empty(rows, VOCABULARY)
    ids, best = ops.ints(rows * 16), ops.empty(rows, 16)
    turned, both = HEADS + KV_HEADS, RECURRENT + ATTENTION
    each = 4 * rows
    normed, act2 = 2 * rows * WIDTH, 2 * rows * FEED_FORWARD  # copies in 16 bits
    for written in (x, mixed, act):
        _with_copy(step, written)
    heads_wide, count = HEADS * HEAD_DIM, batch.rows
    works: list[tuple[str, int, Callable[[], None], int]] = [
        ("embed", 1, lambda: ops.embed(batch, int8(VOCABULARY, WIDTH), x), 5 * rows * WIDTH),
        ("rms_norm", 2 * both + 1, lambda: ops.rms_norm(count, x, norm, 1e-6, x), 2 * each * WIDTH + normed),
        (
            "head_norm", 2 * ATTENTION,
            lambda: ops.head_norm(count, heads, 0, HEADS, HEAD_DIM, head, 1e-6), 2 * each * heads_wide,
        ),
        (
            "rope", ATTENTION,
            lambda: ops.rope(batch, heads, turned, HEAD_DIM, table, "half"), 2 * each * turned * ROTARY,
        ),
        (
            "sigmoid_gate", ATTENTION,
            lambda: ops.sigmoid_gate(count, mixed, mixed, mixed),
            3 * each * heads_wide + 2 * rows * heads_wide,
        ),
        ("swiglu", both, lambda: ops.swiglu(count, gate_up, act), 3 * each * FEED_FORWARD + act2),
        ("argmax", 1, lambda: ops.argmax(batch.wanted, logits, ids), each * VOCABULARY),
        ("top_rows", 0, lambda: ops.top_rows(batch.wanted, logits, 16, ids, best), each * VOCABULARY),
    ]  # fmt: skip
    for name, calls, run, least in works:
        step.add(name, calls, run, least, 0)
        _bytes_as_least(step, len(step.works) - 1)


def _with_copy(step: Step, out: Buffer) -> None:
    """Some linear reads it in 16 bits."""
    out.copy_of(FACTOR, out.shape[1], step.rows)


def _bytes_as_least(step: Step, index: int) -> None:
    """For ops that touch a part of their arguments, once: what they move is the minimum."""
    work = step.works[index]
    step.works[index] = Work(
        work.name, work.calls, work.starts, work.least_bytes, work.least_bytes, work.flops
    )
