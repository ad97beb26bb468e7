"""`quickdraft bench`: measurements in this process, no server needed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from quickdraft.cli.flags import (
    BackendFlag,
    DrafterFolders,
    DraftVocabFile,
    ExplainDrafts,
    FrozenCosts,
    HeadBits,
    Model,
    Threads,
    drafter_folders,
    fetched,
    numbers,
)
from quickdraft.config import DEFAULT_MODEL, check_head_bits
from quickdraft.types import Backend

app = typer.Typer(add_completion=False)


@app.callback()
def bench() -> None:
    """Measure speed; no speed is printed unless the text is right."""


OptionalModel = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="An alias or a path: also print this model's roofs.")
]
Json = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the result here.")]


def _rows(default: str) -> Any:
    return typer.Option("--rows", metavar="A,B", help=f"Rows of a step; default: {default}.")


def _contexts(default: str) -> Any:
    return typer.Option("--contexts", metavar="A,B", help=f"Tokens before the step; default: {default}.")


RowCounts = Annotated[str | None, _rows("1,2,4,8,16,32,64")]
Contexts = Annotated[str | None, _contexts("those of 0,2048,6000 that fit")]


@app.command()
def stages(
    model: Model = DEFAULT_MODEL,
    workloads: Annotated[
        str | None, typer.Option(metavar="A,B", help="Workloads, separated by commas; default: all.")
    ] = None,
    stages: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Speculation settings to compare with off; default: of off,lookup@16,mtp,dflash2,"
            "dflash2+lookup@8,dflash2+lookup@16 those that the model has the sources of.",
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens per prompt.")] = None,
    json: Json = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the result here, .svg or .png; needs `pip install 'quickdraft\\[plot]'`.",
        ),
    ] = None,
    threads: Threads = None,
    backend: BackendFlag = Backend.AUTO,
    head_bits: HeadBits = None,
    drafter: DrafterFolders = None,
    draft_vocab: DraftVocabFile = None,
    frozen_costs: FrozenCosts = False,
    explain_drafts: ExplainDrafts = None,
) -> None:
    """Each workload under each stage, paired with plain decoding."""
    check_head_bits(head_bits)
    drafters = drafter_folders(drafter)
    fetched(model)
    from quickdraft.bench.stages import run

    run(
        model,
        workloads=_names(workloads), stages=_names(stages),
        max_tokens=max_tokens, json_path=json, threads=threads, head_bits=head_bits,
        drafters=drafters, draft_vocab=draft_vocab,
        frozen_costs=frozen_costs, explain_drafts=explain_drafts,
        plot_path=plot, backend=backend,
    )  # fmt: skip


@app.command()
def prefix(
    model: Model = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the document, read before.")] = 6000,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the question after it.")] = 32,
    json: Json = None,
    threads: Threads = None,
    backend: BackendFlag = Backend.AUTO,
    head_bits: HeadBits = None,
) -> None:
    """Time to the first token: nothing cached, the document cached, and after a restart."""
    check_head_bits(head_bits)
    fetched(model)
    from quickdraft.bench.prefix import run

    if run(model, tokens, new_tokens, json, threads, head_bits, backend).failed is not None:
        raise typer.Exit(1)


@app.command()
def decisions(json: Json = None) -> None:
    """What deciding a step's drafts takes, for one request and for four."""
    from quickdraft.bench.decision_time import run

    run(json)


@app.command()
def machine(
    model: OptionalModel = None,
    json: Json = None,
    threads: Threads = None,
) -> None:
    """What this machine can do at most: bandwidth, arithmetic, and the roofs of a model."""
    if model is not None:
        fetched(model)
    from quickdraft.bench.limits import run

    run(model, json, threads)


@app.command()
def ops(
    model: Model = DEFAULT_MODEL,
    rows: RowCounts = None,
    contexts: Contexts = None,
    json: Json = None,
    threads: Threads = None,
    head_bits: HeadBits = None,
) -> None:
    """Each op of a step beside its roof, and their sum beside the whole step."""
    counts, lengths = numbers("--rows", rows), numbers("--contexts", contexts)
    check_head_bits(head_bits)
    fetched(model)
    from quickdraft.bench.op_times import run

    run(model, json, counts, lengths, threads, head_bits)


@app.command("verify-cost")
def verify_cost(
    model: Model = DEFAULT_MODEL,
    rows: RowCounts = None,
    contexts: Contexts = None,
    json: Json = None,
    threads: Threads = None,
    backend: BackendFlag = Backend.AUTO,
    head_bits: HeadBits = None,
) -> None:
    """What a whole step costs, by rows and context: the curve that decides how long drafts pay."""
    counts, lengths = numbers("--rows", rows), numbers("--contexts", contexts)
    check_head_bits(head_bits)
    fetched(model)
    from quickdraft.bench.verify_cost import run

    run(model, json, counts, lengths, threads, head_bits, backend)


