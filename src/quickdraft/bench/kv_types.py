"""`bench kv-types`: what a type of cached keys and values changes in the logits, and what attention costs.

Logits: the same texts are read with every type side by side, so that row by row only the type
differs; drafts and sampling play no part. Times: attention alone, over all layers of one step, the
types in turns. Nothing here says which type is right: each is a numerics mode of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from quickdraft.bench.machine import commit
from quickdraft.bench.report import check_json_folder, say, write_json
from quickdraft.bench.step_runner import StepRunner, open_steps
from quickdraft.bench.verify_cost import medians_in_turns
from quickdraft.bench.workloads import RANDOM_SEED, Chat, encoding_of, long_document, named
from quickdraft.config import usable_cores
from quickdraft.engine.opened import EngineConfig, Opened, open_model
from quickdraft.engine.plan import PlanEntry, StepPlan
from quickdraft.ops.interface import KVDtype
from quickdraft.state.blocks import BlockPool
from quickdraft.state.sequence import SequenceState

if TYPE_CHECKING:
    from quickdraft.bench.op_work import DescribingOps

SCHEMA: Final = "quickdraft-kv-types-1"
PAIRS: Final[tuple[tuple[KVDtype, KVDtype], ...]] = (  # (type, what it is compared with)
    ("float16", "float32"), ("bfloat16", "float32"), ("int8", "float32"), ("int8", "float16"),
)  # fmt: skip
TIMED: Final[tuple[KVDtype, ...]] = ("float16", "int8")
ROWS: Final = (1, 4, 16)
CONTEXTS: Final = (2048, 6000)
LONG_TOKENS: Final = 2048  # of the one long text
RANDOM_TOKENS: Final = 256  # of a model file without a tokenizer
CHUNK_ROWS: Final = 64


@dataclass(slots=True)
class Effect:
    """Logits under one type of keys and values beside another's, summed up over `rows` rows."""

    dtype: KVDtype
    baseline: KVDtype
    rows: int = 0
    changed: int = 0  # rows whose best token differs
    square: float = 0.0  # sum over rows of the mean squared difference
    spread: float = 0.0  # sum over rows of the baseline's variance
    largest: float = 0.0

    def add(self, logits: NDArray[np.float32], baseline: NDArray[np.float32]) -> None:
        """Rows [n, V] of both."""
        difference = logits.astype(np.float64) - baseline
        self.rows += len(logits)
        self.changed += int((logits.argmax(axis=1) != baseline.argmax(axis=1)).sum())
        self.square += float((difference**2).mean(axis=1).sum())
        self.spread += float(baseline.astype(np.float64).var(axis=1).sum())
        self.largest = max(self.largest, float(np.abs(difference).max()))

    def to_dict(self) -> dict[str, object]:
        """The JSON shape of `--json`."""
        return {
            "type": self.dtype,
            "baseline": self.baseline,
            "rows": self.rows,
            "rms_difference": math.sqrt(self.square / self.rows),
            "rms_spread": math.sqrt(self.spread / self.rows),
            "largest_difference": self.largest,
            "best_changed": self.changed,
        }


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """Median milliseconds of attention in one step, all layers, by type."""

    context: int
    rows: int
    ms: dict[KVDtype, float]


@dataclass(frozen=True, slots=True)
class KVTypesResult:
    """One run of `bench kv-types`."""

    model: str
    threads: int
    commit: str | None
    effects: tuple[Effect, ...]
    times: tuple[AttentionTime, ...]

    def to_dict(self) -> dict[str, object]:
        """The JSON shape of `--json`."""
        return {
            "schema": SCHEMA,
            "model": self.model,
            "threads": self.threads,
            "commit": self.commit,
            "logits": [effect.to_dict() for effect in self.effects],
            "attention": [
                {"context": t.context, "rows": t.rows, "ms": {k: round(v, 4) for k, v in t.ms.items()}}
                for t in self.times
            ],
        }


def run(
    model: str | Path,
    json_path: Path | None = None,
    rows: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    threads: int | None = None,
) -> KVTypesResult:
    """Measure, print, write `json_path` if given. ConfigError for rows or contexts that do not fit."""
    check_json_folder(json_path)
    threads = usable_cores() if threads is None else threads
    name, effects = logit_effects(model, threads)
    times = attention_times(model, threads, rows or ROWS, contexts)
    result = KVTypesResult(name, threads, commit(), effects, times)
    print_result(result, Console())
    if json_path is not None:
        write_json(json_path, result.to_dict())
    return result


