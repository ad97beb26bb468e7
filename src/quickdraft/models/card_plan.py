"""CardPlan: what of a card's memory each part takes when a described hybrid is served on it, and the context
that is left.

Weights, drafter, states, buffers and keys and values are counted from the description; what a driver, its
libraries and captured graphs take is assumed, and named so. Nothing here was measured on a card. Pure
arithmetic; knows no file, no card and no allocator.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from quickdraft.errors import ConfigError
from quickdraft.models.footprint import FLOAT_BYTES, Footprint
from quickdraft.ops.interface import BLOCK_TOKENS
from quickdraft.state.spec import bytes_per_block

CardDrafter = Literal["mtp", "dflash2", "off"]
# "off": a checkpoint without an MTP layer, which is loaded where it is there
CARD_DRAFTERS: Final[tuple[CardDrafter, ...]] = ("mtp", "dflash2", "off")
CHUNK_ROWS: Final = 256  # rows of a prompt in one step
WANTED_ROWS: Final = 64  # rows of a step with logits: so many, or WANTED_EACH per sequence
WANTED_EACH: Final = 16
DRAFT_ROWS: Final = 64  # of a drafter's buffers: models/mtp.MODULE_ROWS, models/dflash.FEATURE_ROWS
ATTENTION_PARTS_BYTES: Final = 64 << 20  # spans waiting to be merged: most of ops/cuda/attention.PART_BYTES
SPLIT_COLUMNS: Final = 256 * 64  # outputs times pieces of a sum, at most: ops/cuda/weights.splits_of
SPLIT_ROWS: Final = 64
CACHED_PART: Final = 8  # a block drafter keeps one block in so many for the prefix cache: state/leases.py

# Assumed:
DRIVER_BYTES: Final = 308 << 20  # of 24,576 MiB that a 3090 has, torch sees 24,268
LIBRARY_BYTES: Final = 512 << 20  # the process's context, torch and compiled kernels
GRAPH_BYTES: Final = 24 << 20  # of one captured step of about a thousand kernels
GRAPH_SHAPES: Final = 24  # captured steps of one sequence: 1, 2, 4 .. 32 rows, four reaches of the context
SEVERAL_SHAPES: Final = 16  # more, of several
SPARE_BYTES: Final = 256 << 20  # what an allocator cannot hand out


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes of one thing; `assumed` ones were not counted from anything."""

    name: str
    bytes: int
    assumed: bool = False


