"""`quickdraft train`: drafters for a model, from texts that it writes itself. Needs the extra `train`."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quickdraft.cli import flags
from quickdraft.cli.flags import report
from quickdraft.config import check_range
from quickdraft.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from quickdraft.train.run import Settings

app = typer.Typer(add_completion=False)
MOST = 1 << 30
SMOKE_ROWS, SMOKE_MINUTES = 160, 3.0

Out = Annotated[Path, typer.Option(metavar="DIR", help="Where to.")]
Rows = Annotated[int | None, typer.Option(metavar="N", help="Make chat rows until there are N.")]
Data = Annotated[Path | None, typer.Option(metavar="DATA", help="Rows and features; default: data in --out.")]
Steps = Annotated[int | None, typer.Option(metavar="N", help="Default: 6000.")]
Minutes = Annotated[
    float | None, typer.Option(metavar="M", help="Instead of --steps: as many as they take here.")
]
Texts = Annotated[int | None, typer.Option(metavar="N", help="Rows of a step; default: 4.")]
Rate = Annotated[
    float | None, typer.Option(metavar="X", help="Learning rate; default: 0.001 for mtp, 0.0006 for dflash2.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="Of the first weights and the order of rows.")]
Vocab = Annotated[
    Path | None, typer.Option("--draft-vocab", metavar="FILE", help="The ids it chooses among.")
]
VocabSize = Annotated[
    int | None,
    typer.Option("--vocab-size", metavar="N", help="The N ids of most answers instead; default: 8192."),
]
Init = Annotated[Path | None, typer.Option(metavar="CHECKPOINT", help="Start from its weights.")]
Smoke = Annotated[
    bool, typer.Option("--smoke", help=f"Ten minutes in all: {SMOKE_ROWS} rows, {SMOKE_MINUTES:g} minutes.")
]
Overfit = Annotated[
    bool, typer.Option("--overfit", help="Only learn 8 rows by heart; exit code 1 where that fails.")
]
Bits = Annotated[int, typer.Option(metavar="8|4|16", help="Of the linears of the exported folder.")]


@app.callback()
def train() -> None:
    """Make data, train drafters, export and evaluate them."""
    for package in ("torch", "safetensors"):
        if find_spec(package) is None:
            raise UnsupportedError(
                f"training needs the package {package}, which is not installed",
                hint="pip install 'quickdraft[train]'",
            )


@app.command()
def data(
    target: flags.Model,
    out: Out,
    rows: Annotated[
        int | None, typer.Option(metavar="N", help="Rows of chat; with --prompts, at most (default: all).")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Answer these instead of made-up turns: one per line, or a .jsonl file of rows with prompt "
            "or messages.",
        ),
    ] = None,
    tasks: Annotated[
        int, typer.Option(metavar="M", help="Then M tasks over the answers: copy, extract and edit in turn.")
    ] = 0,
    seed: Annotated[int, typer.Option(metavar="S", help="Another seed gives other rows.")] = 0,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Of an answer, at most.")] = 256,
    threads: flags.Threads = None,
) -> None:
    """Let TARGET write training rows, and print their folder; again, to go on where it stopped."""
    if rows is None and prompts is None:
        raise ConfigError("nothing says how many rows", hint="give --rows N or --prompts FILE")
    rows = MOST if rows is None else rows
    for name, value, least in (("rows", rows, 1), ("tasks", tasks, 0), ("seed", seed, 0)):
        check_range(name, value, least, MOST)
    check_range("max_tokens", max_tokens, 1, 512)
    flags.fetched(target)
    from quickdraft.train.data import DataPlan, make_data, open_writer
    from quickdraft.train.open_target import open_for_training

    _, sha256 = open_for_training(target)
    llm = open_writer(target, threads)
    try:
        made = make_data(llm, sha256, out, DataPlan(rows, tasks, prompts, seed, max_tokens), report)
    finally:
        llm.close()
    report(f"{made} rows")
    print(out)


@app.command()
def mtp(
    target: flags.Model, out: Out, data: Data = None, rows: Rows = None, steps: Steps = None,
    minutes: Minutes = None, texts: Texts = None, rate: Rate = None, seed: Seed = 1,
    chain: Annotated[int, typer.Option(metavar="N", help="Chained drafts that are trained.")] = 3,
    draft_vocab: Vocab = None, vocab_size: VocabSize = None, init: Init = None,
    threads: flags.Threads = None, bits: Bits = 8, smoke: Smoke = False, overfit: Overfit = False,
) -> None:  # fmt: skip
    """Train an MTP module for TARGET, export it, and print its folder; again, to go on where it stopped."""
    check_range("chain", chain, 1, 8)
    from quickdraft.train.run import Settings

    settings = Settings(
        "mtp", target, out, data, rows, steps, minutes, texts, rate, seed, chain=chain,
        draft_vocab=draft_vocab, vocab_size=vocab_size, init=init, threads=threads, bits=bits,
    )  # fmt: skip
    _run(settings, smoke, overfit)


@app.command()
def dflash2(
    target: flags.Model, out: Out, data: Data = None, rows: Rows = None, steps: Steps = None,
    minutes: Minutes = None, texts: Texts = None, rate: Rate = None, seed: Seed = 1,
    layers: Annotated[int | None, typer.Option(metavar="N", help="Default: 2.")] = None,
    block: Annotated[
        int | None, typer.Option(metavar="N", help="Rows of a block: N - 1 drafts; default: 8.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(metavar="N", help="Positions a row sees; default: 512.")
    ] = None,
    mask_id: Annotated[
        int | None, typer.Option(metavar="ID", help="Stands for a mask; default: a control token.")
    ] = None,
    anchors: Annotated[int, typer.Option(metavar="N", help="Blocks of each row in a step.")] = 32,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Rows of a step's blocks are drawn from these; default: --block."),
    ] = None,
    draft_vocab: Vocab = None, vocab_size: VocabSize = None, init: Init = None,
    threads: flags.Threads = None, bits: Bits = 8, smoke: Smoke = False, overfit: Overfit = False,
) -> None:  # fmt: skip
    """Train a DFlash2 drafter for TARGET, export it, and print its folder; again, to go on."""
    for name, value, most in (("layers", layers, 32), ("anchors", anchors, 4096)):
        check_range(name, value if value is not None else 1, 1, most)
    check_range("block", block if block is not None else 8, 2, 64)
    check_range("window", window if window is not None else 512, block or 8, MOST)
    drawn = tuple(flags.numbers("--lengths", lengths) or ())
    for length in drawn:
        check_range("lengths", length, 2, block or 8)
    check_range("mask_id", mask_id or 0, 0, MOST)
    from quickdraft.train.run import Settings

    settings = Settings(
        "dflash2", target, out, data, rows, steps, minutes, texts, rate, seed, layers, block, window,
        mask_id, anchors, drawn, draft_vocab=draft_vocab, vocab_size=vocab_size, init=init, threads=threads,
        bits=bits,
    )  # fmt: skip
    _run(settings, smoke, overfit)


def _run(settings: Settings, smoke: bool, overfit: bool) -> None:
    if smoke:
        if settings.rows is not None or settings.steps is not None or settings.minutes is not None:
            raise ConfigError("--smoke beside --rows, --steps or --minutes", expected="one of them")
        settings = replace(settings, rows=SMOKE_ROWS, minutes=SMOKE_MINUTES)
    if settings.steps is not None and settings.minutes is not None:
        raise ConfigError("both --steps and --minutes", expected="one of them")
    if settings.draft_vocab is not None and settings.vocab_size is not None:
        raise ConfigError("both --draft-vocab and --vocab-size", expected="one of them")
    for name in ("rows", "steps", "texts", "vocab_size"):
        value = getattr(settings, name)
        check_range(name, 1 if value is None else value, 1, MOST)
    check_range("seed", settings.seed, 0, MOST)
    for name in ("minutes", "rate"):
        value = getattr(settings, name)
        if value is not None and not 0 < value < 1e6:
            raise ConfigError(f"bad value for --{name}", got=value, expected="a positive number")
    _check_bits(settings.bits)
    flags.fetched(settings.target)
    from quickdraft.train.display import Display
    from quickdraft.train.overfit import overfit as learn_by_heart
    from quickdraft.train.run import train_drafter

    if overfit:
        learn_by_heart(settings, Display())
    else:
        print(train_drafter(settings, Display()))


def _check_bits(bits: int) -> None:
    if bits not in (4, 8, 16):
        raise ConfigError("bad value for --bits", got=bits, expected="8, 4 or 16")


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="checkpoint.safetensors.")],
    out: Out,
    bits: Bits = 8,
    target: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The target; default: as recipe.json beside the checkpoint says."),
    ] = None,
    draft_vocab: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Default: draft_vocab.json beside the checkpoint."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DATA", help="Note how many rows and tokens this folder has.")
    ] = None,
    block: Annotated[int | None, typer.Option(metavar="N", help="DFlash2 without a recipe: rows.")] = None,
    window: Annotated[int | None, typer.Option(metavar="N", help="The same: positions it sees.")] = None,
    mask_id: Annotated[int | None, typer.Option(metavar="ID", help="The same: the token of masks.")] = None,
) -> None:
    """Write a drafter folder from a checkpoint, and print it."""
    _check_bits(bits)
    from quickdraft.train.exporting import export_checkpoint

    own = {"block": block, "window": window, "mask_id": mask_id}
    if target is not None:
        flags.fetched(target)
    size = export_checkpoint(
        checkpoint, out, bits, target=target, vocab=draft_vocab, data=data,
        own={name: value for name, value in own.items() if value is not None},
    )  # fmt: skip
    report(f"{size / 1e6:.2f} MB")
    print(out)


@app.command("eval")
def evaluate(
    drafter: Annotated[Path, typer.Argument(metavar="DRAFTER", help="The folder of a drafter.")],
    target: flags.Model,
    data: Annotated[Path, typer.Option(metavar="DATA", help="Rows; those held out are taken.")],
    rows: Annotated[int, typer.Option(metavar="N", help="Of these, at most.")] = 32,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Of an answer, at most.")] = 256,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the numbers there too, as JSON.")
    ] = None,
    threads: flags.Threads = None,
) -> None:
    """Measure what a drafter is worth on held-out rows; exit code 1 where a token changes."""
    check_range("rows", rows, 1, MOST)
    check_range("max_tokens", max_tokens, 1, MOST)
    flags.fetched(target)
    from quickdraft.train.display import Display
    from quickdraft.train.evaluate import evaluate as measure
    from quickdraft.train.evaluate import table_of

    result = measure(drafter, target, data, rows, max_tokens, threads, Display())
    if output is not None:
        try:
            output.write_text(json.dumps(result) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {output}: {error.strerror}") from error
    for line in table_of(result):
        print(line)
