"""Counting a draft vocabulary: the tokens a model writes most, in answers given or generated here.

A file of prompts becomes answers through the engine, in batches, each sampled with its row number as
seed, so that the same file and model give the same vocabulary. Ids that end a turn are always in it.
Knows no drafter; the file is models/draft_vocab's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quickdraft.engine.llm import LLM, Prompt
from quickdraft.errors import ConfigError, EngineError, ModelFormatError
from quickdraft.models.draft_vocab import DraftVocab
from quickdraft.models.loading.strict_files import parse_object, read_text
from quickdraft.types import SamplingParams

DEFAULT_COVERAGE: Final = 0.98
TEMPERATURE: Final = 0.7  # as answers are asked for, not the likeliest ones alone
MAX_FILE_BYTES: Final = 4 << 30
_BATCH: Final = 64  # prompts between two reports


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a prompts file: what to answer, or the ids of its answer."""

    where: str
    prompt: str | tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] = ()
    answer: tuple[int, ...] | None = None
    turn: str = ""  # a user's, where the model has a chat template; else a prompt


def read_rows(path: Path) -> list[Row]:
    """Rows of a .jsonl file, else one turn per line; blank lines are skipped. ConfigError names the line."""
    try:
        lines = read_text(path, MAX_FILE_BYTES).split("\n")
    except ModelFormatError as error:
        raise ConfigError(str(error)) from error
    of = _json_row if path.suffix == ".jsonl" else lambda line, where: Row(where, turn=line)
    rows = [of(line, f"{path}: line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ConfigError(f"{path}: no prompts")
    return rows


def count_answers(
    llm: LLM, rows: Sequence[Row], max_tokens: int, report: Callable[[str], None]
) -> NDArray[np.int64]:
    """How often each id [V] occurs in the answers of the rows. EngineError for a request that fails."""
    counts = np.zeros(llm.opened.runner.model.config.vocabulary_size, np.int64)
    asked: list[tuple[Prompt, SamplingParams]] = []
    for number, row in enumerate(rows):
        if row.answer is not None:
            _add(counts, row.answer, row.where)
        else:
            params = SamplingParams(temperature=TEMPERATURE, seed=number, max_tokens=max_tokens)
            asked.append((_prompt(llm, row), params))
    for first in range(0, len(asked), _BATCH):
        for done in llm.generate_many(asked[first : first + _BATCH]):
            if done.error is not None:
                raise EngineError(f"an answer failed: {done.error}")
            _add(counts, done.ids, "an answer")
        report(f"{min(first + _BATCH, len(asked))} of {len(asked)} prompts answered")
    return counts


def choose_vocab(
    counts: NDArray[np.int64], always: Sequence[int], size: int | None, coverage: float | None
) -> DraftVocab:
    """The `size` ids that occur most, or the fewest that cover the share `coverage`; those in `always`
    first, of equal counts the lower id, and never one that does not occur. ConfigError where nothing was
    counted, or `size` has no room for `always`."""
    total = int(counts.sum())
    if not total:
        raise ConfigError("no tokens were counted", hint="give prompts that are answered")
    kept = sorted(set(always))
    if size is not None and size < max(1, len(kept)):
        raise ConfigError("bad value for --size", got=size, expected=f"at least {max(1, len(kept))}")
    order = np.argsort(-counts, kind="stable")
    order = order[(counts[order] > 0) & ~np.isin(order, kept)]
    covered = int(counts[kept].sum())
    sums = (covered + np.concatenate([[0], np.cumsum(counts[order])])) / total
    if size is not None:
        more = min(size - len(kept), len(order))
    else:
        wanted = DEFAULT_COVERAGE if coverage is None else coverage
        more = min(int(np.searchsorted(sums, wanted)), len(order))
    if not kept:
        more = max(1, more)
    ids = np.sort(np.concatenate([np.array(kept, np.int64), order[:more]]))
    return DraftVocab(ids, float(sums[more]), len(counts), total)


def _prompt(llm: LLM, row: Row) -> Prompt:
    if row.messages:
        return llm.chat_prompt(row.messages)
    if row.turn and llm.opened.chat_template is not None:
        return llm.chat_prompt([{"role": "user", "content": row.turn}])
    return row.turn if row.prompt is None else row.prompt


def _json_row(line: str, where: str) -> Row:
    try:
        values = parse_object(line, where)
    except ModelFormatError as error:
        raise ConfigError(str(error)) from error
    prompt, messages = values.get("prompt"), values.get("messages")
    if (prompt is None) == (messages is None):
        raise ConfigError(f"{where}: a row", got=sorted(values)[:8], expected="one of prompt and messages")
    if messages is not None and not _are_messages(messages):
        raise ConfigError(f"{where}: messages", expected="a list of objects with a role")
    if prompt is not None and not isinstance(prompt, str):
        prompt = _ids(prompt, f"{where}: prompt", "text, or a list of ids")
    answer = values.get("answer")
    if answer is not None:
        answer = _ids(answer, f"{where}: answer", "a list of ids")
    return Row(where, prompt, tuple(messages or ()), answer)


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and all(isinstance(one, dict) and "role" in one for one in value)
        and value != []
    )


def _ids(value: Any, where: str, expected: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise ConfigError(where, got=repr(value)[:80], expected=expected)
    return tuple(value)


def _add(counts: NDArray[np.int64], ids: Sequence[int], where: str) -> None:
    found = np.array(ids, np.int64)
    if len(found) and not 0 <= found.min() <= found.max() < len(counts):
        raise ConfigError(
            f"{where}: an id that the model has not", got=int(found.max()), expected=f"0..{len(counts) - 1}"
        )
    np.add.at(counts, found, 1)
