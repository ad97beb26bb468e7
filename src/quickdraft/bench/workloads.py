"""Workloads: what `bench` decodes. Honest texts, each with a different share of text that repeats its prompt.

Prompts are chat messages, except where the text itself is to be continued: `copy` states its expected
ids, `random` is for files without a tokenizer. All texts in `data/` are quickdraft's own. The prompts were
chosen so that the default model, which is small and easily repeats itself, writes real text up
to its end of turn. Nothing here runs a model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Final

import numpy as np

from quickdraft.engine.opened import Opened
from quickdraft.errors import ConfigError, ContextTooLong
from quickdraft.text.chat_prompt import chat_prompt_ids

Message = dict[str, str]
RANDOM_SEED: Final = 7
COPY_REPEATS, COPY_SHOWN_TOKENS, COPY_MAX_TOKENS = 3, 200, 512


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation whose next turn is the assistant's."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A document `repeats` times, then its first `shown_tokens` tokens; the rest of it is expected."""

    document: str
    repeats: int = COPY_REPEATS
    shown_tokens: int = COPY_SHOWN_TOKENS


@dataclass(frozen=True, slots=True)
class Random:
    """Seeded random ids, for files without a tokenizer; their output is not text."""

    tokens: int = 256


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts decoded one after the other and counted together; `max_tokens` is per prompt."""

    name: str
    prompts: tuple[Chat | Copy | Random, ...]
    max_tokens: int = 256

    @property
    def is_text(self) -> bool:
        return not any(isinstance(prompt, Random) for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class PromptIds:
    """One prompt as ids; `expected` are the ids greedy decoding must give, None when not stated."""

    ids: tuple[int, ...]
    max_tokens: int
    expected: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a model file turns prompts into ids; the functions are None where the file cannot."""

    vocabulary_size: int
    max_context_tokens: int
    encode: Callable[[str], list[int]] | None = None
    chat_ids: Callable[[Sequence[Message]], list[int]] | None = None


def encoding_of(opened: Opened) -> Encoding:
    """How this model file turns prompts into ids."""
    tokenizer, template = opened.tokenizer, opened.chat_template

    def chat_ids(messages: Sequence[Message]) -> list[int]:
        assert tokenizer is not None and template is not None
        return chat_prompt_ids(tokenizer, template, messages)

    return Encoding(
        opened.runner.model.config.vocabulary_size,
        opened.max_context_tokens,
        tokenizer.encode if tokenizer is not None else None,
        chat_ids if tokenizer is not None and template is not None else None,
    )


def prompt_ids(workload: Workload, encoding: Encoding, max_tokens: int | None = None) -> list[PromptIds]:
    """The workload's prompts as ids, in order; `max_tokens` replaces its own limit.

    `copy` never decodes further than its expected ids. ConfigError when the file lacks a tokenizer or a chat
    template the workload needs; ContextTooLong when a prompt and its output do not fit.
    """
    limit = workload.max_tokens if max_tokens is None else max_tokens
    prompts = [_ids(prompt, workload.name, encoding, limit) for prompt in workload.prompts]
    for prompt in prompts:
        if len(prompt.ids) + prompt.max_tokens > encoding.max_context_tokens:
            raise ContextTooLong(len(prompt.ids) + prompt.max_tokens, encoding.max_context_tokens)
    return prompts


def named(names: Sequence[str] | None, *, has_tokenizer: bool) -> list[Workload]:
    """The workloads of these names in their fixed order, each once; None: all a file of this kind can run."""
    everything = {workload.name: workload for workload in (all_workloads() if has_tokenizer else (RANDOM,))}
    unknown = [name for name in names or () if name not in everything]
    if unknown:
        raise ConfigError(
            "no such workload" if has_tokenizer else "no such workload for a model file without a tokenizer",
            got=repr(unknown[0][:80]),
            expected=f"one of {', '.join(everything)}",
        )
    return [workload for name, workload in everything.items() if names is None or name in names]


def all_workloads() -> tuple[Workload, ...]:
    """Every workload of text, in the order they are run."""
    return (
        Workload("copy", (Copy(copy_document()),), COPY_MAX_TOKENS),
        Workload("extract", _extract()),
        Workload("code-edit", (_code_edit(),), 384),
        Workload("rag", _rag()),
        Workload("summary", _summary(), 192),
        Workload("chat", tuple(_user(question) for question in CHAT_QUESTIONS)),
    )


