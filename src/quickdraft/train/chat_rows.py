"""Chat rows: user turns and answers that the target makes up itself, a function of (model, seed, index).

A user turn is what the target writes after the bare chat template's user header, sampled; then it answers
greedily, and every fifth time sampled. Knows no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from quickdraft.engine.llm import LLM
from quickdraft.errors import EngineError, UnsupportedError
from quickdraft.train.rows import Row
from quickdraft.types import FinishReason, SamplingParams, Speculation

TURN_TOKENS: Final = 96  # of a user turn, which must have stopped by then
FEWEST_TURN_TOKENS: Final = 4
SAMPLED_EVERY: Final = 5
TEMPERATURE: Final = 0.7  # of the sampled answers
LONGEST: Final = 512  # tokens of a row; what is beyond is cut off
_MARKERS: Final = "X", "Q"
_PLAIN: Final = Speculation()


@dataclass(frozen=True, slots=True)
class Frame:
    """What the chat template puts around a single user turn, as token ids."""

    head: list[int]
    tail: list[int]


def find_frame(llm: LLM) -> Frame:
    """From two conversations that differ in the turn alone. UnsupportedError for a template that says the
    turn in two places, or changes it."""
    one, other = (llm.chat_prompt([{"role": "user", "content": text}]).ids for text in _MARKERS)
    head = _shared(one, other)
    tail = _shared(one[::-1], other[::-1])
    if head + tail >= min(len(one), len(other)) or abs(len(one) - len(other)) > 1 or not tail:
        raise UnsupportedError(
            f"model {llm.name}: its chat template does not show where a user's turn lies",
            hint="give --prompts FILE",
        )
    if len(one) - head - tail > 3:
        raise UnsupportedError(
            f"model {llm.name}: its chat template writes a user's turn twice", hint="give --prompts FILE"
        )
    return Frame(one[:head], one[len(one) - tail :])


def user_turns(llm: LLM, frame: Frame, indices: Sequence[int], seed: int) -> dict[int, list[int]]:
    """Turns by index; an index is left out whose turn did not stop, is short or holds a control token."""
    control = control_ids(llm)
    turns = {}
    params = [
        SamplingParams(
            temperature=1.0, top_p=0.95, seed=seed_of(seed, index), max_tokens=TURN_TOKENS, speculation=_PLAIN
        )
        for index in indices
    ]
    done = llm.generate_many([(frame.head, each) for each in params])
    for index, completion in zip(indices, done, strict=True):
        turn = list(completion.ids)
        if completion.finish_reason is not FinishReason.STOP:
            continue
        while turn and turn[-1] in llm.opened.eos_ids:
            turn.pop()
        if len(turn) >= FEWEST_TURN_TOKENS and not control.intersection(turn):
            turns[index] = turn
    return turns


def answered(llm: LLM, kind: str, prompts: dict[int, list[int]], seed: int, max_tokens: int) -> list[Row]:
    """Rows by index; a prompt of LONGEST tokens or more is left out. EngineError where an answer failed."""
    asked = {index: prompt for index, prompt in prompts.items() if len(prompt) < LONGEST}
    params = [
        SamplingParams(
            temperature=TEMPERATURE if is_sampled(index) else 0.0, seed=seed_of(seed, index),
            max_tokens=max_tokens, speculation=_PLAIN,
        )
        for index in asked
    ]  # fmt: skip
    done = llm.generate_many(list(zip(asked.values(), params, strict=True)))
    rows = []
    for (index, prompt), one, answer in zip(asked.items(), params, done, strict=True):
        if answer.error is not None:
            raise EngineError(f"an answer failed: {answer.error}")
        tokens = (*prompt, *answer.ids)[:LONGEST]
        rows.append(Row(index, kind, one.temperature, len(prompt), tokens))
    return rows


def chat_rows(llm: LLM, frame: Frame, indices: Sequence[int], seed: int, max_tokens: int) -> list[Row]:
    """Rows of those indices whose turn is one."""
    turns = user_turns(llm, frame, indices, seed)
    prompts = {index: frame.head + turn + frame.tail for index, turn in turns.items()}
    return answered(llm, "chat", prompts, seed, max_tokens)


def is_sampled(index: int) -> bool:
    return index % SAMPLED_EVERY == SAMPLED_EVERY - 1


def seed_of(seed: int, index: int) -> int:
    """Of the noise of one row: seed 0 is the row's index."""
    return (seed << 32) + index


def control_ids(llm: LLM) -> set[int]:
    """Tokens that are no text."""
    data = llm.opened.tokenizer
    assert data is not None, "chat_prompt came before"
    return {token for token in range(data.vocabulary_size) if not data.token_bytes(token)}


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Leading items that are equal."""
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
