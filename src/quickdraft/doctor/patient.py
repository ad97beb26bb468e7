"""Patient: the opened model under examination, and the runs and texts that checks share.

Runs start cold unless a check wants otherwise: what an earlier one cached is forgotten, so that a broken
cache is named by the check of the cache and no other. Decides nothing about what is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from quickdraft.doctor.check import Failed, Skipped
from quickdraft.engine.llm import LLM, Completion
from quickdraft.speculate.constraint import FORCED
from quickdraft.speculate.draft import PREDICTION
from quickdraft.text.chat_template import ChatTemplate
from quickdraft.text.tokenizer import Tokenizer
from quickdraft.types import SamplingParams, Speculation

OFF: Final = Speculation()
ASKED_FOR: Final = (FORCED, PREDICTION)  # sources that draft only what a request brings with it
GREEDY: Final = SamplingParams(temperature=0.0, ignore_eos=True, speculation=OFF)
# logprobs are compared too: a wrong bit shows in them long before it tips a token
SAMPLED: Final = SamplingParams(
    temperature=0.9, top_p=0.95, seed=20, ignore_eos=True, logprobs=2, speculation=OFF
)
REPORT_HINT: Final = "please report it with what `quickdraft doctor --output json` prints"
LETTER: Final = (
    "The night ferry to Harwich left twenty minutes late. Its captain, a patient woman from Bergen, had "
    "waited for a lorry with nine crates of glass, and she noted the delay in the log in green ink. At "
    "two in the morning the wind turned to the north-west; the crates were tied down again, and the cook "
    "brought soup to the bridge. Nobody slept much. When the lights of the harbour came into view, the "
    "captain counted the crates once more, found nine, and signed the page. The driver of the lorry, who "
    "had slept through all of it, asked whether the night ferry to Harwich had been on time. "
)


@dataclass(frozen=True, slots=True)
class Patient:
    """One opened model."""

    llm: LLM
    free_memory_bytes: int  # before it was opened

    @property
    def tokenizer(self) -> Tokenizer:
        """Skipped where the model has none."""
        if self.llm.tokenizer is None:
            raise Skipped("the model has no tokenizer; prompts are token ids")
        return self.llm.tokenizer

    @property
    def template(self) -> ChatTemplate:
        """Skipped where the model has none."""
        if self.llm.opened.chat_template is None:
            raise Skipped("the model has no chat template; `generate` takes raw prompts")
        return self.llm.opened.chat_template

    @property
    def vocabulary_size(self) -> int:
        return self.llm.opened.runner.model.config.vocabulary_size

    def text_ids(self, count: int, room: int = 0) -> list[int]:
        """`count` ids of a text that says some things twice; Skipped where the context has no room for them
        and `room` more."""
        if count + room >= self.llm.max_context_tokens:
            raise Skipped(
                f"it needs {count + room + 1} tokens of context, and there are {self.llm.max_context_tokens}"
            )
        if self.llm.tokenizer is None:
            size = self.vocabulary_size
            text = [(i * i + 7 * i + 3) % size for i in range(61)]
        else:
            text = self.llm.tokenizer.encode(LETTER, add_bos=False)
        return (text * (count // len(text) + 1))[:count]

    def forget(self) -> None:
        """Drop what earlier runs left in the prefix cache."""
        cache = self.llm.opened.engine.scheduler.cache
        if cache is not None:
            cache.clear()

    def cold(self, ids: Sequence[int], params: SamplingParams) -> Completion:
        """One answer with nothing cached."""
        self.forget()
        return self.warm(ids, params)

    def warm(self, ids: Sequence[int], params: SamplingParams) -> Completion:
        """One answer after whatever ran before."""
        return self.whole([self.llm.generate(list(ids), params)])[0]

    def together(self, jobs: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
        """Answers of one batch, with nothing cached."""
        self.forget()
        return self.whole(self.llm.generate_many([(list(ids), params) for ids, params in jobs]))

    @staticmethod
    def whole(answers: list[Completion]) -> list[Completion]:
        """The answers; Failed when the engine gave one up."""
        for answer in answers:
            if answer.error is not None:
                raise Failed(f"a request failed: {answer.error}", REPORT_HINT)
        return answers


def with_speculation(params: SamplingParams, speculation: Speculation, max_tokens: int) -> SamplingParams:
    """The same request with other drafts."""
    return replace(params, speculation=speculation, max_tokens=max_tokens)


def difference(name: str, other: Completion, reference_name: str, reference: Completion) -> str | None:
    """Where two answers part, in words; None when ids, logprobs and reasons to end are equal."""
    for index, (token, expected) in enumerate(zip(other.ids, reference.ids, strict=False)):
        if token != expected:
            return f"{name}: token {index} is id {token}, {reference_name} gives {expected}"
    if len(other.ids) != len(reference.ids):
        return f"{name}: {len(other.ids)} tokens, {reference_name} gives {len(reference.ids)}"
    if other.logprobs != reference.logprobs:
        return f"{name}: the same tokens with other logprobs than {reference_name} gives"
    if other.finish_reason != reference.finish_reason:
        return f"{name}: ended by {other.finish_reason}, {reference_name} by {reference.finish_reason}"
    return None
