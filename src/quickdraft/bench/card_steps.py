"""Steps of Qwen3.8-27B and passes of its drafters as a server on a card would run them, without a card and
without a weight.

The real loader opens an outline of the checkpoint (names and shapes, holes for large tensors), the real model
and drafters are recorded over tensors without memory, and each run writes down every op: so what is counted
is what the program does. Times are projected from that with assumed rates; nothing is measured. Needs torch
and triton. Knows no page and no curve.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from quickdraft.engine.open_drafters import load_drafters, read_folder, taps_for
from quickdraft.models.describe import Tensor
from quickdraft.models.describe_hybrid import DFlash2Sizes, HybridSizes
from quickdraft.models.known import QWEN_27B
from quickdraft.models.registry import load_model, open_target
from quickdraft.ops.cuda.outline import OutlineOps
from quickdraft.ops.cuda.work import Call
from quickdraft.ops.interface import BLOCK_TOKENS, KVDtype
from quickdraft.prepare.random_model import write_outline
from quickdraft.types import MAX_ROWS

REACHABLE_BYTES: Final = 914e9  # a second, of the 936e9 of a 3090
HALF_FLOPS: Final = 71e12  # a second, float16 factors and float32 sums
EFFICIENCY: Final = 0.75  # of the roof, assumed
START_SECONDS: Final = 1.5e-6  # of a kernel in a captured graph, assumed
LONGEST: Final = 1 << 17  # context that the outline is opened for
MOST_ROWS: Final = 1024  # of a step, prompts included
DRAFTERS: Final = ("mtp", "dflash2")


@dataclass(frozen=True, slots=True)
class Work:
    """Ops of a step that do the same."""

    call: Call
    calls: int

    @property
    def roof_s(self) -> float:
        """Time of one call at the roof of a 3090."""
        return max(self.call.traffic.moved / REACHABLE_BYTES, self.call.flops / HALF_FLOPS)

    @property
    def projected_s(self) -> float:
        """Of one call, with the assumed efficiency and starts."""
        return self.roof_s / EFFICIENCY + len(self.call.starts) * START_SECONDS


def seconds(works: Sequence[Work]) -> float:
    """Of all of them, projected."""
    return sum(work.calls * work.projected_s for work in works)


def roof_seconds(works: Sequence[Work]) -> float:
    return sum(work.calls * work.roof_s for work in works)


def starts(works: Sequence[Work]) -> int:
    """Kernels that all of them start."""
    return sum(work.calls * len(work.call.starts) for work in works)


@dataclass(frozen=True, slots=True)
class DrafterOutline:
    """A describe.Description of a DFlash2 drafter, its linears quantised as the target's are."""

    sizes: DFlash2Sizes
    target: HybridSizes
    blocks: str = "model"
    byte_tokenizer: bool = False
    fewest_layers: int = 1

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.target.eos_ids

    def tensors(self) -> Iterator[Tensor]:
        for tensor in self.sizes.tensors():
            yield replace(tensor, name=f"{self.blocks}.{tensor.name}")

    def config(self) -> dict[str, Any]:
        sizes = self.sizes
        return {
            "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "vocab_size": sizes.vocabulary,
            "hidden_size": sizes.width, "intermediate_size": sizes.feed_forward,
            "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim, "rms_norm_eps": 1e-6,
            "rope_theta": 1e7, "num_target_layers": self.target.layers,
            "layer_types": ["sliding_attention"] * sizes.layers, "sliding_window": sizes.window,
            "is_causal": False, "dtype": "bfloat16",
            "dflash_config": {
                "block_size": sizes.block, "mask_token_id": sizes.vocabulary - 1,
                "conv_group_size": sizes.conv_group, "conv_kernel_size": sizes.conv_taps,
                "selector_rank": sizes.rank, "selector_top_k": 16,
            },
        }  # fmt: skip

    def changed(self, *, layers: int | None, context: int | None) -> Self:
        raise NotImplementedError("a drafter is as long as it is")


