"""CardPlan: what of a card's memory each part takes when a described hybrid is served on it, and the context
that is left.

Weights, drafter, states, buffers and keys and values are counted from the description; what a driver, its
libraries and captured graphs take is assumed, and named so. Nothing here was measured on a card. Pure
arithmetic; knows no file, no card and no allocator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from quickdraft.errors import ConfigError
from quickdraft.models.footprint import FLOAT_BYTES, KEPT_CHECKPOINTS, Footprint
from quickdraft.ops.interface import BLOCK_TOKENS

CardDrafter = Literal["mtp", "dflash2", "off"]
CARD_DRAFTERS: Final[tuple[CardDrafter, ...]] = ("mtp", "dflash2", "off")
CHUNK_ROWS: Final = 256  # rows of a prompt in one step
ATTENTION_PARTS_BYTES: Final = 64 << 20  # spans waiting to be merged: most of ops/cuda/attention.PART_BYTES
SPLIT_COLUMNS: Final = 256 * 64  # outputs times pieces of a sum, at most: ops/cuda/weights.splits_of
SPLIT_ROWS: Final = 64
GRAPH_SHAPES: Final = 8  # rows 1, 2, 4 ... 64 of the target, one of the drafter

# Assumed:
DRIVER_BYTES: Final = 308 << 20  # of 24,576 MiB that a 3090 has, torch sees 24,268
LIBRARY_BYTES: Final = 512 << 20  # the process's context, torch and compiled kernels
GRAPH_BYTES: Final = 24 << 20  # of one captured step of about a thousand kernels
SPARE_BYTES: Final = 256 << 20  # what an allocator cannot hand out


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes of one thing; `assumed` ones were not counted from anything."""

    name: str
    bytes: int
    assumed: bool = False


@dataclass(frozen=True, slots=True)
class CardPlan:
    """Memory of one conversation in steps of up to `rows` rows on a card of `memory_bytes`; at most
    `wanted` tokens of context."""

    footprint: Footprint
    drafter: CardDrafter
    memory_bytes: int
    rows: int
    wanted: int

    def shares(self) -> tuple[Share, ...]:
        """All but the keys and values of the context."""
        found = self.footprint
        kept = KEPT_CHECKPOINTS * found.checkpoint_bytes
        return (
            *self._weights(),
            Share("recurrent state", found.state_bytes_per_sequence),
            Share(f"{KEPT_CHECKPOINTS} checkpoints", kept),
            Share("history of drafted rows", (self.rows - 1) * found.history_bytes_per_row),
            Share("activations and logits", self.buffer_bytes()),
            Share("workspace of kernels", self.workspace_bytes()),
            Share(f"{GRAPH_SHAPES} captured graphs", GRAPH_SHAPES * GRAPH_BYTES, assumed=True),
            Share("driver, libraries, spare", DRIVER_BYTES + LIBRARY_BYTES + SPARE_BYTES, assumed=True),
        )

    def _weights(self) -> Iterator[Share]:
        parts = self.footprint.parts()
        body = [p.bytes for p in parts if not p.name.startswith(("embedding", "head", "mtp", "dflash2"))]
        yield Share("weights", sum(body))
        yield Share("embedding and head", sum(p.bytes for p in parts if p.name in ("embedding", "head")))
        if self.drafter != "off":
            own = [p.bytes for p in parts if p.name.startswith(self.drafter)]
            yield Share(f"drafter {self.drafter}", sum(own))

    def buffer_bytes(self) -> int:
        """fp32: what models/qwen3_5.py keeps for every row of a chunk, as much of a drafter's layer, and
        logits of both for the rows of a step; what linears read of it once more in 16 bits."""
        sizes = self.footprint.sizes
        queries = sizes.heads * sizes.head_dim
        attention = 3 * queries + 2 * sizes.kv_heads * sizes.head_dim
        block = 2 * sizes.width + 3 * sizes.feed_forward
        values = sizes.value_heads * sizes.value_dim
        row = block + attention + 2 * sizes.channels + 2 * values + 2 * sizes.value_heads
        tapped = {"mtp": 1, "dflash2": sizes.drafter.taps if sizes.drafter else 0, "off": 0}[self.drafter]
        logits = self.rows * sizes.vocabulary
        drafting = self.drafter != "off"
        row += tapped * sizes.width + drafting * (block + attention)
        copies = 2 * sizes.width + sizes.feed_forward + queries + values
        return FLOAT_BYTES * (CHUNK_ROWS * row + (1 + drafting) * logits) + 2 * CHUNK_ROWS * copies

    def workspace_bytes(self) -> int:
        """Spans of attention, pieces of split sums, and activations in 16 bits."""
        pieces = FLOAT_BYTES * SPLIT_ROWS * SPLIT_COLUMNS
        return ATTENTION_PARTS_BYTES + pieces + 2 * CHUNK_ROWS * self.footprint.sizes.feed_forward

    @property
    def block_bytes(self) -> int:
        """Of 16 tokens, the MTP layer's included where it drafts."""
        found = self.footprint
        each = found.kv_bytes_per_token + (found.mtp_kv_bytes_per_token if self.drafter == "mtp" else 0)
        return BLOCK_TOKENS * each

    @property
    def room_tokens(self) -> int:
        """Tokens whose keys and values fit beside all else; ConfigError where not even a block does."""
        fixed = sum(share.bytes for share in self.shares())
        if fixed + self.block_bytes > self.memory_bytes:
            raise ConfigError(
                "the model does not fit on the card",
                got=f"{self.memory_bytes / 2**30:.2f} GiB",
                expected=f"at least {(fixed + self.block_bytes) / 2**30:.2f} GiB with drafter {self.drafter}",
                hint="serve without a drafter, or use a card with more memory",
            )
        return (self.memory_bytes - fixed) // self.block_bytes * BLOCK_TOKENS

    @property
    def tokens(self) -> int:
        """The context that is served: what was wanted, or what fits."""
        return min(self.wanted, self.room_tokens, self.footprint.sizes.context)

    @property
    def pool_bytes(self) -> int:
        """Keys and values of that context, whole blocks."""
        return -(-self.tokens // BLOCK_TOKENS) * self.block_bytes

    @property
    def free_bytes(self) -> int:
        """What is left, for more checkpoints or conversations."""
        return self.memory_bytes - self.pool_bytes - sum(share.bytes for share in self.shares())

    @property
    def note(self) -> str:
        """What the user is told of a context that was lowered; empty where it was not."""
        if self.tokens >= self.wanted:
            return ""
        need = -(-self.wanted // BLOCK_TOKENS) * self.block_bytes + sum(s.bytes for s in self.shares())
        return (
            f"context lowered from {self.wanted:,} to {self.tokens:,} tokens: "
            f"all of it needs {need / 2**30:.2f} GiB"
        )