def logit_effects(model: str | Path, threads: int) -> tuple[str, tuple[Effect, ...]]:
    """The model's name, and each pair of types over all texts."""
    kinds = dict.fromkeys(kind for pair in PAIRS for kind in reversed(pair))
    opened = {
        kind: open_model(model, EngineConfig(threads=threads, kv_dtype=kind, prefix_cache=False))
        for kind in kinds
    }
    effects = tuple(Effect(*pair) for pair in PAIRS)
    first = next(iter(opened.values()))
    for ids in texts(first):
        say(f"reading {len(ids)} tokens with {len(opened)} types")
        states = {kind: SequenceState(BlockPool(one.runner.kv.blocks)) for kind, one in opened.items()}
        for start in range(0, len(ids), CHUNK_ROWS):
            chunk = ids[start : start + CHUNK_ROWS]
            logits = {kind: _logits(one, states[kind], chunk) for kind, one in opened.items()}
            for effect in effects:
                effect.add(logits[effect.dtype], logits[effect.baseline])
    return first.name, effects


def texts(opened: Opened) -> list[list[int]]:
    """Token ids of quickdraft's own texts, cut to the context: the start of the long document, and chat
    prompts where there is a template; random ids where there is no tokenizer."""
    encoding, limit = encoding_of(opened), opened.max_context_tokens
    if encoding.encode is None:
        random = np.random.default_rng(RANDOM_SEED)
        return [random.integers(0, encoding.vocabulary_size, min(RANDOM_TOKENS, limit)).tolist()]
    found = [encoding.encode(long_document())[: min(LONG_TOKENS, limit)]]
    if encoding.chat_ids is not None:
        for workload in named(("rag", "summary"), has_tokenizer=True):
            chats = (prompt for prompt in workload.prompts if isinstance(prompt, Chat))
            found += [encoding.chat_ids(chat.messages)[:limit] for chat in chats]
    return found


def _logits(opened: Opened, state: SequenceState, ids: list[int]) -> NDArray[np.float32]:
    start = state.committed
    state.reserve(len(ids))
    entry = PlanEntry("bench", tuple(ids), start, len(ids), (), "", state.block_table)
    opened.runner.run(StepPlan((entry,)))
    state.commit(len(ids))
    model: Any = opened.runner.model
    logits: NDArray[np.float32] = model.logits[: len(ids)]
    return logits


def attention_times(
    model: str | Path, threads: int, rows: Sequence[int], contexts: Sequence[int] | None
) -> tuple[AttentionTime, ...]:
    """Attention of each type by context and rows; the types take turns."""
    from quickdraft.bench.op_work import DescribingOps

    runners: list[tuple[StepRunner, DescribingOps]] = []
    for kind in TIMED:
        ops = DescribingOps(threads)
        wanted = contexts if contexts is not None else CONTEXTS
        runner, counts, lengths = open_steps(model, ops, rows, wanted, kind)
        runners.append((runner, ops))
    times = []
    for context in lengths:
        say(f"reading up to {context} tokens")
        for runner, _ in runners:
            runner.read(context)
        for count in counts:
            measure = partial(_attention_ms, runners, count)
            medians = medians_in_turns(measure, range(len(TIMED)))
            times.append(AttentionTime(context, count, dict(zip(TIMED, medians, strict=True))))
    return tuple(times)


def _attention_ms(runners: Sequence[tuple[StepRunner, DescribingOps]], rows: int, index: int) -> float:
    runner, ops = runners[index]
    timed = zip(runner.timed_ops(rows), ops.works, strict=True)
    return 1000 * sum(seconds for (seconds, _), work in timed if work.name == "attention")


def print_result(result: KVTypesResult, console: Console) -> None:
    """A table of what the types change, and one of attention's times."""
    table = Table(title=f"{result.model}: logits by type of keys and values", title_justify="left",
                  box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)  # fmt: skip
    for column in ("type", "against", "rows", "rms", "of spread", "largest", "best changed"):
        table.add_column(column, justify="left" if column in ("type", "against") else "right", no_wrap=True)
    for effect in result.effects:
        rms, spread = math.sqrt(effect.square / effect.rows), math.sqrt(effect.spread / effect.rows)
        table.add_row(
            effect.dtype, effect.baseline, str(effect.rows), f"{rms:.4f}", f"{spread:.2f}",
            f"{effect.largest:.3f}", f"{100 * effect.changed / effect.rows:.2f} %",
        )  # fmt: skip
    console.print(table)
    table = Table(title=f"attention of a step, {result.threads} threads: ms", title_justify="left",
                  box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)  # fmt: skip
    for column in ("context", "rows", *TIMED, "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for time in result.times:
        first, second = (time.ms[kind] for kind in TIMED)
        table.add_row(str(time.context), str(time.rows), f"{first:.2f}", f"{second:.2f}",
                      f"{first / second:.2f}")  # fmt: skip
    console.print(table)