@app.command("kv-types")
def kv_types(
    model: Model = DEFAULT_MODEL,
    rows: Annotated[str | None, _rows("1,4,16")] = None,
    contexts: Annotated[str | None, _contexts("2048,6000")] = None,
    json: Json = None,
    threads: Threads = None,
) -> None:
    """What the type of cached keys and values does to the logits and to attention's time."""
    counts, lengths = numbers("--rows", rows), numbers("--contexts", contexts)
    fetched(model)
    from quickdraft.bench.kv_types import run

    run(model, json, counts, lengths, threads)


@app.command()
def card(json: Json = None) -> None:
    """What an NVIDIA card does with these kernels and a random model shaped like Qwen3.8-27B; 8 minutes."""
    from quickdraft.bench.card import run
    from quickdraft.doctor.card import promises

    if not run(json, promises=promises).ok:
        raise typer.Exit(1)


@app.command()
def constraints(model: Model = DEFAULT_MODEL, json: Json = None) -> None:
    """What holding an answer to a schema, a regex or a grammar costs per row."""
    fetched(model)
    from quickdraft.bench.constraints import run

    run(model, json)


@app.command()
def policy(
    model: Model = DEFAULT_MODEL,
    curve: Annotated[
        str,
        typer.Option(
            metavar="CURVE",
            help="What steps cost: measured, cpu, rtx3090, rtx3090-roofline, rtx3090-projected or a file.",
        ),
    ] = "measured",
    traces: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Traces to replay; default: those shipped.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Record traces of MODEL here first, and replay them."),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Contexts to compare blocks of 16 and of 64 rows at; default: 2000,25000,112000 for rtx3090 "
            "and its roofline, else none.",
        ),
    ] = None,
    json: Json = None,
    fit_priors: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the table of odds that these traces give, to ship it."),
    ] = None,
    leave_one_out: Annotated[
        bool,
        typer.Option(
            "--leave-one-out", help="Also run each workload by odds that were fitted to the others alone."
        ),
    ] = False,
    threads: Threads = None,
    head_bits: HeadBits = None,
    drafter: DrafterFolders = None,
    draft_vocab: DraftVocabFile = None,
) -> None:
    """The drafting policy replayed on recorded traces: against hindsight, on any machine's costs."""
    lengths = numbers("--contexts", contexts)
    check_head_bits(head_bits)
    drafters = drafter_folders(drafter)
    if record is not None or curve == "measured":
        fetched(model)
    from quickdraft.bench.policy import ModelOptions, run

    options = ModelOptions(model, threads, head_bits, drafters, draft_vocab)
    run(options, curve, traces, record, lengths, json, fit_priors, leave_one_out=leave_one_out)


@app.command()
def auto(
    model: Model = DEFAULT_MODEL,
    seconds: Annotated[
        float, typer.Option(min=0, help="Rounds over the workloads are begun for so long; at least one is.")
    ] = 180.0,
    json: Json = None,
    threads: Threads = None,
    drafter: DrafterFolders = None,
) -> None:
    """Whether `auto` is ever slower than plain decoding, on every workload; exit code 1 where it is."""
    drafters = drafter_folders(drafter)
    fetched(model)
    from quickdraft.bench.policy_live import FAILS, run

    if any(row.verdict == FAILS for row in run(model, seconds, threads, drafters, json)):
        raise typer.Exit(1)


@app.command()
def peers(
    llama_server: Annotated[
        Path, typer.Option("--llama-server", metavar="PATH", help="The llama-server binary to compare with.")
    ],
    model: Model = DEFAULT_MODEL,
    rounds: Annotated[int, typer.Option(min=1, help="Times each question is asked of both.")] = 3,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Among prefill, copy, decode, second; default: all of them."),
    ] = None,
    json: Json = None,
    threads: Threads = None,
) -> None:
    """quickdraft beside llama-server: decoding, prefill, copying, a second question."""
    fetched(model)
    from quickdraft.bench.peers import run

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the servers it starts end with it
    result = run(llama_server, model, json, threads, rounds, _names(tasks))
    if any(row.failed is not None for row in result.rows):
        raise typer.Exit(1)


def _names(text: str | None) -> list[str] | None:
    return [name.strip() for name in text.split(",") if name.strip()] if text is not None else None
