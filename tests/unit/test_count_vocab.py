"""Counting a draft vocabulary: rows of a prompts file, and which ids are chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from quickdraft.cli.main import app
from quickdraft.engine.llm import LLM
from quickdraft.errors import ConfigError
from quickdraft.models.draft_vocab import DraftVocab
from quickdraft.prepare.draft_vocab import choose_vocab, count_answers, read_rows
from quickdraft.types import SamplingParams
from tests.support.tiny import write_tiny_llama

COUNTS = np.array([0, 5, 1, 5, 0, 3, 0, 2])


@pytest.mark.parametrize(
    ("always", "size", "coverage", "ids", "share"),
    [
        ([6], 3, None, [1, 3, 6], 10 / 16),
        ([2], 3, None, [1, 2, 3], 11 / 16),
        ([6, 2], 99, None, [1, 2, 3, 5, 6, 7], 1.0),
        ([6], None, 0.6, [1, 3, 6], 10 / 16),
        ([6], None, 10 / 16, [1, 3, 6], 10 / 16),
        ([6], None, 0.63, [1, 3, 5, 6], 13 / 16),
        ([6], None, 1.0, [1, 2, 3, 5, 6, 7], 1.0),
        ([], None, None, [1, 2, 3, 5, 7], 1.0),
        ([], None, 0.01, [1], 5 / 16),
    ],
)
def test_the_most_frequent_ids_and_those_that_end_a_turn(
    always: list[int], size: int | None, coverage: float | None, ids: list[int], share: float
) -> None:
    vocab = choose_vocab(COUNTS, always, size, coverage)
    assert vocab.ids.tolist() == ids and vocab.coverage == pytest.approx(share)
    assert (vocab.vocabulary_size, vocab.counted_tokens) == (8, 16)


def test_no_tokens_and_no_room_are_errors() -> None:
    with pytest.raises(ConfigError, match="no tokens were counted"):
        choose_vocab(np.zeros(4, np.int64), [1], 3, None)
    with pytest.raises(ConfigError, match="--size; got 1; expected at least 2"):
        choose_vocab(COUNTS, [1, 2], 1, None)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("[", "not valid JSON"),
        ({}, "one of prompt and messages"),
        ({"prompt": "a", "messages": [{"role": "user"}]}, "one of prompt and messages"),
        ({"prompt": 3}, "text, or a list of ids"),
        ({"prompt": [1, True]}, "text, or a list of ids"),
        ({"prompt": [1], "answer": "text"}, "answer"),
        ({"messages": ["a"]}, "messages"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: Any, named: str) -> None:
    path = tmp_path / "rows.jsonl"
    line = row if isinstance(row, str) else json.dumps(row)
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 3") as error:
        read_rows(path)
    assert named in str(error.value)


def test_answers_are_generated_or_counted_as_they_are(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "hello"}]
    values = [{"prompt": "tone"}, {"prompt": [30, 31]}, {"messages": messages}]
    values.append({"prompt": [5], "answer": [7, 7, 2]})
    rows.write_text("\n".join(map(json.dumps, values)))
    llm = LLM(write_tiny_llama(tmp_path / "tiny.gguf"), threads=1)
    params = [SamplingParams(temperature=0.7, seed=seed, max_tokens=9) for seed in range(3)]
    prompts = ["tone", [30, 31], llm.chat_prompt(messages)]
    expected = np.bincount([7, 7, 2], minlength=320)
    for prompt, one in zip(prompts, params, strict=True):
        expected += np.bincount(llm.generate(prompt, one).ids, minlength=320)  # type: ignore[arg-type]
    assert (count_answers(llm, read_rows(rows), 9, lambda line: None) == expected).all()
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"prompt": [5], "answer": [320]}')
    with pytest.raises(ConfigError, match=r"line 1: an id that the model has not; got 320"):
        count_answers(llm, read_rows(wrong), 9, lambda line: None)
    llm.close()


def test_the_command_writes_what_is_loaded(tmp_path: Path) -> None:
    model, prompts, out = write_tiny_llama(tmp_path / "t.gguf"), tmp_path / "p.txt", tmp_path / "v.json"
    prompts.write_text("tone\n\nsound\n")
    arguments = ["prepare", "draft-vocab", model, "--prompts", prompts, "--out", out, "--max-tokens", 20]
    result = CliRunner().invoke(app, [*map(str, arguments), "--coverage", "0.9", "--threads", "1"])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{out}\n" and "2 of 2 prompts answered" in result.stderr
    llm = LLM(model, threads=1)
    params = [SamplingParams(temperature=0.7, seed=seed, max_tokens=20) for seed in range(2)]
    jobs = [
        (llm.chat_prompt([{"role": "user", "content": text}]), one)
        for text, one in zip(("tone", "sound"), params, strict=True)
    ]
    assert sum(len(done.ids) for done in llm.generate_many(jobs)) == DraftVocab.load(out).counted_tokens
    llm.close()
    vocab = DraftVocab.load(out, 320)
    assert 0.9 <= vocab.coverage <= 1 and 2 in vocab.ids and 2 <= vocab.counted_tokens <= 40
    both = CliRunner().invoke(app, [*map(str, arguments), "--coverage", "0.9", "--size", "8"])
    assert both.exit_code == 2 and "one of them" in both.stderr
