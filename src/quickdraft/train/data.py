"""make_data: a folder of training rows, made by the target and resumable after any row.

Chat rows come first, in the order of their indices, then tasks over the answers among them. What is there
is never made again, and the same settings give the same rows however often the work was stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from quickdraft.engine.llm import LLM
from quickdraft.errors import ConfigError
from quickdraft.prepare.draft_vocab import Row as Prompted
from quickdraft.prepare.draft_vocab import prompt_of
from quickdraft.prepare.draft_vocab import read_rows as read_prompts
from quickdraft.train.chat_rows import answered, chat_rows, find_frame
from quickdraft.train.rows import Row, append_rows, read_rows
from quickdraft.train.tasks import FIRST_INDEX, is_document, task
from quickdraft.types import Backend

ABOUT: Final = "data.json"
GROUP: Final = 128  # indices between two writes
SEQUENCES: Final = 32  # answered at once
DEFAULT_MAX_TOKENS: Final = 256
_FRUITLESS: Final = 8  # groups in a row without a row, before it is an error


@dataclass(frozen=True, slots=True)
class DataPlan:
    """What to make: `rows` rows of chat (of a prompts file: at most), `tasks` tasks."""

    rows: int
    tasks: int = 0
    prompts: Path | None = None
    seed: int = 0
    max_tokens: int = DEFAULT_MAX_TOKENS


@dataclass(frozen=True, slots=True)
class _About:
    target_sha256: str
    source: str  # "chat", or the digest of the prompts file
    seed: int
    max_tokens: int


def open_writer(model: str | Path, threads: int | None) -> LLM:
    """The target as it is asked here: many answers at once, no drafts."""
    return LLM(model, threads=threads, max_sequences=SEQUENCES, drafters=(), backend=Backend.CPU)


def make_data(llm: LLM, sha256: str, folder: Path, plan: DataPlan, report: Callable[[str], None]) -> int:
    """Add what is missing of the plan; how many rows the folder has then. `sha256`: of the target's weights.
    ConfigError for a folder that was made otherwise, or too few documents for the tasks."""
    prompts = read_prompts(plan.prompts) if plan.prompts is not None else None
    folder.mkdir(parents=True, exist_ok=True)
    have = read_rows(folder)
    _check_about(sha256, folder, plan, bool(have))
    chat = [row for row in have if row.index < FIRST_INDEX]
    tasks = have[len(chat) :]
    if len(chat) < plan.rows:
        if tasks:
            raise ConfigError(
                f"{folder} has tasks already, and chat rows come before them", got=f"{len(chat)} chat rows",
                expected=f"{plan.rows}", hint="make a new folder",
            )  # fmt: skip
        for group in _groups(llm, chat, prompts, plan):
            append_rows(folder, group)
            chat += group
            report(f"{len(chat)} of {plan.rows} rows")
    if plan.tasks:
        for group in _task_groups(llm, chat, tasks[-1].index if tasks else -1, plan):
            append_rows(folder, group)
            tasks += group
            report(f"{len(tasks)} of {plan.tasks} tasks")
    return len(chat) + len(tasks)


def _groups(
    llm: LLM, chat: list[Row], prompts: Sequence[Prompted] | None, plan: DataPlan
) -> Iterator[list[Row]]:
    """Groups of rows behind those there are, until there are enough or no prompts are left."""
    at, missing, fruitless = (chat[-1].index + 1 if chat else 0), plan.rows - len(chat), 0
    frame = find_frame(llm) if prompts is None else None
    while missing > 0 and (prompts is None or at < len(prompts)):
        if prompts is not None:
            indices = range(at, min(at + min(GROUP, missing), len(prompts)))
            asked = {index: llm.encode(prompt_of(llm, prompts[index])) for index in indices}
            found = answered(llm, "prompt", asked, plan.seed, plan.max_tokens)
        else:
            assert frame is not None
            indices = range(at, at + min(GROUP, 8 + 2 * missing))
            found = chat_rows(llm, frame, indices, plan.seed, plan.max_tokens)
        at = indices.stop
        found = found[:missing]
        missing -= len(found)
        fruitless = 0 if found else fruitless + 1
        if fruitless == _FRUITLESS:
            raise ConfigError(
                f"{llm.name} makes up no user turns", got=f"none of {GROUP * _FRUITLESS} was usable",
                hint="give --prompts FILE",
            )  # fmt: skip
        if found:
            yield found


def _task_groups(llm: LLM, chat: list[Row], last: int, plan: DataPlan) -> Iterator[list[Row]]:
    """Groups of tasks behind the one of index `last`."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ConfigError("tasks for a model without a tokenizer", got=llm.name, hint="leave out --tasks")
    texts = ((row.index, tokenizer.decode(row.tokens[row.start :])) for row in chat)
    documents = [(index, text) for index, text in texts if is_document(text)]
    if len(documents) < plan.tasks:
        raise ConfigError(
            "too few documents among the answers", got=len(documents), expected=f"--tasks {plan.tasks}",
            hint="make more --rows",
        )  # fmt: skip
    done = sum(FIRST_INDEX + index <= last for index, _ in documents)
    for first in range(done, plan.tasks, GROUP):
        yield _task_rows(llm, documents, range(first, min(first + GROUP, plan.tasks)), plan)


def _task_rows(llm: LLM, documents: list[tuple[int, str]], numbers: range, plan: DataPlan) -> list[Row]:
    kinds, prompts = {}, {}
    for number in numbers:
        index, text = documents[number]
        kind, turn = task(number, text)
        kinds[FIRST_INDEX + index] = kind
        prompts[FIRST_INDEX + index] = llm.chat_prompt([{"role": "user", "content": turn}]).ids
    rows = answered(llm, "task", prompts, plan.seed, plan.max_tokens)
    return [Row(row.index, kinds[row.index], row.temperature, row.start, row.tokens) for row in rows]


def _check_about(sha256: str, folder: Path, plan: DataPlan, begun: bool) -> None:
    source = "chat"
    if plan.prompts is not None:
        source = hashlib.sha256(plan.prompts.read_bytes()).hexdigest()
    path, about = folder / ABOUT, asdict(_About(sha256, source, plan.seed, plan.max_tokens))
    hint = "give a new --out"
    if not path.exists():
        if begun:
            raise ConfigError(f"{folder} was made by something else", got=f"no {ABOUT}", hint=hint)
        path.write_text(json.dumps(about) + "\n")
    elif (found := json.loads(path.read_text())) != about:
        raise ConfigError(f"{folder} was made otherwise", got=found, expected=about, hint=hint)
