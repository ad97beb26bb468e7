"""`quickdraft inspect`: what a model holds, what it needs, and whether it can be run; headers only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from quickdraft.cli import flags
from quickdraft.config import ALIASES, DEFAULT_MODEL, cached_model, parse_bytes
from quickdraft.errors import ConfigError, QuickdraftError

if TYPE_CHECKING:
    from quickdraft.models.inspect import Inspection

app = typer.Typer(add_completion=False)
BUILT_IN: Final = "qwen3.8-27b"  # described without a file
InspectedModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help=f"An alias ({', '.join(ALIASES)}), the path of a GGUF file or model folder, or {BUILT_IN}: "
        "what serving that model would take, without a file.",
    ),
]


class OutputForm(StrEnum):
    """How the result is written to stdout."""

    TEXT = "text"
    JSON = "json"


@app.command()
def inspect(
    model: InspectedModel = DEFAULT_MODEL,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Tell the longest context whose KV cache fits this much beside the weights; "
            f"for {BUILT_IN} the default is 24GiB.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"{BUILT_IN} only: also tell memory and step time at N tokens."),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option("--kv-dtype", metavar="TYPE", help=f"{BUILT_IN} only: bf16 (default) or int8."),
    ] = None,
    card: Annotated[
        int | None,
        typer.Option(
            metavar="GIB",
            min=1,
            max=1024,
            help=f"{BUILT_IN} only: also tell what takes the memory of a card, and the context that fits.",
        ),
    ] = None,
    drafter: flags.DrafterFolders = None,
    output: Annotated[OutputForm, typer.Option(help="text for people; json prints one object.")] = (
        OutputForm.TEXT
    ),
) -> None:
    """Show what a model file or folder holds, and whether quickdraft can run it. Loads no weights."""
    memory_bytes = parse_bytes(memory, name="memory") if memory is not None else None
    given = flags.drafter_folders(drafter)
    if model == BUILT_IN:
        if drafter:
            raise ConfigError("--drafter for a built-in description", got=repr(drafter)[:200])
        from quickdraft.cli.inspect_built_in import describe_built_in, lines_built_in, options_of

        options = options_of(memory_bytes, context, kv_dtype, card)
        if output is OutputForm.JSON:
            print(json.dumps(describe_built_in(options)))
        else:
            print("\n".join(lines_built_in(options)))
        return
    if context is not None or kv_dtype is not None or card is not None:
        raise ConfigError(
            "--context, --kv-dtype and --card are for a built-in description", got=repr(model[:200]),
            expected=BUILT_IN, hint="for a file or folder all KV types are shown",
        )  # fmt: skip
    name, path = cached_model(model)
    from quickdraft.models.inspect import inspect_model

    found = inspect_model(path)
    described = describe(name, found, memory_bytes)
    if given or described["runs"]:
        described["drafters"] = list(describe_drafters(path, given))
    if output is OutputForm.JSON:
        print(json.dumps(described))
    else:
        print(flags.printable("\n".join(lines(described))))


def describe(name: str, found: Inspection, memory_bytes: int | None) -> dict[str, Any]:
    """The JSON shape of `inspect --output json`."""
    from quickdraft.models.inspect import KV_DTYPES

    problems = [*found.problems, *_text_problems(found)]
    kv = {dtype: found.kv_bytes_per_token(dtype) for dtype in KV_DTYPES}
    fits = None
    if memory_bytes is not None and found.config is not None:
        fits = {dtype: found.longest_context(memory_bytes, dtype) for dtype in KV_DTYPES}
    return {
        "name": name,
        "path": str(found.path),
        "form": found.form,
        "architecture": found.architecture,
        "sizes": dict(found.sizes),
        "weights": {
            "bytes": found.weight_bytes,
            "tensors": found.tensors,
            "by_part": dict(found.bytes_by_part),
            "by_format": dict(found.bytes_by_format),
        },
        "kv_bytes_per_token": kv if found.config is not None else None,
        "default_kv_dtype": found.default_kv_dtype,
        "memory_bytes": memory_bytes,
        "longest_context": fits,
        "tokenizer": _tokenizer_kind(found),
        "chat_template": found.tokenizer is not None and found.tokenizer.chat_template is not None,
        "runs": not problems,
        "problems": problems,
        "drafters": None,
    }


def describe_drafters(path: Path, given: tuple[Path, ...] | None) -> Iterator[dict[str, Any]]:
    """Of each drafter that would be opened with this model, what it takes."""
    from quickdraft.engine.draft_sizes import drafter_sizes
    from quickdraft.engine.open_drafters import find_drafters
    from quickdraft.models.registry import open_target

    target = open_target(path)
    for one in drafter_sizes(find_drafters(given, target), target):
        window = one.window_tokens
        yield {
            "source": one.source,
            "path": one.path,
            "weight_bytes": one.weight_bytes,
            "draft_vocab": one.vocab_ids,
            "draft_vocab_bytes": one.head_bytes,
            "kv_bytes_per_token": dict(one.kv_bytes_per_token),
            "window_tokens": window,
            "window_bytes": {k: size * window for k, size in one.kv_bytes_per_token.items()}
            if window
            else None,
        }


def lines(described: Mapping[str, Any]) -> Iterator[str]:
    """The same for people."""
    weights, sizes = described["weights"], described["sizes"]
    facts = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in sizes.items())
    yield f"model: {described['name']} ({described['form']})"
    yield f"architecture: {described['architecture'] or 'not stated'}{': ' if facts else ''}{facts}"
    yield f"weights: {_megabytes(weights['bytes'])} in {weights['tensors']} tensors"
    yield f"  by part: {_listed(weights['by_part'])}"
    yield f"  by format: {_listed(weights['by_format'])}"
    kv, default = described["kv_bytes_per_token"], described["default_kv_dtype"]
    if kv is None:
        yield "KV cache: unknown, as the architecture is not understood"
    else:
        each = (f"{dtype} {size}{' (default)' * (dtype == default)}" for dtype, size in kv.items())
        yield f"KV cache, bytes per token: {', '.join(each)}"
    if described["longest_context"] is not None:
        fits = ", ".join(f"{dtype} {tokens}" for dtype, tokens in described["longest_context"].items())
        room = f"{described['memory_bytes'] / 2**20:,.0f} MiB"
        yield f"longest context in {room}, counting weights and KV cache only: {fits} tokens"
    for one in described["drafters"] or ():
        yield from _drafter_lines(one, default)
    yield f"tokenizer: {described['tokenizer'] or 'none that can be read'}"
    yield f"chat template: {'yes' if described['chat_template'] else 'no'}"
    yield f"quickdraft can run it: {'yes' if described['runs'] else 'no'}"
    for problem in described["problems"]:
        yield f"  - {' '.join(problem.split())}"


def _drafter_lines(one: Mapping[str, Any], dtype: str) -> Iterator[str]:
    vocab = one["draft_vocab"]
    chosen = "" if vocab is None else f", {vocab} ids to choose among {_megabytes(one['draft_vocab_bytes'])}"
    yield f"drafter {one['source']}: weights {_megabytes(one['weight_bytes'])}{chosen}; {one['path']}"
    said = f"  its keys and values, bytes per token: {dtype} {one['kv_bytes_per_token'][dtype]}"
    if one["window_tokens"] is not None:
        said += (
            f"; {_megabytes(one['window_bytes'][dtype])} for the {one['window_tokens']} tokens that it sees"
        )
    yield said


def _text_problems(found: Inspection) -> Iterator[str]:
    from quickdraft.text.chat_template import ChatTemplate
    from quickdraft.text.tokenizer import Tokenizer

    if found.tokenizer is None:
        return
    for build in (Tokenizer, ChatTemplate.of):
        try:
            build(found.tokenizer)
        except QuickdraftError as error:
            yield str(error)


def _tokenizer_kind(found: Inspection) -> str | None:
    data = found.tokenizer
    if data is None:
        return None
    kind = "byte-level BPE" if data.model == "gpt2" else data.model
    steps = "tokenizer.json" if data.pipeline is not None else f"pre-tokenizer {data.pre_tokenizer}"
    return f"{kind}, {len(data.tokens)} tokens, {steps}"


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_megabytes(size)}" for name, size in sizes.items()) or "none"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
