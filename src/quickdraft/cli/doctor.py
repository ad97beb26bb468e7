"""`quickdraft doctor`: does this model, on this machine, do what quickdraft promises?

Lines for people as the checks end, or one JSON object; the exit code is 1 when a check failed.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from quickdraft.cli import flags
from quickdraft.config import DEFAULT_MODEL, check_head_bits, parse_bytes, parse_kv_dtype
from quickdraft.types import Backend

if TYPE_CHECKING:
    from quickdraft.doctor.check import Check

app = typer.Typer(add_completion=False)


class OutputForm(StrEnum):
    """How the report is written to stdout."""

    TEXT = "text"
    JSON = "json"


@app.command()
def doctor(
    model: flags.Model = DEFAULT_MODEL,
    output: Annotated[OutputForm, typer.Option(help="Lines for people, or one JSON object.")] = (
        OutputForm.TEXT
    ),
    threads: flags.Threads = None,
    backend: flags.BackendFlag = Backend.AUTO,
    kv_dtype: flags.KVDtype = None,
    kv_memory: flags.KVMemory = None,
    head_bits: flags.HeadBits = None,
    drafter: flags.DrafterFolders = None,
    draft_vocab: flags.DraftVocabFile = None,
) -> None:
    """Check files, text, exactness, drafts and memory on this machine; nothing is downloaded."""
    dtype = parse_kv_dtype(kv_dtype) if kv_dtype is not None else None
    pool_bytes = parse_bytes(kv_memory, name="kv_memory") if kv_memory is not None else None
    check_head_bits(head_bits)
    drafters = flags.drafter_folders(drafter)
    from quickdraft.doctor.run import Settings, run

    settings = Settings(threads, dtype, pool_bytes, head_bits, drafters, draft_vocab, backend=backend)
    as_text = output is OutputForm.TEXT
    report = run(model, settings, _print_check if as_text else lambda check: None)
    print(report.summary() if as_text else json.dumps(report.to_dict()))
    if not report.ok:
        raise typer.Exit(1)


def _print_check(check: Check) -> None:
    for line in check.lines():
        print(flags.printable(" ".join(line.splitlines())), flush=True)
