"""Flags that several commands share, and what they build.

Each flag is written once, so that it reads and means the same everywhere.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quickdraft.config import ALIASES, DEFAULT_CACHE_BYTES, check_head_bits, parse_bytes, parse_kv_dtype
from quickdraft.errors import ConfigError
from quickdraft.types import Backend

if TYPE_CHECKING:
    from quickdraft.engine.llm import LLM

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help=f"An alias ({', '.join(ALIASES)}) or the path of a GGUF file or model folder."
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads that compute; default: the cores of this process.")
]
BackendFlag = Annotated[
    Backend,
    typer.Option(
        "--backend", help="What computes; auto: a card where one and the extra are there, else the CPU."
    ),
]
KVDtype = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype",
        metavar="TYPE",
        help="Type of cached keys and values: float32 (fp32), float16 (fp16), bfloat16 (bf16) or int8; "
        "default: float32 for float32 models, else float16.",
    ),
]
KVMemory = Annotated[
    str | None,
    typer.Option(
        "--kv-memory",
        metavar="SIZE",
        help="Memory for cached keys and values, such as 512MiB or 2G; "
        "default: 1 GiB or a quarter of free memory, the smaller; on a card what is left of it.",
    ),
]
CheckpointMemory = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-memory",
        metavar="SIZE",
        help="Memory for recurrent states that the prefix cache keeps, for models with recurrent layers; "
        "default: 1 GiB or an eighth of free memory, the smaller; with a card 8 GiB or a quarter.",
    ),
]
CheckpointInterval = Annotated[
    int,
    typer.Option(
        "--checkpoint-interval",
        metavar="N",
        help="Keep a recurrent state every N tokens, a multiple of 16, beside those at the ends of texts; "
        "0 keeps only those.",
    ),
]
HeadBits = Annotated[
    int | None,
    typer.Option(
        "--head-bits",
        metavar="8|16",
        help="Embedding and head of a model folder: 8 holds them as int8 groups, 16 as the file has them; "
        "default: 8 where they are of 16 bits and the rest is quantised.",
    ),
]
SpeculationFlag = Annotated[
    str,
    typer.Option(
        "--speculation",
        metavar="SOURCES",
        help="Where drafts come from: off, auto, or sources joined by '+' with an optional row cap, "
        "such as lookup@16. Never changes the answer.",
    ),
]
DrafterFolders = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        metavar="DIR",
        help="A folder with a model that drafts for this one; repeatable, one of each source. Default: those "
        "that come with quickdraft for exactly this model file; none turns these off.",
    ),
]
DraftVocabFile = Annotated[
    Path | None,
    typer.Option(
        "--draft-vocab",
        metavar="FILE",
        help="The ids an MTP module chooses among, from prepare draft-vocab; default: the file in the "
        "module's folder, else all. Limits drafts, never answers.",
    ),
]
LookupCorpus = Annotated[
    Path | None,
    typer.Option(
        "--lookup-corpus",
        metavar="FILE",
        help="Draft from texts too: a file from prepare lookup-corpus, made with this model's tokenizer.",
    ),
]
FrozenCosts = Annotated[
    bool,
    typer.Option(
        "--frozen-costs",
        help="Do not correct the measured cost of steps by the times of steps: draft lengths then repeat "
        "from run to run. Never changes the answer.",
    ),
]
ExplainDrafts = Annotated[
    Path | None,
    typer.Option(
        "--explain-drafts",
        metavar="FILE",
        help="Write a JSON line per step there: which drafts could be verified, what they promise, the "
        "choice, what came of it.",
    ),
]
MaxTokens = Annotated[int, typer.Option(help="Stop after this many tokens.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token; higher is more random.")]
TopP = Annotated[
    float, typer.Option(help="Keep the likeliest tokens that sum to this probability; 1 is off.")
]
TopK = Annotated[int, typer.Option(help="Keep this many likeliest tokens; 0 is off.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the best one; 0 is off.")]
PresencePenalty = Annotated[float, typer.Option(help="Subtracted from tokens that occur in the output.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Subtracted once per occurrence in the output.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Divides tokens of prompt and output; 1 is off.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampling noise; default: a fresh one, reported.")]


def _folder(text: str) -> Path:
    """ConfigError for "", which would be the working directory: most likely a variable that is not set."""
    if not text:
        raise ConfigError("bad value for --cache-dir", got="''", expected="a folder")
    return Path(text)


CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        metavar="FOLDER",
        parser=_folder,
        help="Keep the prefix cache there too, so that it survives restarts.",
    ),
]
CacheSize = Annotated[
    str | None,
    typer.Option("--cache-size", metavar="SIZE", help="Most bytes in --cache-dir; default: 10GiB."),
]


def drafter_folders(given: list[str] | None) -> tuple[Path, ...] | None:
    """What --drafter named; None: nothing, so that those shipped are used."""
    if not given:
        return None
    if given == ["none"]:
        return ()
    if "none" in given or "" in given:
        raise ConfigError("bad value for --drafter", got=repr(given)[:200], expected="folders, or none alone")
    return tuple(Path(folder) for folder in given)


def cache_bytes(folder: Path | None, size: str | None) -> int:
    """The byte budget of the cache folder; ConfigError for a size without a folder."""
    if size is None:
        return DEFAULT_CACHE_BYTES
    if folder is None:
        raise ConfigError("--cache-size without a folder", got=size, hint="give --cache-dir too")
    return parse_bytes(size, name="cache_size")


def checkpoint_bytes(size: str | None) -> int | None:
    """The memory for checkpoints, if it was given."""
    return parse_bytes(size, name="checkpoint_memory") if size is not None else None


def report(line: str) -> None:
    """Progress for people, on stderr: stdout is for results."""
    print(line, file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """`text` with control characters made visible, so that a model or its file cannot drive the terminal."""
    return "".join(
        c if c in "\n\t" or (ord(c) >= 32 and not 127 <= ord(c) < 160) else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )


def fetched(model: str) -> None:
    """Fetch the model of an alias that is not here yet; ConfigError for a name that is no model."""
    from quickdraft.prepare.models import resolve_model

    resolve_model(model, report)


def open_llm(
    model: str,
    *,
    threads: int | None,
    kv_dtype: str | None,
    kv_memory: str | None,
    checkpoint_memory: str | None,
    checkpoint_interval: int,
    cache_dir: Path | None,
    cache_size: str | None,
    head_bits: int | None = None,
    drafter: list[str] | None = None,
    draft_vocab: Path | None = None,
    lookup_corpus: Path | None = None,
    frozen_costs: bool = False,
    explain_drafts: Path | None = None,
    backend: Backend = Backend.AUTO,
) -> LLM:
    """The model, fetched if need be and loaded into this process."""
    dtype = parse_kv_dtype(kv_dtype) if kv_dtype is not None else None
    pool_bytes = parse_bytes(kv_memory, name="kv_memory") if kv_memory is not None else None
    most_bytes = cache_bytes(cache_dir, cache_size)
    check_head_bits(head_bits)
    drafters = drafter_folders(drafter)
    fetched(model)
    from quickdraft.engine.llm import LLM

    llm = LLM(
        model,
        threads=threads,
        kv_dtype=dtype,
        kv_memory_bytes=pool_bytes,
        cache_dir=cache_dir,
        cache_bytes=most_bytes,
        checkpoint_memory_bytes=checkpoint_bytes(checkpoint_memory),
        checkpoint_interval=checkpoint_interval,
        head_bits=head_bits,
        drafters=drafters,
        draft_vocab=draft_vocab,
        measure_costs=True,
        lookup_corpus=lookup_corpus,
        frozen_costs=frozen_costs,
        explain_drafts=explain_drafts,
        backend=backend,
    )
    for note in llm.notes:
        report(note)
    return llm


def numbers(flag: str, text: str | None) -> list[int] | None:
    """Numbers divided by commas; ConfigError that names the flag."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise ConfigError(f"bad value for {flag}", got=repr(text[:80]), expected="numbers such as 1,8,16")
    return [int(part) for part in parts]