class Outline:
    """The model, its MTP module and its DFlash2 drafter, opened once."""

    def __init__(self, sizes: HybridSizes = QWEN_27B) -> None:
        assert sizes.drafter is not None
        self.ops = ops = OutlineOps(sizes.vocabulary)
        with tempfile.TemporaryDirectory(prefix="quickdraft-outline-") as folder:
            for name, one in (("target", sizes), ("drafter", DrafterOutline(sizes.drafter, sizes))):
                (Path(folder) / name).mkdir()
                write_outline(one, "compressed-tensors", Path(folder) / name)
            target, folders = open_target(Path(folder) / "target"), [read_folder(Path(folder) / "drafter")]
            loaded = load_model(
                target, ops, max_rows=MOST_ROWS, max_wanted=MAX_ROWS, max_context=LONGEST,
                kv_dtype="bfloat16", taps=taps_for(folders, target), mtp=True,
            )  # fmt: skip
            models = load_drafters(folders, loaded, None, ops)
        assert models.mtp is not None
        self.model, self.mtp, self.dflash = loaded.model, models.mtp, models.dflash[0]
        self.states = self.model.recurrent_cache(1, 1, MAX_ROWS - 1)
        self._batches: dict[str, Any] = {}
        self._run: set[str] = set()

    def step(self, rows: int, context: int, kv_dtype: KVDtype, *, drafted: bool) -> list[Work]:
        """Rows of one sequence behind `context` tokens; `drafted`: all but the first are drafts, and half as
        many of the step before are replayed; else a part of a prompt of which the last row is wanted."""
        batch = self._batch("step", MOST_ROWS)
        pending = rows - 1 if drafted else 0
        wanted = np.arange(rows if drafted else 1)
        _set(batch, np.zeros(rows), context, wanted, [0], [pending // 2], [pending])
        return self._works("step", self.model.program(batch, self._kv[kv_dtype], self.states))

    def mtp_pass(self, context: int) -> list[Work]:
        """One chained token."""
        batch = self._batch("mtp", MAX_ROWS)
        _set(batch, np.zeros(1), context, np.arange(1))
        return self._works("mtp", self.mtp.draft(batch, self._kv["bfloat16"]))

    def block_pass(self, context: int) -> list[Work]:
        """One block of all its rows."""
        batch = self._batch("block", MAX_ROWS)
        one = np.array([context], np.int32)
        table = np.arange(batch.limits[2], dtype=np.int32)[None]
        self.dflash.set_block(batch, one, one, np.array([self.dflash.config.block], np.int32), table)
        return self._works("block", self.dflash.block(batch, self._side))

    @cached_property
    def _kv(self) -> dict[KVDtype, Any]:
        kinds: tuple[KVDtype, ...] = ("bfloat16", "int8")
        return {kind: self.model.kv_cache(_BLOCKS, kind) for kind in kinds}

    @cached_property
    def _side(self) -> Any:
        return self.dflash.kv_cache(_BLOCKS, "bfloat16")

    def _batch(self, name: str, rows: int) -> Any:
        if name not in self._batches:
            vocabulary = self.model.config.vocabulary_size
            self._batches[name] = self.ops.batch(rows, 1, _BLOCKS, _BLOCKS, vocabulary)
        return self._batches[name]

    def _works(self, name: str, program: Any) -> list[Work]:
        """Of a run in the shape it would be captured in, not the first of its kind: buffers have the copies
        then that norms and gates write."""
        for _ in range(1 if name in self._run else 2):
            self.ops.calls.clear()
            self.ops.launcher.seen.clear()
            program.run()
        self._run.add(name)
        found: dict[Any, list[Call]] = {}
        for call in self.ops.calls:
            key = call.name, call.shape, call.traffic, call.flops, len(call.starts)
            found.setdefault(key, []).append(call)
        return [Work(calls[0], len(calls)) for calls in found.values()]


_BLOCKS: Final = LONGEST // BLOCK_TOKENS


def _set(batch: Any, tokens: Any, first: int, wanted: Any, *states: list[int]) -> None:
    rows = len(tokens)
    table = np.arange(-(-(first + rows) // BLOCK_TOKENS))[None]
    arrays = tokens, np.arange(first, first + rows), [0, rows], table, wanted, *states
    batch.set(*(np.array(array, np.int32) for array in arrays))


@lru_cache
def outline() -> Outline:
    """Of Qwen3.8-27B; takes some seconds."""
    return Outline()


@lru_cache
def step_works(
    rows: int, context: int, kv_dtype: KVDtype = "bfloat16", *, drafted: bool = True
) -> list[Work]:
    """Every op of a step of the target."""
    return outline().step(rows, context, kv_dtype, drafted=drafted)


@lru_cache
def pass_works(source: str, context: int) -> list[Work]:
    """Every op of one pass of a drafter."""
    opened = outline()
    return {"mtp": opened.mtp_pass, "dflash2": opened.block_pass}[source](context)
