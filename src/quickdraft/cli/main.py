"""The `quickdraft` command: finds the command's file, runs it, and turns errors into one line.

Exit codes: 0 done, 1 failed, 2 the user's command line, settings or request are wrong, 130
interrupted, 141 nobody reads the output any more. Knows no command's flags.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from quickdraft import __version__
from quickdraft.errors import ConfigError, QuickdraftError, RequestError

COMMANDS: Final = (
    "serve",
    "generate",
    "chat",
    "demo",
    "pull",
    "inspect",
    "doctor",
    "bench",
    "prepare",
    "train",
)  # quickdraft.cli.<name>.app each
_CANNOT_WRITE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # the world's fault, not ours


class CommandGroup(TyperGroup):
    """Commands by name, each imported when chosen, and one place where errors end."""

    def main(self, *args: Any, **extra: Any) -> Any:
        _open_closed_streams()
        _accept_all_text()
        try:
            return super().main(*args, **extra)
        except OSError as error:  # of --version and --help, which run before any command
            if error.errno not in _CANNOT_WRITE:
                raise
            _print_error(error)
            _abandon_stdout()
            sys.exit(1)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        command = typer.main.get_command(import_module(f"quickdraft.cli.{cmd_name}").app)
        command.name = cmd_name
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _abandon_stdout()
            raise typer.Exit(141) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except Exception as error:
            ours = not type(error).__module__.startswith(("typer", "click"))  # theirs: usage errors, Exit
            if not ours or ctx.params["debug"]:
                raise
            _print_error(error)
            if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
                _abandon_stdout()
            raise typer.Exit(2 if isinstance(error, ConfigError | RequestError) else 1) from None
        return result


app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quickdraft {__version__}")
        raise typer.Exit


@app.callback()
def quickdraft(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
) -> None:
    """Serve one large language model fast, without changing a token of its answer."""


def _print_error(error: Exception) -> None:
    from rich.console import Console
    from rich.text import Text

    from quickdraft.cli.flags import printable

    message = str(error)
    if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
        message = f"cannot read or write{f' {error.filename}' if error.filename else ''}: {error.strerror}"
    elif not isinstance(error, QuickdraftError):
        message = (
            f"internal error: {type(error).__name__}: {message}. hint: `quickdraft --debug ...` shows where"
        )
    line = printable(" ".join(message.split()))
    Console(stderr=True).print(Text(f"error: {line}", style="red"), soft_wrap=True)


def _open_closed_streams() -> None:
    """Where the shell closed stdout or stderr (`>&-`), what is written goes nowhere; and no file that is
    opened later, such as a model, gets the number of a stream."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def _accept_all_text() -> None:
    """What the user's encoding has not is written as an escape; bytes that are not text in it are read as
    lone surrogates, which a request refuses."""
    for stream, errors in (
        (sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace"),
    ):  # fmt: skip
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _abandon_stdout() -> None:
    """Let the interpreter's last flush go nowhere instead of failing again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
