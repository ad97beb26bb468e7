"""A stand-in for the engine: records how it was opened and answers from a script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quickdraft.text.answer_parts import AnswerForm
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import FinishReason, SamplingParams, Timings
from tests.support.byte_tokenizer import byte_tokenizer


@dataclass(frozen=True)
class FakeOutput:
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    seed: int = 77
    timings: Timings | None = None
    error: str | None = None
    sources: tuple[str, ...] = ("model",)


@dataclass(frozen=True)
class FakeCompletion:
    ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    seed: int
    timings: Timings
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "ids": list(self.ids),
            "text": self.text,
            "finish_reason": str(self.finish_reason),
            "seed": self.seed,
            "timings": self.timings.to_dict(),
        }


TIMINGS = Timings(
    prompt_tokens=3,
    prompt_ms=1.0,
    completion_tokens=3,
    decode_ms=30.0,
    steps=2,
    rows=4,
    drafted={"lookup": 2},
    accepted={"lookup": 1},
)


@dataclass
class FakeLLM:
    """Every answer is `parts`, one Output each; a part that is an exception is raised."""

    parts: list[str | BaseException] = field(default_factory=lambda: ["Hé", "llo", "!"])
    opened: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    asked: list[tuple[Any, SamplingParams]] = field(default_factory=list)
    predictions: list[Any] = field(default_factory=list)
    chats: list[list[dict[str, str]]] = field(default_factory=list)
    closed: int = 0
    notes: tuple[str, ...] = ()
    error: str | None = None
    thinks: bool = False  # its prompts end with an open think block
    before: Callable[[int], object] = lambda index: None  # called before each part
    tokenizer: Tokenizer = field(default_factory=byte_tokenizer)

    def __call__(self, model: str, **settings: Any) -> FakeLLM:
        self.opened.append((model, settings))
        return self

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        self.chats.append([dict(message) for message in messages])
        return [9, 9, len(messages)]

    def answer_form(self, prompt: list[int]) -> AnswerForm:
        return AnswerForm(reasoning=True, inside=self.thinks)

    def generate(self, prompt: Any, params: SamplingParams, prediction: Any = None) -> FakeCompletion:
        outputs = list(self.stream(prompt, params, prediction))
        text = "".join(output.text for output in outputs)
        return FakeCompletion((10, 11, 12), text, FinishReason.STOP, 77, TIMINGS, self.error)

    def stream(self, prompt: Any, params: SamplingParams, prediction: Any = None) -> Iterator[FakeOutput]:
        self.asked.append((prompt, params))
        self.predictions.append(prediction)
        for index, part in enumerate(self.parts):
            self.before(index)
            if isinstance(part, BaseException):
                raise part
            last = index == len(self.parts) - 1
            yield FakeOutput(
                part,
                (10 + index,),
                FinishReason.STOP if last else None,
                timings=TIMINGS if last else None,
                error=self.error if last else None,
            )

    def close(self) -> None:
        self.closed += 1


def install(monkeypatch: pytest.MonkeyPatch, module: str, **names: Any) -> None:
    """Put a module of that name, holding `names`, in the place of the real one."""
    fake = ModuleType(module)
    for name, value in names.items():
        setattr(fake, name, value)
    monkeypatch.setitem(sys.modules, module, fake)


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    fake = FakeLLM()
    install(monkeypatch, "quickdraft.engine.llm", LLM=fake)
    return fake


@pytest.fixture
def gguf(tmp_path: Path) -> str:
    """The path of a file that stands for a model; its content is never read."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF")
    return str(path)