CHAT_QUESTIONS: Final = (
    "What is the capital of Portugal?",
    "Explain in two sentences why the sky is blue.",
    "Give me three tips for sleeping better.",
    "Translate 'Good morning, my friend' into French.",
    "What is the difference between a lake and a pond?",
    "Suggest a name for a small bakery and say why.",
    "Describe the taste of a lemon in one sentence.",
    "What does a bicycle gear do?",
)
_SUMMARY_SYSTEM: Final = (
    "Provide a concise, objective summary of the input text in up to three sentences, focusing on key "
    "actions and intentions without using second or third person pronouns."
)
_RAG_TASK: Final = "Answer the question by quoting the sentence that contains the answer.\n\n"
_RAG_QUESTIONS: Final = (
    "Why was the line closed?",
    "How long was the railway?",
    "When did steam trains return?",
)
_RENAME: Final = "Rename `{old}` to `{new}`. Return the whole file.\n\n```python\n{code}```"


def copy_document() -> str:
    """The text of the `copy` workload."""
    return _read("tide_gauge.txt")


def ledger() -> str:
    """Sentences that begin alike and end each in another way."""
    return _read("ledger.txt")


def edited_file() -> str:
    """The file that the `code-edit` workload asks to be changed."""
    return _read("orders.py.txt")


def long_document() -> str:
    """All texts after one another; for documents of any length, to be repeated."""
    names = ("tide_gauge.txt", "railway.txt", "orchids.txt", "orders.py.txt", "bridge.txt", "records.json")
    return "\n\n".join(_read(name).strip() for name in names)


def _extract() -> tuple[Chat, ...]:
    """Two records are shown done, each prompt asks for one of the others."""
    records = json.loads(_read("records.json"))
    fields = [
        "\n".join(f"{key.capitalize()}: {record[key]}" for key in ("name", "role", "city", "email", "phone"))
        for record in records
    ]
    texts = [json.dumps(record) for record in records]
    task = "List the name, role, city, email and phone of each record.\n\n"
    shown = (*_turn(task + texts[0], fields[0]), *_turn(texts[1], fields[1]))
    return tuple(Chat((*shown, {"role": "user", "content": text})) for text in texts[2:])


def _code_edit() -> Chat:
    """A rename is shown done on a small file, then asked for on a longer one."""
    small = _read("rows.py.txt")
    asked = _RENAME.format(old="unpaid", new="open_orders", code=edited_file())
    done = f"```python\n{small.replace('load', 'read_rows')}```"
    shown = _turn(_RENAME.format(old="load", new="read_rows", code=small), done)
    return Chat((*shown, {"role": "user", "content": asked}))


def _rag() -> tuple[Chat, ...]:
    """A question about other passages is shown answered, then each prompt asks one."""
    shown = _turn(
        f"{_RAG_TASK}{_read('bridge.txt')}\nQuestion: Why was the bridge not replaced?",
        'Passage [2] says: "More than two thousand people signed a petition, and the plan was dropped '
        'within a year."',
    )
    passages = _RAG_TASK + _read("railway.txt")
    return tuple(
        Chat((*shown, {"role": "user", "content": f"{passages}\nQuestion: {question}"}))
        for question in _RAG_QUESTIONS
    )


def _summary() -> tuple[Chat, ...]:
    gauge = _read("tide_gauge.txt").strip().split("\n\n")
    texts = (
        _read("orchids.txt").strip(),
        _read("railway.txt"),
        "\n\n".join(gauge[1:3]),
        "\n\n".join(gauge[6:]),
    )
    system = {"role": "system", "content": _SUMMARY_SYSTEM}
    return tuple(Chat((system, {"role": "user", "content": text})) for text in texts)


def _user(text: str) -> Chat:
    return Chat(({"role": "user", "content": text},))


def _turn(question: str, answer: str) -> tuple[Message, Message]:
    return {"role": "user", "content": question}, {"role": "assistant", "content": answer}


def _read(name: str) -> str:
    return resources.files("quickdraft.bench").joinpath("data", name).read_text("utf-8")


def _ids(prompt: Chat | Copy | Random, name: str, encoding: Encoding, max_tokens: int) -> PromptIds:
    if isinstance(prompt, Random):
        generator = np.random.default_rng(RANDOM_SEED)
        room = encoding.max_context_tokens - max_tokens
        count = max(1, min(prompt.tokens, room))  # a file made for tests may have little context
        return PromptIds(tuple(generator.integers(0, encoding.vocabulary_size, count).tolist()), max_tokens)
    if isinstance(prompt, Chat):
        if encoding.chat_ids is None:
            raise ConfigError(f"workload '{name}' needs a chat template, and this model file has none")
        return PromptIds(tuple(encoding.chat_ids(prompt.messages)), max_tokens)
    if encoding.encode is None:
        raise ConfigError(f"workload '{name}' needs a tokenizer, and this model file has none")
    document = tuple(encoding.encode(prompt.document))
    expected = document[prompt.shown_tokens :][:max_tokens]
    return PromptIds(document * prompt.repeats + document[: prompt.shown_tokens], len(expected), expected)


RANDOM: Final = Workload("random", (Random(),), max_tokens=128)
