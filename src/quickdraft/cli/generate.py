"""`quickdraft generate`: one prompt, one completion, in this process.

stdout carries the result and nothing else; everything about it goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quickdraft.cli import flags
from quickdraft.config import DEFAULT_CHECKPOINT_INTERVAL, DEFAULT_MODEL
from quickdraft.errors import ConfigError, EngineError
from quickdraft.types import Backend, SamplingParams, Speculation, Timings

if TYPE_CHECKING:
    from quickdraft.engine.llm import LLM, Prompt
    from quickdraft.text.answer_parts import AnswerParser

app = typer.Typer(add_completion=False)


class OutputForm(StrEnum):
    """How the completion is written to stdout."""

    TEXT = "text"
    JSON = "json"


@app.command()
def generate(
    model: flags.Model = DEFAULT_MODEL,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the prompt from a UTF-8 file; - is stdin.")
    ] = None,
    prompt_ids: Annotated[
        str | None,
        typer.Option(metavar="1,2,3", help="The prompt as token ids; needs no tokenizer, and none is used."),
    ] = None,
    prediction: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="UTF-8 text that the answer will largely repeat, to draft from."),
    ] = None,
    max_tokens: flags.MaxTokens = 256,
    min_tokens: Annotated[int, typer.Option(help="Do not stop before this many tokens.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end token.")] = False,
    speculation: flags.SpeculationFlag = "auto",
    kv_dtype: flags.KVDtype = None,
    head_bits: flags.HeadBits = None,
    drafter: flags.DrafterFolders = None,
    draft_vocab: flags.DraftVocabFile = None,
    lookup_corpus: flags.LookupCorpus = None,
    frozen_costs: flags.FrozenCosts = False,
    explain_drafts: flags.ExplainDrafts = None,
    kv_memory: flags.KVMemory = None,
    checkpoint_memory: flags.CheckpointMemory = None,
    checkpoint_interval: flags.CheckpointInterval = DEFAULT_CHECKPOINT_INTERVAL,
    cache_dir: flags.CacheDir = None,
    cache_size: flags.CacheSize = None,
    threads: flags.Threads = None,
    backend: flags.BackendFlag = Backend.AUTO,
    temperature: flags.Temperature = 0.0,
    top_p: flags.TopP = 1.0,
    top_k: flags.TopK = 0,
    min_p: flags.MinP = 0.0,
    presence_penalty: flags.PresencePenalty = 0.0,
    frequency_penalty: flags.FrequencyPenalty = 0.0,
    repetition_penalty: flags.RepetitionPenalty = 1.0,
    seed: flags.Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; repeatable.")] = None,
    stop_token_id: Annotated[list[int] | None, typer.Option(help="Stop at this id; repeatable.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Wrap the prompt in the model's chat template, or not.")
    ] = False,
    output: Annotated[OutputForm, typer.Option(help="text streams; json prints one object at the end.")] = (
        OutputForm.TEXT
    ),
) -> None:
    """Complete one prompt in this process."""
    given = read_prompt(prompt, prompt_file, prompt_ids)
    predicted = _read_file(prediction, "prediction") if prediction is not None else None
    if chat and not isinstance(given, str):
        raise ConfigError("--chat needs a text prompt", got="--prompt-ids")
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty, seed=seed, max_tokens=max_tokens, min_tokens=min_tokens,
        ignore_eos=ignore_eos, stop=tuple(stop or ()), stop_token_ids=tuple(stop_token_id or ()),
        speculation=Speculation.parse(speculation),
    )  # fmt: skip
    with contextlib.closing(
        flags.open_llm(
            model,
            threads=threads,
            backend=backend,
            kv_dtype=kv_dtype,
            head_bits=head_bits,
            drafter=drafter,
            draft_vocab=draft_vocab,
            lookup_corpus=lookup_corpus,
            frozen_costs=frozen_costs,
            explain_drafts=explain_drafts,
            kv_memory=kv_memory,
            checkpoint_memory=checkpoint_memory,
            checkpoint_interval=checkpoint_interval,
            cache_dir=cache_dir,
            cache_size=cache_size,
        )
    ) as llm:
        with_text = isinstance(given, str)
        ready: Prompt = given
        parser: AnswerParser | None = None
        if chat and isinstance(given, str):
            turn = llm.chat_prompt([{"role": "user", "content": given}])
            ready, parser = turn, llm.answer_form(turn).parser()
        if output is OutputForm.JSON:
            _print_json(llm, ready, params, predicted, with_text=with_text)
        else:
            written = _Written(parser) if with_text else None
            _print_text(llm, ready, params, predicted, written)


def read_prompt(text: str | None, file: Path | None, ids: str | None) -> str | list[int]:
    """The one prompt that was given; raises ConfigError for none, several, or an unreadable one."""
    given = [
        flag
        for flag, value in (("--prompt", text), ("--prompt-file", file), ("--prompt-ids", ids))
        if value is not None
    ]
    if len(given) != 1:
        raise ConfigError(
            "one prompt is needed",
            got=" and ".join(given) or "none",
            expected="exactly one of --prompt, --prompt-file, --prompt-ids",
        )
    if text is not None:
        return text
    return _read_file(file, "prompt") if file is not None else _parse_ids(ids or "")


def _read_file(file: Path, what: str) -> str:
    if str(file) == "-" and sys.stdin is None:
        raise ConfigError(f"cannot read the {what} from stdin: it is closed")
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the {what} file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the {what} file {file} is not UTF-8", got=str(error)) from error


def _parse_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= 10 for part in parts):
        raise ConfigError("bad value for --prompt-ids", got=repr(text[:80]), expected="ids such as 1,2,3")
    return [int(part) for part in parts]


def _print_json(
    llm: LLM, prompt: Prompt, params: SamplingParams, prediction: str | None, *, with_text: bool
) -> None:
    completion = llm.generate(prompt, params, prediction)
    raise_failure(completion.error)
    result = completion.to_dict()
    print(json.dumps(result if with_text else {**result, "text": None}))


def _print_text(
    llm: LLM, prompt: Prompt, params: SamplingParams, prediction: str | None, written: _Written | None
) -> None:
    """Stream the text, or the ids when the prompt was ids; then a summary on stderr."""
    separator = ""
    for part in llm.stream(prompt, params, prediction):
        if written is not None:
            written.add(part.text, last=part.finish_reason is not None)
        else:
            for token in part.tokens:
                sys.stdout.write(f"{separator}{token}")
                separator = ","
        sys.stdout.flush()
        raise_failure(part.error)
        if part.timings is not None:
            print()
            flags.report(f"[{summary(part.timings)}, {part.finish_reason}, seed {part.seed}]")


class _Written:
    """The text of an answer as it is written: content to stdout; reasoning there too, dimmed, where that
    is a terminal, else to stderr, so that a pipe gets what was said and nothing else."""

    def __init__(self, parser: AnswerParser | None) -> None:
        self._parser = parser
        self._thought = False

    def add(self, text: str, *, last: bool) -> None:
        from quickdraft.text.answer_parts import Content, Reasoning

        if self._parser is None:
            sys.stdout.write(text)
            return
        terminal = sys.stdout.isatty()
        for part in self._parser.feed(text) + (self._parser.finish() if last else []):
            if isinstance(part, Reasoning):
                self._thought = True
                typer.secho(flags.printable(part.text), nl=False, dim=True, err=not terminal)
            elif isinstance(part, Content):
                if self._thought:
                    typer.echo("\n\n" if terminal else "\n", nl=False, err=not terminal)
                    self._thought = False
                sys.stdout.write(part.text)
        if last and self._thought and not terminal:
            typer.echo(err=True)


def raise_failure(error: str | None) -> None:
    """EngineError for a request that the engine gave up."""
    if error is not None:
        raise EngineError(f"the request failed: {error}")


def summary(timings: Timings) -> str:
    """One line for people: tokens, speed, and how many tokens came from drafts."""
    rate = timings.to_dict()["decode_tokens_per_second"]
    accepted = sum(timings.accepted.values())
    return f"{timings.completion_tokens} tokens, {rate:.1f} tokens/s, {accepted} from drafts"
