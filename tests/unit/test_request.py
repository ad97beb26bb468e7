"""Request: which stop rule wins, token by token; seeds; what refuses to be a request."""

from __future__ import annotations

import pytest

from quickdraft.engine.request import Request
from quickdraft.errors import BadParameter, ContextTooLong
from quickdraft.types import FinishReason, SamplingParams

EOS, STOP_ID = 2, 12
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class Words:
    """A TextSink over words `t<id>`; the stop string is the word of token 77."""

    stopped_at = None

    def __init__(self) -> None:
        self.words: list[str] = []
        self.finished = False

    def push(self, token: int, allow_stop: bool) -> bool:
        self.words.append(f"t{token}")
        return allow_stop and token == 77

    def finish(self) -> None:
        self.finished = True

    def take(self) -> str:
        taken = " ".join(self.words)
        self.words.clear()
        return taken


def request(prompt=(5, 6), max_context: int = 100, **fields) -> Request:
    params = SamplingParams(temperature=0.0, stop_token_ids=(STOP_ID,), **fields)
    return Request("r", prompt, params, eos_ids=(EOS,), text=Words(), max_context=max_context)


def push_all(req: Request, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
    """What is emitted of `tokens` before the request ends."""
    for count, token in enumerate(tokens, 1):
        reason = req.push(token)
        if reason is not None:
            return tokens[:count], reason
    return tokens, None


@pytest.mark.parametrize(
    ("tokens", "fields", "emitted", "reason"),
    [
        ([10, 11, STOP_ID, 20, 21], {}, 3, STOP),
        ([10, 11, STOP_ID, 20, 21], {"max_tokens": 5}, 3, STOP),
        ([10, 11, EOS, 20], {}, 3, STOP),
        ([10, 11, EOS, 20], {"ignore_eos": True}, 4, None),
        ([10, STOP_ID], {"ignore_eos": True}, 2, STOP),
        ([10, 77, 20], {}, 2, STOP),
        ([10, 77, 20, 77, 21], {"min_tokens": 3}, 4, STOP),
        ([10, 77, 20], {"min_tokens": 2}, 2, STOP),
        ([10, 11, 20, 21], {"max_tokens": 3}, 3, LENGTH),
        ([10, 11, EOS, 21], {"max_tokens": 3}, 3, STOP),  # both at once: the stop wins
        ([10, 77, 20], {"max_tokens": 2}, 2, STOP),
        ([10, 11, 20, 21], {"max_tokens": 50, "max_context": 5}, 3, LENGTH),
        ([10, 11, 20, 21], {"max_context": 5}, 3, LENGTH),
    ],
)
def test_the_first_rule_that_applies_ends_it(tokens, fields, emitted, reason) -> None:
    req = request(**fields)
    found, why = push_all(req, tokens)
    assert (len(found), why, req.finish) == (emitted, reason, reason)
    assert req.output_ids == tokens[:emitted]
    assert req.tokens == [5, 6, *tokens[:emitted]]
    assert req.text.finished == (reason is not None)


def test_a_stop_token_is_in_the_ids_and_not_in_the_text() -> None:
    req = request()
    push_all(req, [10, 11, EOS])
    assert req.output_ids == [10, 11, EOS]
    assert req.text.take() == "t10 t11"


def test_prompts_that_leave_no_room_are_refused_with_both_numbers() -> None:
    assert request(prompt=[1] * 9, max_context=10).max_output == 1
    with pytest.raises(ContextTooLong) as error:
        request(prompt=[1] * 10, max_context=10)
    assert (error.value.prompt_tokens, error.value.max_context_tokens) == (10, 10)
    with pytest.raises(BadParameter, match="prompt"):
        request(prompt=[])


def test_a_seed_is_drawn_once_and_kept() -> None:
    assert request(seed=7).seed == 7
    drawn = {request().seed for _ in range(20)}
    assert len(drawn) == 20


def test_a_request_without_text_still_ends() -> None:
    req = Request("r", [1], SamplingParams(max_tokens=2), eos_ids=(EOS,), max_context=10)
    assert push_all(req, [4, 5, 6]) == ([4, 5], LENGTH)
