"""The frame of the command line: version, help, what is imported, how errors end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from quickdraft import __version__
from quickdraft.cli.main import COMMANDS, app
from quickdraft.errors import EngineError
from tests.cli.fakes import FakeLLM
from tests.support.tiny import write_tiny_llama

HEAVY = {"numpy", "fastapi", "uvicorn", "jinja2", "torch", "tokenizers", "gguf"}


def call(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "100", **settings}
    return subprocess.run(
        [sys.executable, "-m", "quickdraft", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def test_version() -> None:
    done = call("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"quickdraft {__version__}\n", "")


@pytest.mark.parametrize("arguments", ["['--version']", "['--help']", "['generate', '--help']"])
def test_nothing_heavy_is_imported(arguments: str) -> None:
    code = (
        f"import sys; from quickdraft.cli.main import app; app({arguments}, standalone_mode=False); "
        f"bad = {HEAVY!r} & set(sys.modules); assert not bad, bad"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=environment)


def test_only_the_chosen_command_is_imported() -> None:
    code = (
        "import sys; from quickdraft.cli.main import app; app(['pull', '--help'], standalone_mode=False); "
        "assert 'quickdraft.cli.pull' in sys.modules and 'quickdraft.cli.serve' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, env=environment)


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(f" {command} " in result.output for command in COMMANDS)


@pytest.mark.parametrize(
    "command",
    [
        *([name] for name in COMMANDS),
        ["bench", "stages"],
        ["prepare", "random"],
        ["prepare", "draft-vocab"],
        ["prepare", "lookup-corpus"],
    ],
    ids="-".join,
)
def test_help_of_every_command(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage: " in result.output and f" {' '.join(command)} " in result.output


@pytest.mark.parametrize("arguments", [["fly"], ["generate", "--fly"], ["generate", "--threads", "0"]])
def test_usage_errors_exit_with_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_config_error_is_one_line_on_stderr() -> None:
    done = call("generate", "smollm3", "--prompt", "x")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: no such model; got 'smollm3'; expected an alias (smollm2-135m)")
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stderr


def test_debug_shows_the_traceback() -> None:
    done = call("--debug", "generate", "smollm3", "--prompt", "x")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "ConfigError: no such model" in done.stderr


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["generate", str(tmp_path), "--prompt", "x"])
    assert result.exit_code == 1
    assert f"{tmp_path}/config.json: cannot be read" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (EngineError("it broke"), 1, "error: it broke\n"),
        (
            ZeroDivisionError("by\nzero"),
            1,
            "error: internal error: ZeroDivisionError: by zero. hint: `quickdr",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_of_a_command(llm: FakeLLM, gguf: str, error: Exception, code: int, line: str) -> None:
    llm.parts = [error]
    result = CliRunner().invoke(app, ["generate", gguf, "--prompt", "x"])
    assert result.exit_code == code
    assert result.stderr.startswith(line) and result.stdout == ""
    assert llm.closed == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_the_shell_closed_is_written_to_nowhere(closed: str, gguf: str) -> None:
    line = f'"$0" -m quickdraft inspect "$1" --memory 1MiB {closed}'
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["sh", "-c", line, sys.executable, write_tiny_llama(Path(gguf))],
        capture_output=True, text=True, env=environment, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("model: ") == (closed == "2>&-")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["inspect"], ["--version"], ["generate", "--help"]])
def test_output_that_does_not_fit_the_disk(arguments: list[str], gguf: str) -> None:
    more = [write_tiny_llama(Path(gguf))] if arguments == ["inspect"] else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "quickdraft", *arguments, *more],
            stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=60,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "error: cannot read or write: No space left on device\n")


def test_text_the_encoding_does_not_have_is_escaped(gguf: str) -> None:
    path = Path(gguf).with_name("gr\u00fc\u00df\x1b[1m.gguf")
    write_tiny_llama(path)
    done = call("inspect", str(path), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("model: gr\\xfc\\xdf\\ufffd[1m (GGUF file)\n")


def test_input_that_is_not_text_in_the_encoding(gguf: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "quickdraft", "chat", str(write_tiny_llama(Path(gguf)))],
        input="\u00e9\n".encode(), capture_output=True, env=environment, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"error: the text is not valid Unicode")


def test_public_names_are_lazy_and_complete() -> None:
    code = (
        "import sys, quickdraft; assert 'numpy' not in sys.modules\n"
        "from quickdraft import SamplingParams, RequestError\n"
        "assert SamplingParams().temperature == 1.0 and issubclass(quickdraft.BadParameter, RequestError)\n"
        "assert {'LLM', 'FetchError'} <= set(quickdraft.__all__) <= set(dir(quickdraft))\n"
        "try: quickdraft.nothing\n"
        "except AttributeError: sys.exit(0)\n"
        "sys.exit('no AttributeError')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_public_errors_are_all_errors() -> None:
    import quickdraft
    from quickdraft import errors

    assert set(errors.__all__) <= set(quickdraft.__all__)


def test_the_reference_page_names_every_flag() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    root = get_command(app)
    context = typer.Context(root)
    commands = [root, *(root.get_command(context, name) for name in COMMANDS)]
    for group in (root.get_command(context, name) for name in ("bench", "prepare", "train")):
        commands += [group.get_command(context, name) for name in group.list_commands(context)]
    flags = {flag for c in commands for p in c.params for flag in [*p.opts, *p.secondary_opts]}
    flags = {flag for flag in flags if flag.startswith("--")}
    assert {"--max-sequences", "--raw", "--json"} <= flags
    assert not {flag for flag in flags if f"`{flag}" not in page}
    written = set(re.findall(r"`(--[a-z-]+)", page)) - {"--help"}
    assert written <= flags, "the page names flags that do not exist"
