"""`quickdraft chat`: a conversation in the terminal, or with lines piped into stdin."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from quickdraft.cli import flags
from quickdraft.config import DEFAULT_CHECKPOINT_INTERVAL, DEFAULT_MODEL
from quickdraft.errors import RequestError
from quickdraft.types import Backend, SamplingParams, Speculation

if TYPE_CHECKING:
    from rich.console import Console

    from quickdraft.engine.llm import LLM
    from quickdraft.text.answer_parts import AnswerParser

HELP = "/reset starts over, /quit leaves, Ctrl-C stops an answer"
Messages = list[dict[str, str]]

app = typer.Typer(add_completion=False)


@app.command()
def chat(
    model: flags.Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    max_tokens: flags.MaxTokens = 1024,
    speculation: flags.SpeculationFlag = "auto",
    kv_dtype: flags.KVDtype = None,
    head_bits: flags.HeadBits = None,
    drafter: flags.DrafterFolders = None,
    draft_vocab: flags.DraftVocabFile = None,
    lookup_corpus: flags.LookupCorpus = None,
    frozen_costs: flags.FrozenCosts = False,
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
    repetition_penalty: flags.RepetitionPenalty = 1.0,
    seed: flags.Seed = None,
) -> None:
    """Talk to a model; every line is a message. /reset starts over, /quit leaves."""
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed, max_tokens=max_tokens,
        speculation=Speculation.parse(speculation),
    )  # fmt: skip
    from rich.console import Console

    start: Messages = [{"role": "system", "content": system}] if system is not None else []
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
            kv_memory=kv_memory,
            checkpoint_memory=checkpoint_memory,
            checkpoint_interval=checkpoint_interval,
            cache_dir=cache_dir,
            cache_size=cache_size,
        )
    ) as llm:
        converse(llm, params, start, Console(highlight=False, markup=False, soft_wrap=True))


def converse(llm: LLM, params: SamplingParams, start: Messages, console: Console) -> None:
    """Read lines until end of input or /quit. A message that failed leaves the history as it was.

    On a terminal a RequestError is shown and the conversation goes on; in a pipe it is raised.
    """
    terminal = sys.stdin is not None and sys.stdin.isatty()
    if terminal:
        console.print(HELP, style="dim")
    history = list(start)
    while (line := _read_line(terminal)) not in (None, "/quit"):
        if line == "/reset":
            history = list(start)
        elif line:
            turn: Messages = [*history, {"role": "user", "content": line}]
            try:
                answered = _answer(llm, params, turn, console)
            except RequestError as error:
                if not terminal:
                    raise
                console.print(f"error: {error}", style="red")
                continue
            history = [*turn, answered]


def _read_line(terminal: bool) -> str | None:
    """The next line without surrounding space; None at the end of input, or when there is no input."""
    if sys.stdin is None:
        return None
    try:
        return input("> " if terminal else "").strip()
    except EOFError:
        return None


def _answer(llm: LLM, params: SamplingParams, messages: Messages, console: Console) -> dict[str, str]:
    """Stream one answer, reasoning dimmed, and return it as a message; Ctrl-C ends it after the current
    step and keeps what was said."""
    from quickdraft.cli.generate import raise_failure, summary

    prompt = llm.chat_prompt(messages)
    said = _Said(llm.answer_form(prompt).parser(), console)
    with _interrupt_as_flag() as interrupted:
        for part in llm.stream(prompt, params):
            said.add(part.text, last=part.finish_reason is not None)
            raise_failure(part.error)
            if part.timings is not None:
                console.print()
                console.print(f"[{summary(part.timings)}]", style="dim")
            elif interrupted.is_set():
                console.print("\n[stopped]", style="dim")
                break
    return said.message()


class _Said:
    """One answer on the screen: reasoning dimmed, and an empty line before what is said after it."""

    def __init__(self, parser: AnswerParser, console: Console) -> None:
        self._parser, self._console = parser, console
        self._reasoning = self._content = ""

    def add(self, text: str, *, last: bool) -> None:
        """Show more of the answer; with the last of it, also what was held back."""
        from quickdraft.text.answer_parts import Content, Reasoning

        for part in self._parser.feed(text) + (self._parser.finish() if last else []):
            if isinstance(part, Reasoning):
                self._console.print(flags.printable(part.text), end="", style="dim")
                self._reasoning += part.text
            elif isinstance(part, Content):
                between = "\n\n" if self._reasoning and not self._content else ""
                self._console.print(between + flags.printable(part.text), end="")
                self._content += part.text

    def message(self) -> dict[str, str]:
        reasoning = {"reasoning_content": self._reasoning} if self._reasoning else {}
        return {"role": "assistant", "content": self._content, **reasoning}


@contextlib.contextmanager
def _interrupt_as_flag() -> Iterator[threading.Event]:
    """The first Ctrl-C sets the flag, so that no step is cut in half; a second one interrupts."""
    pressed = threading.Event()

    def on_interrupt(*_: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    previous = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)
