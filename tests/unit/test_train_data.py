"""Making training rows: whose turns are kept, how answers are asked for, tasks, and going on after a stop."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quickdraft.engine.llm import LLM
from quickdraft.errors import ConfigError
from quickdraft.train.chat_rows import chat_rows, find_frame
from quickdraft.train.data import DataPlan, make_data
from quickdraft.train.rows import Row, append_rows, held_out, read_rows
from quickdraft.train.tasks import FIRST_INDEX, is_document, task
from quickdraft.types import FinishReason
from tests.support.model import default_model_path
from tests.support.tiny import write_tiny_llama

TEXT = (
    "The river keeps its level all summer. Boats pass under the bridge every morning, and the bridge hums. "
    "Nobody counts the boats anymore, but the keeper still writes every name into a book."
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = write_tiny_llama(tmp_path_factory.mktemp("target") / "tiny.gguf")
    opened = LLM(path, threads=1, max_sequences=8, kv_memory_bytes=1 << 24)
    yield opened
    opened.close()


class Scripted:
    """An LLM that answers as it is told and keeps what it was asked."""

    def __init__(self, llm: LLM, turns: Sequence[tuple[list[int], FinishReason]]) -> None:
        self._llm, self._turns, self.asked = llm, turns, []
        self.opened = SimpleNamespace(eos_ids=(2,), tokenizer=llm.tokenizer)

    def generate_many(self, jobs: Any) -> list[Any]:
        self.asked.append(jobs)
        if len(self.asked) == 1:
            return [
                SimpleNamespace(ids=tuple(ids), finish_reason=why, error=None) for ids, why in self._turns
            ]
        return [SimpleNamespace(ids=(9, 2), finish_reason=FinishReason.STOP, error=None) for _ in jobs]


def test_turns_that_are_kept_and_how_they_are_asked(llm: LLM) -> None:
    frame = find_frame(llm)
    assert llm.chat_prompt([{"role": "user", "content": "X"}]).ids == [
        *frame.head, *llm.encode("X"), *frame.tail
    ]  # fmt: skip
    good = [100, 101, 102, 103]
    turns = [
        ([*good, 2], FinishReason.STOP),
        ([*good, 104], FinishReason.LENGTH),  # did not stop
        ([100, 101, 102, 2], FinishReason.STOP),  # short
        ([100, 101, 1, 103, 2], FinishReason.STOP),  # a control token
        ([*good, 105, 2], FinishReason.STOP),
    ]
    scripted: Any = Scripted(llm, turns)
    rows = chat_rows(scripted, frame, range(5), seed=0, max_tokens=7)
    first, second = scripted.asked
    assert [(p.temperature, p.top_p, p.seed, p.max_tokens) for _, p in first] == [
        (1.0, 0.95, index, 96) for index in range(5)
    ]
    assert all(prompt == frame.head and p.speculation.off for prompt, p in first)
    assert [(p.temperature, p.seed, p.max_tokens) for _, p in second] == [(0.0, 0, 7), (0.7, 4, 7)]
    wanted = [[*frame.head, *good, *frame.tail], [*frame.head, *good, 105, *frame.tail]]
    assert [row.start for row in rows] == [len(prompt) for prompt in wanted]
    assert [list(row.tokens) for row in rows] == [[*prompt, 9, 2] for prompt in wanted]
    assert [(row.index, row.temperature, held_out(row)) for row in rows] == [(0, 0.0, True), (4, 0.7, False)]


def test_prompts_are_gone_on_with_where_it_stopped(llm: LLM, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"letter {n}"} for n in range(5)] + [{"messages": [{"role": "user", "content": "a"}]}]
    prompts.write_text("\n".join(map(json.dumps, lines)))

    def make(folder: Path, rows: int, **more: Any) -> int:
        plan = DataPlan(rows, 0, prompts, **{"max_tokens": 6, **more})
        return make_data(llm, "0" * 64, folder, plan, lambda line: None)

    assert make(tmp_path / "whole", 100) == 6
    assert make(tmp_path / "parts", 2) == 2
    with open(tmp_path / "parts" / "rows.jsonl", "a") as file:
        file.write('{"index": 2, "kind": "pro')  # it was stopped while it wrote
    assert make(tmp_path / "parts", 6) == 6
    whole, parts = ((tmp_path / name / "rows.jsonl").read_bytes() for name in ("whole", "parts"))
    assert whole == parts
    rows = read_rows(tmp_path / "whole")
    assert list(rows[5].tokens[: rows[5].start]) == llm.chat_prompt([{"role": "user", "content": "a"}]).ids
    assert [row.temperature for row in rows] == [0, 0, 0, 0, 0.7, 0]
    with pytest.raises(ConfigError, match="made otherwise"):
        make(tmp_path / "whole", 6, seed=1)
    with pytest.raises(ConfigError, match="too few documents"):
        make_data(llm, "0" * 64, tmp_path / "whole", DataPlan(6, 1, prompts, 0, 6), lambda line: None)


def test_tasks_come_in_turn_over_what_the_target_wrote(llm: LLM, tmp_path: Path) -> None:
    about = {"target_sha256": "0" * 64, "source": "chat", "seed": 0, "max_tokens": 4}
    (tmp_path / "data.json").write_text(json.dumps(about))
    answer = llm.encode(TEXT)
    append_rows(tmp_path, [Row(index, "chat", 0.0, 1, (5, *answer)) for index in (0, 3, 7, 20)])
    append_rows(tmp_path, [Row(21, "chat", 0.0, 1, (5, *llm.encode("No document.")))])
    for tasks in (2, 4):  # the second call goes on
        assert make_data(llm, "0" * 64, tmp_path, DataPlan(5, tasks, None, 0, 4), print) == 5 + tasks
    made = read_rows(tmp_path)[5:]
    assert [row.index - FIRST_INDEX for row in made] == [0, 3, 7, 20]
    assert [row.kind for row in made] == ["copy", "extract", "edit", "copy"]
    assert [held_out(row) for row in made] == [True, False, False, True]
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    asked = [tokenizer.decode(row.tokens[: row.start]) for row in made]
    assert all(TEXT in text for text in asked)
    with pytest.raises(ConfigError, match="chat rows come before"):
        make_data(llm, "0" * 64, tmp_path, DataPlan(6, 4, None, 0, 4), print)


def test_what_tasks_ask() -> None:
    assert is_document(TEXT) and not is_document("Yes. " * 40)
    turns = [task(number, TEXT) for number in range(9)]
    assert len({turn for _, turn in turns}) == 7  # edits are of one word
    assert '"bridge" replaced by "morning"' in turns[2][1]
    assert "last sentence" in turns[7][1]


@pytest.mark.model
def test_rows_of_the_default_model_stay_what_they_are() -> None:
    """Those that the drafters in the package were trained with: one greedy answer and one sampled one."""
    llm = LLM(default_model_path(), threads=2, drafters=(), max_sequences=4)
    rows = chat_rows(llm, find_frame(llm), (4, 24, 28), 0, 256)
    llm.close()
    assert [(row.index, row.start, len(row.tokens), _digest(row)) for row in rows] == [
        (24, 47, 272, "debb7a52c9ce014a"),
        (28, 45, 104, "c4ca3647418c74a0"),
    ]


def _digest(row: Row) -> str:
    return hashlib.sha256(json.dumps(list(row.tokens)).encode()).hexdigest()[:16]
