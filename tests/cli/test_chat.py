"""`chat`: lines in, answers out, history kept."""

from __future__ import annotations

import io
import signal
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from quickdraft.cli.chat import converse
from quickdraft.cli.flags import printable
from quickdraft.cli.main import app
from quickdraft.errors import RequestError
from quickdraft.types import SamplingParams
from tests.cli.fakes import FakeLLM


def run(gguf: str, text: str, *arguments: str) -> object:
    return CliRunner().invoke(app, ["chat", gguf, *arguments], input=text)


def test_piped_lines_are_turns(llm: FakeLLM, gguf: str) -> None:
    result = run(gguf, "one\n\n two \n")
    assert result.exit_code == 0, result.output
    answer = "Héllo!\n[3 tokens, 100.0 tokens/s, 1 from drafts]\n"
    assert result.stdout == answer * 2
    first = {"role": "user", "content": "one"}
    assert llm.chats == [
        [first],
        [first, {"role": "assistant", "content": "Héllo!"}, {"role": "user", "content": "two"}],
    ]
    assert llm.closed == 1


def test_reset_keeps_the_system_message_and_quit_ends(llm: FakeLLM, gguf: str) -> None:
    result = run(gguf, "one\n/reset\ntwo\n/quit\nthree\n", "--system", "Be brief.")
    assert result.exit_code == 0
    system = {"role": "system", "content": "Be brief."}
    assert llm.chats == [[system, {"role": "user", "content": w}] for w in ("one", "two")]


def test_flags_reach_the_engine(llm: FakeLLM, gguf: str) -> None:
    run(gguf, "x\n", "--temperature", "0.7", "--seed", "3", "--max-tokens", "5", "--speculation", "off")
    params = llm.asked[0][1]
    assert (params.temperature, params.seed, params.max_tokens, params.speculation.off) == (0.7, 3, 5, True)


def test_an_error_in_a_pipe_ends_with_2(llm: FakeLLM, gguf: str) -> None:
    llm.parts = [RequestError("too long")]
    result = run(gguf, "x\n")
    assert result.exit_code == 2
    assert result.stderr == "error: too long\n"


class Terminal(io.StringIO):
    """stdin of someone who types these lines."""

    def isatty(self) -> bool:
        return True


def type_lines(monkeypatch: pytest.MonkeyPatch, llm: FakeLLM, lines: str) -> str:
    monkeypatch.setattr(sys, "stdin", Terminal(lines))
    screen = io.StringIO()
    converse(llm, SamplingParams(), [], Console(file=screen, highlight=False, markup=False, soft_wrap=True))
    return screen.getvalue()


def test_at_a_terminal_an_error_is_shown_and_forgotten(monkeypatch: pytest.MonkeyPatch, llm: FakeLLM) -> None:
    llm.parts = [RequestError("too long")]
    screen = type_lines(monkeypatch, llm, "one\ntwo\n")
    assert screen.count("error: too long\n") == 2
    assert llm.chats == [[{"role": "user", "content": word}] for word in ("one", "two")]


def test_reasoning_is_dimmed_and_goes_into_the_history(monkeypatch: pytest.MonkeyPatch, llm: FakeLLM) -> None:
    llm.thinks, llm.parts = True, ["hm", ", so\n</thi", "nk>\n\nYes", "."]
    monkeypatch.setattr(sys, "stdin", Terminal("one\ntwo\n"))
    screen = io.StringIO()
    console = Console(
        file=screen, highlight=False, soft_wrap=True, force_terminal=True, color_system="standard"
    )
    converse(llm, SamplingParams(), [], console)
    dim, plain = "\x1b[2m", "\x1b[0m"
    assert f"{dim}hm{plain}{dim}, so{plain}\n\nYes." in screen.getvalue()
    assert llm.chats[1][1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm, so"}


def test_an_answer_that_only_thought_is_shown_whole(monkeypatch: pytest.MonkeyPatch, llm: FakeLLM) -> None:
    llm.thinks, llm.parts = True, ["hm</thi"]
    assert "hm</thi\n[3 tokens" in type_lines(monkeypatch, llm, "one\n")


def test_closed_stdin_is_the_end_of_input(monkeypatch: pytest.MonkeyPatch, llm: FakeLLM) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    converse(llm, SamplingParams(), [], Console(file=io.StringIO()))
    assert llm.chats == []


def test_ctrl_c_stops_an_answer_and_keeps_it(monkeypatch: pytest.MonkeyPatch, llm: FakeLLM) -> None:
    llm.parts = ["Once ", "upon", "never", "never"]
    llm.before = lambda index: signal.raise_signal(signal.SIGINT) if index == 1 else None
    before = signal.getsignal(signal.SIGINT)
    screen = type_lines(monkeypatch, llm, "tell\nmore\n")
    assert "Once upon\n[stopped]\n" in screen and "never" not in screen
    assert llm.chats[1][1] == {"role": "assistant", "content": "Once upon"}
    assert signal.getsignal(signal.SIGINT) == before


def test_a_second_ctrl_c_ends_the_program(llm: FakeLLM, gguf: str) -> None:
    llm.before = lambda index: [signal.raise_signal(signal.SIGINT) for _ in range(2)]
    result = run(gguf, "tell\n")
    assert result.exit_code == 130


def test_an_answer_cannot_drive_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\x9bc\td\né🙂[bold]") == "a�[2Jb��c\td\né🙂[bold]"
