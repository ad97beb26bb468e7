"""What quickdraft and a peer are both asked, and when an answer counts.

Pure: prompts are token ids cut from one document, so both servers read the same ids whatever they think of
text. A decoding task is asked after its prompt was read once and is cached, so its time is decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from quickdraft.bench.peer_servers import Answer
from quickdraft.bench.workloads import COPY_REPEATS, COPY_SHOWN_TOKENS
from quickdraft.errors import ConfigError

SLACK_TOKENS: Final = 32  # of a cached prompt that may be computed again
PER_SECOND, SECONDS = "tokens/s", "s"
DRAFTING: Final = "copy, n-gram drafts"
KINDS: Final = ("prefill", "copy", "decode", "second")  # first words of the tasks' names


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long the tasks are, in tokens."""

    contexts: tuple[int, ...] = (0, 2048, 6000)
    decode: int = 128
    prefills: tuple[int, ...] = (512, 4096)
    copy_document: int = 944
    copy_decode: int = 512
    cached: int = 6003
    question: int = 9
    short_prompt: int = 8  # what "context 0" is


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of question. Its speed is `counted` tokens per second, or just the time."""

    name: str
    unit: str
    prompt: tuple[int, ...]
    max_tokens: int
    counted: int = 1
    cached: int = 0  # leading tokens of the prompt that must come from the cache
    vary: int | None = None  # the place in the prompt that differs each time; None: the same prompt

    @property
    def length(self) -> int:
        return len(self.prompt) + self.max_tokens

    def prompt_with(self, token: int) -> tuple[int, ...]:
        """The prompt as it is asked this time."""
        if self.vary is None:
            return self.prompt
        return (*self.prompt[: self.vary], token, *self.prompt[self.vary + 1 :])

    def value(self, seconds: float) -> float:
        """In `unit`."""
        return seconds if self.unit == SECONDS else self.counted / seconds

    def refusal(self, answer: Answer) -> str | None:
        """Why this answer's time may not be shown, or None."""
        if answer.tokens != self.max_tokens:
            return f"{answer.tokens} tokens were generated, not {self.max_tokens}"
        if answer.computed is None:
            return None
        rest = len(self.prompt) - self.cached
        if not self.cached and answer.computed != rest:
            return f"{answer.computed} of {rest} prompt tokens were computed: something was cached"
        if self.cached and answer.computed > rest + SLACK_TOKENS:
            return f"{answer.computed} prompt tokens were computed, not about {rest}: it was not cached"
        return None

    def ratio(self, quickdraft: float, peer: float) -> float:
        """How many times as fast quickdraft is."""
        return peer / quickdraft if self.unit == SECONDS else quickdraft / peer


def tasks(document: Sequence[int], copied: Sequence[int], sizes: Sizes) -> list[Task]:
    """Every task, those that share a cached prefix one after the other. ConfigError for a text too short."""
    longest = max(*sizes.contexts, *sizes.prefills, sizes.cached + sizes.question)
    text = list(document) * (1 + longest // max(1, len(document)))
    if len(copied) < sizes.copy_document or len(set(document)) < 2:
        raise ConfigError("a text too short for these tasks", got=f"{len(copied)} tokens")
    found = [
        Task(f"prefill {count}", PER_SECOND, tuple(text[:count]), 1, counted=count, vary=0)
        for count in sizes.prefills
    ]
    page = tuple(copied[: sizes.copy_document])
    copy = page * COPY_REPEATS + page[: min(COPY_SHOWN_TOKENS, len(page) // 2)]
    found += [
        Task(name, PER_SECOND, copy, sizes.copy_decode, counted=sizes.copy_decode, cached=len(copy) - 1)
        for name in ("copy, plain", DRAFTING)
    ]
    for context in sizes.contexts:
        prompt = tuple(text[: max(context, sizes.short_prompt)])
        name = f"decode after {context}"
        found.append(
            Task(name, PER_SECOND, prompt, sizes.decode, counted=sizes.decode, cached=len(prompt) - 1)
        )
    asked = tuple(text[: sizes.cached + sizes.question])
    name = f"second question ({sizes.cached} of {len(asked)} cached)"
    found.append(Task(name, SECONDS, asked, 1, cached=sizes.cached, vary=sizes.cached))
    return found


def check_kinds(kinds: Sequence[str] | None) -> None:
    """ConfigError for a kind that no task is of, or none at all."""
    if kinds is not None and (not kinds or not set(kinds) <= set(KINDS)):
        raise ConfigError("bad kinds of tasks", got=", ".join(kinds), expected=f"among {', '.join(KINDS)}")


def of_kinds(all_tasks: Sequence[Task], kinds: Sequence[str] | None) -> list[Task]:
    """The tasks of these kinds; None: all."""
    return [task for task in all_tasks if kinds is None or task.name.startswith(tuple(kinds))]


def fresh_tokens(document: Sequence[int]) -> Iterator[int]:
    """Ids of the text, each once and none of them its first: a prompt that begins with one is new."""
    yield from sorted(set(document) - {document[0]})
    raise ConfigError("no more tokens to begin a new prompt with", hint="ask for fewer rounds")
