"""`quickdraft demo`: one prompt decoded plainly and with drafts, side by side, tokens styled by source.

The two run one after the other, so that neither slows the other down. On a terminal they grow in place;
anywhere else the answer and one line about each are printed.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final

import typer

from quickdraft.cli import flags
from quickdraft.config import DEFAULT_CHECKPOINT_INTERVAL, DEFAULT_MODEL
from quickdraft.errors import ConfigError, EngineError, UnsupportedError
from quickdraft.types import SamplingParams, Speculation, Timings

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

    from quickdraft.engine.llm import LLM, Prompt
    from quickdraft.text.origins import Origin

PROMPT: Final = """Repeat this text word for word:

The tide gauge at the harbour mouth has been read every day since 1871. At first a keeper wrote the height \
into a ledger with a pencil, at noon and at midnight. Later a float in a well drew a line on paper, and a \
clock turned the drum once a day. Today a radar sensor measures the height every minute and sends it ashore \
by radio. The old ledgers are kept in the town library, and anybody may read them there."""
# Besides its colour each has a look of its own, for terminals and people without colours.
STYLES: Final = {
    "model": "",
    "lookup": "blue underline",
    "dflash2": "green bold",
    "dflash": "cyan bold",
    "mtp": "yellow italic",
    "prediction": "magenta underline italic",
    "corpus": "red underline bold",
    "forced": "reverse",
}
FRAMES_PER_SECOND: Final = 12

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    model: flags.Model = DEFAULT_MODEL,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The prompt; default: a text to repeat.")
    ] = None,
    max_tokens: flags.MaxTokens = 256,
    speculation: flags.SpeculationFlag = "auto",
    drafter: flags.DrafterFolders = None,
    threads: flags.Threads = None,
    temperature: flags.Temperature = 0.0,
    top_p: flags.TopP = 1.0,
    seed: flags.Seed = None,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Wrap the prompt in the model's chat template, or not.")
    ] = True,
) -> None:
    """Decode one prompt plainly and with drafts, side by side."""
    drafts = Speculation.parse(speculation)
    if drafts.off:
        raise ConfigError(
            "nothing to compare plain decoding with",
            got="--speculation off",
            expected="auto, or draft sources",
        )
    # The seed is the same for both, so that sampled answers must be equal too.
    seed = secrets.randbits(63) if seed is None else seed
    params = [
        SamplingParams(
            temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed, speculation=one
        )
        for one in (Speculation(), drafts)
    ]
    from rich.console import Console

    with contextlib.closing(
        flags.open_llm(
            model, threads=threads, kv_dtype=None, kv_memory=None, checkpoint_memory=None,
            checkpoint_interval=DEFAULT_CHECKPOINT_INTERVAL, cache_dir=None, cache_size=None, drafter=drafter,
        )
    ) as llm:  # fmt: skip
        text = PROMPT if prompt is None else prompt
        given: Prompt = llm.chat_prompt([{"role": "user", "content": text}]) if chat else text
        show(llm, given, params, Console(highlight=False, markup=False))


def show(llm: LLM, prompt: Prompt, params: list[SamplingParams], console: Console) -> None:
    """Run both and say whether their ids are equal; EngineError when they are not."""
    names = ("plain decoding", f"with drafts: {params[1].speculation}")
    sides = [Side(name) for name in names]
    if console.is_terminal:
        _grow(llm, prompt, params, console, sides)
        console.print(_pair(sides, None))
    else:
        for side, one in zip(sides, params, strict=True):
            for _ in _follow(llm, prompt, one, side):
                pass
        console.print(flags.printable("".join(one.text for one in sides[1].origins)), soft_wrap=True)
        for side in sides:
            console.print(f"{side.name}: {side.facts()}", soft_wrap=True)
    plain, drafted = sides
    if plain.ids != drafted.ids:
        raise EngineError(
            "the two answers differ, which must never happen",
            got=drafted.digest(),
            expected=plain.digest(),
            hint="please report it, with the prompt, the seed and the model",
        )
    ratio = f", {drafted.rate() / plain.rate():.2f} times as fast" if plain.rate() else ""
    console.print(
        f"ids equal: {plain.digest()} = {drafted.digest()}, {len(plain.ids)} tokens{ratio}", soft_wrap=True
    )


@dataclass(slots=True)
class Side:
    """One of the two answers while it grows."""

    name: str
    origins: list[Origin] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    first: tuple[float, int] | None = None  # when its first tokens came, and how many
    last_at: float = 0.0
    timings: Timings | None = None

    def rate(self) -> float:
        """Tokens a second: the engine's own count once it has ended, what is seen here before."""
        if self.timings is not None:
            seconds = self.timings.decode_ms / 1000
            return self.timings.completion_tokens / seconds if seconds else 0.0
        if self.first is None or self.last_at <= self.first[0]:
            return 0.0
        return (len(self.ids) - self.first[1]) / (self.last_at - self.first[0])

    def facts(self) -> str:
        if not self.steps:
            return "waiting"
        counts = ", ".join(f"{name} {self.sources[name]}" for name in STYLES if self.sources[name])
        per_step = len(self.ids) / self.steps
        return f"{len(self.ids)} tokens, {self.rate():.1f} tokens/s, {per_step:.2f} a step ({counts})"

    def digest(self) -> str:
        """The same for the same ids."""
        return hashlib.sha256(",".join(map(str, self.ids)).encode()).hexdigest()[:16]

    def text(self) -> Text:
        from rich.text import Text

        return Text.assemble(
            *((flags.printable(one.text), STYLES.get(one.source, "")) for one in self.origins)
        )


