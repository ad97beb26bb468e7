"""`chat`: lines in, answers out, history kept."""

from __future__ import annotations

from typer.testing import CliRunner

from quickdraft.cli.chat import printable
from quickdraft.cli.main import app
from quickdraft.errors import RequestError
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


def test_an_answer_cannot_drive_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\x9bc\td\né🙂[bold]") == "a�[2Jb��c\td\né🙂[bold]"