@dataclass(frozen=True, slots=True)
class CardPlan:
    """Memory of a server for `sequences` conversations at a time, in steps of up to `rows` rows of each, on a
    card of `memory_bytes`; at most `wanted` tokens of context, which conversations share. Checkpoints lie in
    the host's memory. The MTP layer of the checkpoint is loaded where it drafts, else left (`--no-mtp`)."""

    footprint: Footprint
    drafter: CardDrafter
    memory_bytes: int
    rows: int
    wanted: int
    sequences: int = 1

    def shares(self) -> tuple[Share, ...]:
        """All but the keys and values of the context."""
        found, count = self.footprint, self.sequences
        graphs = GRAPH_SHAPES + (SEVERAL_SHAPES if count > 1 else 0)
        history = count * (self.rows - 1) * found.history_bytes_per_row
        return (
            *self._weights(),
            Share("recurrent state" if count == 1 else f"{count} recurrent states",
                  count * found.state_bytes_per_sequence),
            Share("history of drafted rows", history),
            Share("activations and logits", self.buffer_bytes()),
            Share("workspace of kernels", self.workspace_bytes()),
            Share(f"{graphs} captured graphs", graphs * GRAPH_BYTES, assumed=True),
            Share("driver, libraries, spare", DRIVER_BYTES + LIBRARY_BYTES + SPARE_BYTES, assumed=True),
        )  # fmt: skip

    def _weights(self) -> Iterator[Share]:
        parts = self.footprint.parts()
        body = [p.bytes for p in parts if not p.name.startswith(("embedding", "head", "mtp", "dflash2"))]
        yield Share("weights", sum(body))
        yield Share("embedding and head", sum(p.bytes for p in parts if p.name in ("embedding", "head")))
        if self.drafter == "mtp":
            yield Share("MTP layer", sum(p.bytes for p in parts if p.name.startswith("mtp")))
        if self.drafter == "dflash2":
            own = [p.bytes for p in parts if p.name.startswith("dflash2") and p.name != "dflash2 context"]
            yield Share("drafter dflash2", sum(own))

    def buffer_bytes(self) -> int:
        """fp32: what models/qwen3_5.py keeps for every row of a step, logits of the rows that have them, the
        turns of all positions, and a drafter's own; what linears read of it once more in 16 bits."""
        sizes, drafter = self.footprint.sizes, self.footprint.sizes.drafter
        logits = max(WANTED_ROWS, WANTED_EACH * self.sequences)
        queries, values = sizes.heads * sizes.head_dim, sizes.value_heads * sizes.value_dim
        layer = 2 * sizes.width + 3 * sizes.feed_forward + 3 * queries + 2 * sizes.kv_heads * sizes.head_dim
        row = layer + 2 * sizes.channels + 2 * values + 2 * sizes.value_heads
        turns = 2 * sum(sizes.mrope_section) * max(self.wanted, BLOCK_TOKENS)
        drafts = 0
        if self.drafter == "mtp":
            row += sizes.width  # hidden states wait for it
            drafts = DRAFT_ROWS * (layer + 2 * sizes.width) + sizes.vocabulary
        if self.drafter == "dflash2" and drafter is not None:
            row += drafter.taps * sizes.width
            drafts = DRAFT_ROWS * (layer + (drafter.taps + 6) * sizes.width + sizes.vocabulary)
        copies = 2 * sizes.width + sizes.feed_forward + queries + values
        rows = CHUNK_ROWS + logits
        floats = rows * row + logits * (sizes.vocabulary + sizes.width) + drafts + turns
        return FLOAT_BYTES * floats + 2 * rows * copies

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

    def places(self, blocks: int) -> int:
        """Blocks of a block drafter's own keys and values: the windows of all sequences, and an eighth of
        `blocks` for what the prefix cache may resume."""
        drafter = self.footprint.sizes.drafter
        if self.drafter != "dflash2" or drafter is None:
            return 0
        window = -(-(drafter.window + CHUNK_ROWS) // BLOCK_TOKENS) + 2
        return min(blocks, self.sequences * window + blocks // CACHED_PART)

    def _pool(self, blocks: int) -> int:
        drafter = self.footprint.sizes.drafter
        own = bytes_per_block(drafter.kept(self.footprint.kv_dtype)) if drafter is not None else 0
        return blocks * self.block_bytes + self.places(blocks) * own

    @property
    def room_tokens(self) -> int:
        """Tokens whose keys and values fit beside all else; ConfigError where not even a block does."""
        fixed = sum(share.bytes for share in self.shares())
        room = self.memory_bytes - fixed
        blocks = bisect_right(range(1, max(room, 0) // self.block_bytes + 1), room, key=self._pool)
        if not blocks:
            raise ConfigError(
                "the model does not fit on the card",
                got=f"{self.memory_bytes / 2**30:.2f} GiB",
                expected=f"at least {(fixed + self._pool(1)) / 2**30:.2f} GiB with drafter {self.drafter}",
                hint="serve without a drafter, or use a card with more memory",
            )
        return blocks * BLOCK_TOKENS

    @property
    def tokens(self) -> int:
        """The context that is served: what was wanted, or what fits."""
        return min(self.wanted, self.room_tokens, self.footprint.sizes.context)

    @property
    def pool_bytes(self) -> int:
        """Keys and values of that context, whole blocks, a drafter's included."""
        return self._pool(-(-self.tokens // BLOCK_TOKENS))

    @property
    def free_bytes(self) -> int:
        """What is left, for the contexts of other conversations and of the prefix cache."""
        return self.memory_bytes - self.pool_bytes - sum(share.bytes for share in self.shares())

    @property
    def note(self) -> str:
        """What the user is told of a context that was lowered; empty where it was not."""
        if self.tokens >= self.wanted:
            return ""
        need = self._pool(-(-self.wanted // BLOCK_TOKENS)) + sum(s.bytes for s in self.shares())
        return (
            f"context lowered from {self.wanted:,} to {self.tokens:,} tokens: "
            f"all of it needs {need / 2**30:.2f} GiB"
        )