def _follow(llm: LLM, prompt: Prompt, params: SamplingParams, side: Side) -> Iterator[None]:
    """Decode into `side`; yields after every step."""
    from quickdraft.cli.generate import raise_failure
    from quickdraft.text.origins import TokenOrigins

    if llm.tokenizer is None:
        raise UnsupportedError("the model file has no tokenizer, so there is no text to show")
    origins = TokenOrigins(llm.tokenizer)
    for output in llm.stream(prompt, params):
        raise_failure(output.error)
        side.origins += origins.feed(output.tokens, output.sources, output.text)
        side.ids += output.tokens
        side.sources.update(output.sources)
        side.steps += bool(output.tokens)
        side.timings, side.last_at = output.timings, time.monotonic()
        if side.first is None:
            side.first = side.last_at, len(side.ids)
        yield


def _grow(
    llm: LLM, prompt: Prompt, params: list[SamplingParams], console: Console, sides: list[Side]
) -> None:
    from rich.live import Live

    rows = max(4, console.height - 6)
    with Live(console=console, transient=True, auto_refresh=False) as live:
        drawn_at = 0.0
        for side, one in zip(sides, params, strict=True):
            for _ in _follow(llm, prompt, one, side):
                if time.monotonic() - drawn_at >= 1 / FRAMES_PER_SECOND:
                    live.update(_pair(sides, rows), refresh=True)
                    drawn_at = time.monotonic()


def _pair(sides: list[Side], rows: int | None) -> RenderableType:
    """Both, side by side; of each its last `rows` lines, so that what is new stays in sight."""
    from rich.table import Table

    grid = Table.grid(expand=True)
    for _ in sides:
        grid.add_column(ratio=1)
    grid.add_row(*(_Panel(side, rows) for side in sides))
    return grid


class _Panel:
    """A frame around one answer, cut to its last lines when it is drawn: only then its width is known."""

    def __init__(self, side: Side, rows: int | None) -> None:
        self._side, self._rows = side, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.panel import Panel
        from rich.text import Text

        lines = self._side.text().wrap(console, max(1, options.max_width - 4))
        shown = lines[-self._rows :] if self._rows is not None else lines
        body = Text("\n").join(shown)
        yield Panel(body, title=self._side.name, subtitle=self._side.facts())
