"""`quickdraft prepare`: offline work on model files."""

from __future__ import annotations

import contextlib
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from quickdraft.cli import flags
from quickdraft.cli.flags import report
from quickdraft.config import DEFAULT_CHECKPOINT_INTERVAL, check_range
from quickdraft.errors import ConfigError

app = typer.Typer(add_completion=False)
LONGEST_CONTEXT = 1 << 24
MOST_LAYERS = 256


class Like(StrEnum):
    """The models whose shapes can be written."""

    QWEN = "qwen3.8-27b"
    TINY_HYBRID = "tiny-hybrid"
    TINY_LLAMA = "tiny-llama"


class FormatName(StrEnum):
    """How the matrices of the body are stored."""

    BF16 = "bf16"
    AUTOROUND = "autoround"
    COMPRESSED_TENSORS = "compressed-tensors"


@app.callback()
def prepare() -> None:
    """Make model files, offline."""


@app.command()
def random(
    like: Annotated[Like, typer.Option(help="The model whose shapes, names and config.json to write.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to; must be absent or empty.")],
    form: Annotated[
        FormatName,
        typer.Option("--format", help="How the matrices of the layers are stored; groups are of 128."),
    ] = FormatName.BF16,
    context: Annotated[
        int | None, typer.Option(metavar="N", help="max_position_embeddings; default: the model's own.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option(metavar="N", help="Layers; default: as many as the model has.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Another seed gives other numbers.")] = 0,
) -> None:
    """Write a checkpoint with random numbers in the layout of a real one, and print its folder."""
    from quickdraft.models.known import KNOWN
    from quickdraft.prepare.random_model import write_random

    sizes = KNOWN[like.value]
    if not str(out).strip(". "):
        raise ConfigError("bad value for --out", got=repr(str(out)), expected="a new folder")
    check_range("seed", seed, 0, 2**63 - 1)
    if context is not None:
        check_range("context", context, 1, LONGEST_CONTEXT)
    if layers is not None:
        check_range("layers", layers, sizes.fewest_layers, MOST_LAYERS)
    write_random(sizes.changed(layers=layers, context=context), form.value, out, seed=seed, report=report)
    print(out)


@app.command("draft-vocab")
def draft_vocab(
    model: flags.Model,
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="One prompt per line (a user's turn for chat models), or a .jsonl file of rows with prompt "
            "(text or ids) or messages; rows with an answer (ids) are counted as they are.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the vocabulary.")],
    size: Annotated[int | None, typer.Option(metavar="N", help="Keep the N ids that occur most.")] = None,
    coverage: Annotated[
        float | None,
        typer.Option(
            metavar="X", help="Keep the fewest ids that make this share of the tokens; default: 0.98."
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Of an answer, at most.")] = 256,
    threads: flags.Threads = None,
    head_bits: flags.HeadBits = None,
) -> None:
    """Count the tokens a model writes, for a drafter's head that is limited to them, and print the file."""
    if size is not None and coverage is not None:
        raise ConfigError("both --size and --coverage", expected="one of them")
    if coverage is not None and not 0 < coverage <= 1:
        raise ConfigError("bad value for --coverage", got=coverage, expected="above 0, at most 1")
    check_range("max_tokens", max_tokens, 1, LONGEST_CONTEXT)
    from quickdraft.prepare.draft_vocab import choose_vocab, count_answers, read_rows

    rows = read_rows(prompts)
    with contextlib.closing(
        flags.open_llm(
            model, threads=threads, kv_dtype=None, kv_memory=None, checkpoint_memory=None,
            checkpoint_interval=DEFAULT_CHECKPOINT_INTERVAL, cache_dir=None, cache_size=None,
            head_bits=head_bits,
        )
    ) as llm:  # fmt: skip
        counts = count_answers(llm, rows, max_tokens, report)
        vocab = choose_vocab(counts, llm.opened.eos_ids, size, coverage)
    try:
        vocab.save(out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error
    report(f"{len(vocab)} ids, {vocab.coverage:.2%} of {vocab.counted_tokens} tokens")
    print(out)


@app.command("lookup-corpus")
def lookup_corpus(
    model: flags.Model,
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="UTF-8 texts to draft from.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the corpus.")],
) -> None:
    """Tokenize texts into a file that --lookup-corpus drafts from, and print the file."""
    flags.fetched(model)
    from quickdraft.config import cached_model
    from quickdraft.prepare.lookup_corpus import make_corpus

    count = make_corpus(cached_model(model)[1], files, out, report)
    report(f"{count} tokens")
    print(out)
