"""`demo`: both ways with one seed, equal ids or an error, on a terminal and in a pipe."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from quickdraft.cli.demo import Side, show
from quickdraft.cli.main import app
from quickdraft.engine.llm import LLM
from quickdraft.errors import EngineError
from quickdraft.text.origins import Origin
from quickdraft.types import SamplingParams, Speculation
from tests.cli.fakes import FakeLLM
from tests.support.tiny import write_tiny_llama


def params(speculation: str) -> SamplingParams:
    drafts = Speculation.parse(speculation)
    return SamplingParams(temperature=0.7, seed=4, max_tokens=50, ignore_eos=True, speculation=drafts)


def test_flags_reach_both_runs_and_the_seed_is_shared(llm: FakeLLM, gguf: str) -> None:
    arguments = ["demo", gguf, "--prompt", "copy this", "--temperature", "0.5", "--max-tokens", "9"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    plain, drafted = (one for _, one in llm.asked)
    assert plain.speculation.off and drafted.speculation.auto and plain.seed == drafted.seed is not None
    assert (plain.temperature, plain.max_tokens) == (0.5, 9)
    assert llm.chats == [[{"role": "user", "content": "copy this"}]] and llm.closed == 1
    assert result.stdout.startswith("Héllo!\nplain decoding: 3 tokens")
    assert "ids equal: " in result.stdout


def test_off_is_nothing_to_compare_with(llm: FakeLLM, gguf: str) -> None:
    result = CliRunner().invoke(app, ["demo", gguf, "--speculation", "off"])
    assert result.exit_code == 2 and "nothing to compare" in result.stderr and not llm.opened


def test_answers_that_differ_are_an_error(llm: FakeLLM) -> None:
    runs = iter([["a", "b"], ["a"]])

    def next_run(index: int) -> None:
        if index == 0:
            llm.parts[:] = next(runs)

    llm.parts, llm.before = ["", ""], next_run
    with pytest.raises(EngineError, match="differ"):
        show(llm, [1], [params("off"), params("auto")], Console(file=io.StringIO()))


@pytest.mark.parametrize("terminal", [True, False])
def test_a_real_model_is_shown_with_its_sources(tmp_path: Path, terminal: bool) -> None:
    llm = LLM(write_tiny_llama(tmp_path / "tiny.gguf"), kv_memory_bytes=1 << 20, threads=1)
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, height=20, highlight=False, markup=False)
    show(llm, "one two one two one two one two", [params("off"), params("lookup@4")], console)
    text = out.getvalue()
    assert "plain decoding" in text and "with drafts: lookup@4" in text and "ids equal: " in text
    assert "50 tokens" in text and ("\x1b[" in text) is terminal


def test_tokens_are_styled_by_source_and_control_characters_are_made_visible() -> None:
    side = Side("x", origins=[Origin("a", "model"), Origin("b\x1b", "lookup")])
    text = side.text()
    assert text.plain == "ab\N{REPLACEMENT CHARACTER}"
    assert [(span.start, span.end, span.style) for span in text.spans] == [(1, 3, "blue underline")]
