"""`bench constraints`: every example obeys its grammar, and what is counted is what a matcher says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quickdraft.bench.constraints import EXAMPLES, SCHEMA, measure, run
from quickdraft.engine.grammar import Grammars
from tests.support.byte_tokenizer import IM_END, byte_tokenizer
from tests.support.tiny import write_tiny_llama


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example[0])
def test_examples_obey(example: tuple) -> None:
    tokenizer = byte_tokenizer()
    name, kind, source, text = example
    cost = measure(tokenizer, (IM_END,), name, kind, source, text)
    matcher, forced = Grammars(tokenizer, (IM_END,)).compile(kind, source, name).start(), 0
    for token in tokenizer.encode(text):
        forced += bool(matcher.forced(1))
        matcher.push(token)
    assert matcher.allows(IM_END) and (cost.rows, cost.forced) == (len(tokenizer.encode(text)), forced)
    assert forced > 50 or name != "JSON schema"


def test_the_file_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = write_tiny_llama(tmp_path / "tiny.gguf"), tmp_path / "out.json"
    costs = run(str(model), out)
    result = json.loads(out.read_text())
    assert result["schema"] == SCHEMA and result["vocabulary"] == 320
    assert [form["rows"] for form in result["forms"]] == [cost.rows for cost in costs]
    assert "JSON schema" in capsys.readouterr().out
