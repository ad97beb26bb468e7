"""evaluate: what an exported drafter is worth on held-out rows, as the engine runs it and teacher-forced.

In the engine the held-out prompts are decoded greedily, once plainly and once for each length of draft,
and every token must be the plain one. Teacher-forced, the network reads the rows' own texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from quickdraft.engine.forced_drafting import ForcedDrafting
from quickdraft.engine.llm import LLM, Completion
from quickdraft.errors import ConfigError, EngineError
from quickdraft.train.corpus import read_features, rows_of
from quickdraft.train.display import Display
from quickdraft.train.exported import read_exported
from quickdraft.train.form import DrafterForm, spread_taps
from quickdraft.train.objective import Corpus
from quickdraft.train.open_target import open_for_training
from quickdraft.train.rows import Row, data_layers, held_out
from quickdraft.types import Backend, SamplingParams, Speculation

DEFAULT_ROWS: Final = 32
_SEQUENCES: Final = 8


@dataclass(frozen=True, slots=True)
class Engine:
    """What the engine made of the prompts: tokens per step for each length, and of the longest drafts the
    share of right tokens by slot (after right ones or not) and how many drafts kept 0, 1, ... tokens."""

    prompts: int
    tokens: int
    tokens_per_step: list[float]
    slot_accuracy: list[float]
    accepted: list[int]


def evaluate(
    drafter: Path, target: str, data: Path, rows: int, max_tokens: int, threads: int | None, display: Display
) -> dict[str, Any]:  # fmt: skip
    """{"source", "rows", "engine": Engine, "teacher_forced": Report} as JSON. EngineError where a token
    differs from plain decoding; other errors as of opening either."""
    opened, sha256 = open_for_training(target)
    form, trainee = read_exported(drafter, opened, sha256)
    every = rows_of(data, opened)
    measured = [number for number, row in enumerate(every) if held_out(row)][:rows]
    if not measured:
        raise ConfigError(f"no held-out row in {data}", hint="make more --rows")
    in_engine = _in_engine(
        drafter, target, form, [every[number] for number in measured], max_tokens, threads, display
    )
    layers = form.taps or data_layers(data) or spread_taps(opened.config.layers)
    features = read_features(data, every, opened, layers, threads, display.counting("features"))
    report = trainee.measure(Corpus(every, features, [], measured), measured)
    return {
        "source": form.kind, "rows": len(measured), "engine": asdict(in_engine),
        "teacher_forced": asdict(report),
    }  # fmt: skip


def _in_engine(
    drafter: Path, target: str, form: DrafterForm, rows: Sequence[Row], max_tokens: int,
    threads: int | None, display: Display,
) -> Engine:  # fmt: skip
    llm = LLM(
        target,
        threads=threads,
        drafters=(drafter,),
        max_sequences=_SEQUENCES,
        prefix_cache=False,
        backend=Backend.CPU,
    )
    try:
        plain = _decode(llm, rows, Speculation(), max_tokens)
        own, source = llm.opened.engine.drafting, Speculation((form.kind,))
        reached, forced = [], ForcedDrafting(own, form.kind, 0)
        for length in range(1, own.longest[form.kind] + 1):
            forced = ForcedDrafting(own, form.kind, length)
            llm.opened.engine.drafting = forced
            found = _decode(llm, rows, source, max_tokens)
            _check_same(plain, found, length)
            steps = sum(one.timings.steps for one in found)
            reached.append(sum(len(one.ids) for one in found) / steps)
            display.report(f"drafts of {length}: {reached[-1]:.3f} tokens per step")
        texts = [(*row.tokens[: row.start], *one.ids) for row, one in zip(rows, plain, strict=True)]
        return Engine(
            len(rows), sum(len(one.ids) for one in plain), reached, forced.slot_accuracy(texts),
            forced.accepted,
        )  # fmt: skip
    finally:
        llm.close()


def _decode(llm: LLM, rows: Sequence[Row], speculation: Speculation, max_tokens: int) -> list[Completion]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, speculation=speculation)
    return llm.generate_many([(row.tokens[: row.start], params) for row in rows])


def _check_same(plain: Sequence[Completion], found: Sequence[Completion], length: int) -> None:
    for number, (one, other) in enumerate(zip(plain, found, strict=True)):
        if one.ids != other.ids or one.error or other.error:
            raise EngineError(
                f"drafts of {length} changed the answer to held-out prompt {number}", got=other.error,
                hint="this is a defect of quickdraft: please report it",
            )  # fmt: skip


def table_of(result: dict[str, Any]) -> list[str]:
    """Lines of a table for people: a row per length, or slot."""
    engine, forced = result["engine"], result["teacher_forced"]
    lines = ["drafts  tokens/step  slot right  kept  | teacher-forced: tokens/step  slot right  recall"]
    slots = max(len(engine["tokens_per_step"]), len(forced["tokens_per_step"]))
    for n in range(slots + 1):
        lines.append(
            f"{n:6}  {_at(engine['tokens_per_step'], n - 1, 11)}  {_at(engine['slot_accuracy'], n - 1, 10)}"
            f"  {_at(engine['accepted'], n, 4)}  | {_at(forced['tokens_per_step'], n - 1, 27)}"
            f"  {_at(forced['slot_accuracy'], n - 1, 10)}  {_at(forced['recall'], n - 1, 6)}"
        )
    return lines


def _at(values: Sequence[float], place: int, width: int) -> str:
    if not 0 <= place < len(values):
        return "-".rjust(width)
    value = values[place]
    return (str(value) if isinstance(value, int) else f"{value:.3f}").rjust(width)
