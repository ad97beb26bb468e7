"""Footprint: the bytes a described hybrid model takes when it is served, and the work of one step.

Weights as they are served: the body in int4 and head and embedding in int8, both in groups of 128
inputs with a 16-bit scale each; the MTP layer and what quantisers leave alone in bf16; vectors in
fp32. Pure arithmetic over a description; knows no file, no card and no time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from quickdraft.models.describe import MATRICES, Tensor
from quickdraft.models.describe_hybrid import HybridSizes
from quickdraft.ops.interface import BLOCK_TOKENS, KVDtype
from quickdraft.state.spec import bytes_per_block, bytes_per_sequence

KV_DTYPES: Final[tuple[KVDtype, ...]] = ("bfloat16", "int8")
GROUP: Final = 128
SCALE_BYTES: Final = 2
FLOAT_BYTES: Final = 4
RESERVE_BYTES: Final = 1 << 30  # a device's own context and libraries, activations of a chunk of a prompt
KEPT_CHECKPOINTS: Final = 2  # the end of the prompt and the end of the turn: what a next turn resumes at
_NOT_READ: Final = ("embedding", "mtp", "dflash2")  # a step of the target does not read these parts
_GATHERED: Final = "dflash2 selector"  # a draft looks rows of it up


@dataclass(frozen=True, slots=True)
class Part:
    """What one part of the model takes, in one format."""

    name: str
    format: str  # "int4 g128", "int8 g128", "bf16" or "fp32"
    bytes: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """What serving one conversation takes, with keys and values in `kv_dtype`."""

    sizes: HybridSizes
    kv_dtype: KVDtype = "bfloat16"

    def parts(self) -> tuple[Part, ...]:
        """Weights by part, in the order of the checkpoint, then the drafter's, then its context's keys and
        values."""
        drafter = self.sizes.drafter
        sums: dict[tuple[str, str], int] = {}
        for tensor in [*self.sizes.tensors(), *(drafter.tensors() if drafter else ())]:
            key = tensor.part, format_of(tensor)
            sums[key] = sums.get(key, 0) + served_bytes(tensor)
        parts = [Part(name, form, size) for (name, form), size in sums.items()]
        if drafter:
            window = bytes_per_block(drafter.kept("bfloat16")) // BLOCK_TOKENS * drafter.window
            parts.append(Part("dflash2 context", "bf16", window))
        return tuple(parts)

    @property
    def part_bytes(self) -> int:
        return sum(part.bytes for part in self.parts())

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of the target's attention layers."""
        return bytes_per_block(self.sizes.paged(self.kv_dtype)) // BLOCK_TOKENS

    @property
    def mtp_kv_bytes_per_token(self) -> int:
        """The MTP layer keeps a row for every row of the target."""
        return self.sizes.mtp_paged(self.kv_dtype).bytes_per_block // BLOCK_TOKENS

    @property
    def state_bytes_per_sequence(self) -> int:
        """Recurrent states and convolution windows of one sequence, fp32."""
        return bytes_per_sequence(self.sizes.recurrent())

    @property
    def checkpoint_bytes(self) -> int:
        """A checkpoint is a copy of that state and the final hidden state of its last token; keys and
        values are shared with the cache and counted there."""
        return self.state_bytes_per_sequence + FLOAT_BYTES * self.sizes.width

    @property
    def history_bytes_per_row(self) -> int:
        """What a drafted row leaves to be replayed: input of the convolution, k and v after it, beta and
        the decay of each head, fp32, in every recurrent layer."""
        sizes = self.sizes
        after = sizes.channels - sizes.key_heads * sizes.key_dim  # q is not needed
        return FLOAT_BYTES * len(sizes.recurrent()) * (sizes.channels + after + 2 * sizes.value_heads)

    def fixed_bytes(self, rows: int) -> int:
        """All that does not grow with the context, for steps of up to `rows` rows of one sequence:
        the parts, one live state and the kept checkpoints, the history of all rows but the first (which is
        no draft), logits in fp32, and RESERVE_BYTES."""
        states = self.state_bytes_per_sequence + KEPT_CHECKPOINTS * self.checkpoint_bytes
        pending = (rows - 1) * self.history_bytes_per_row + rows * self.sizes.vocabulary * FLOAT_BYTES
        return self.part_bytes + states + pending + RESERVE_BYTES

    def bytes_at(self, context: int, rows: int) -> int:
        """Memory of one conversation of `context` tokens, whole KV blocks."""
        tokens = math.ceil(context / BLOCK_TOKENS) * BLOCK_TOKENS
        return self.fixed_bytes(rows) + tokens * (self.kv_bytes_per_token + self.mtp_kv_bytes_per_token)

    def longest_context(self, memory_bytes: int, rows: int) -> int:
        """Tokens that fit, in whole KV blocks, at most the model's own context."""
        block = BLOCK_TOKENS * (self.kv_bytes_per_token + self.mtp_kv_bytes_per_token)
        blocks = max(0, memory_bytes - self.fixed_bytes(rows)) // block
        return min(blocks * BLOCK_TOKENS, self.sizes.context)

    def step_bytes(self, context: int) -> int:
        """Bytes a step moves at least, whatever its rows: the target's weights (embedding rows are looked
        up and not counted), keys and values of the context, and the recurrent state read and written."""
        weights = sum(part.bytes for part in self.parts() if not part.name.startswith(_NOT_READ))
        return weights + context * self.kv_bytes_per_token + 2 * self.state_bytes_per_sequence

    def step_macs(self, context: int, rows: int) -> int:
        """Multiply-adds of a step: each matrix once a row, q.k and p.v of the attention layers over the
        context, and in a recurrent layer S'k, the outer product k u, and S'q."""
        sizes = self.sizes
        matrices = _macs(t for t in sizes.tensors() if not t.part.startswith(_NOT_READ))
        attention = len(sizes.paged(self.kv_dtype)) * sizes.heads * 2 * sizes.head_dim * context
        state = len(sizes.recurrent()) * sizes.value_heads * sizes.key_dim * sizes.value_dim
        return rows * (matrices + attention + 3 * state)

    def draft_bytes(self) -> int:
        """Bytes one pass of the drafter reads: its weights without the selector's tables, the target's head
        and a full window of its context."""
        read = [part for part in self.parts() if part.name == "head" or part.name.startswith("dflash2")]
        return sum(part.bytes for part in read if part.name != _GATHERED)

    def mtp_bytes(self) -> int:
        """Bytes one MTP draft reads near context 0: the layer and the head."""
        return sum(part.bytes for part in self.parts() if part.name in ("mtp", "head"))


def format_of(tensor: Tensor) -> str:
    """The format a tensor is served in."""
    if tensor.kind in ("embedding", "head"):
        return f"int8 g{GROUP}"
    if tensor.kind == "linear" and tensor.part != "mtp":
        return f"int4 g{GROUP}"
    return "bf16" if tensor.kind in MATRICES else "fp32"


def served_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor in that format; a quantised one of n values takes n bits / 8 and n / 128 scales."""
    count, form = math.prod(tensor.shape), format_of(tensor)
    if form.startswith("int"):
        return count * int(form[3]) // 8 + count // GROUP * SCALE_BYTES
    return count * (2 if form == "bf16" else FLOAT_BYTES)


def _macs(tensors: Iterable[Tensor]) -> int:
    return sum(math.prod(t.shape) for t in tensors if t.kind in MATRICES)
