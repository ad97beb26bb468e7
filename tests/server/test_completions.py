"""/v1/completions through the official client: every prompt shape, streams, echo, legacy logprobs."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.support.byte_tokenizer import IM_END, IM_START
from tests.support.fake_engine import FakeEngine

REPLY = "hello wörld 🎉!"
PATH = "/v1/completions"


def create(client: openai.OpenAI, **options: Any) -> Any:
    return client.completions.create(**{"model": "fake", "prompt": "hi", "max_tokens": 100, **options})


def reply_by_prompt(engine: FakeEngine) -> None:
    """The answer says which prompt it belongs to, and its length differs."""
    engine.reply = lambda ids: engine.tokenizer.encode("ab" * ids[0] + "🎉")


def test_whole_answer(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = create(client, seed=11)
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and answer.model == "fake"
    choice = answer.choices[0]
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, REPLY, "stop", None)
    assert engine.requests[0][0] == engine.tokenizer.encode("hi")
    usage = answer.usage
    assert usage.prompt_tokens == 2 and usage.completion_tokens == len(engine.tokenizer.encode(REPLY)) + 1
    assert usage.prompt_tokens_details.cached_tokens == 1
    assert usage.completion_tokens_details.accepted_prediction_tokens == 0
    extra = answer.model_extra
    assert extra["seed"] == 11 and extra["speculation"] == "auto" and extra["timings"]["steps"] == 5
    assert extra["prefix_cache"] == {
        "cached_tokens": 1, "restored_tokens": 0, "reason": "differs", "position": 1, "token": 5,
        "cached_token": 9,
    }  # fmt: skip


def test_parameters_reach_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True}
    extra |= {"stop_token_ids": [9], "speculation": "lookup@16"}
    options: dict[str, Any] = {"temperature": 0, "top_p": 0.5, "presence_penalty": 1, "frequency_penalty": -1}
    options |= {"logit_bias": {"5": -100}, "seed": 3, "stop": ["x", "y"], "max_tokens": 4, "logprobs": 2}
    create(client, **options, n=1, best_of=1, echo=False, user="me", extra_body=extra)
    _, params = engine.requests[0]
    for name, value in {**extra, **options}.items():
        shown = {"stop": ("x", "y"), "logit_bias": {5: -100.0}, "stop_token_ids": (9,)}.get(name, value)
        ours = getattr(params, name)
        assert (str(ours) if name == "speculation" else ours) == shown
    client.completions.create(model="fake", prompt="hi")
    assert engine.requests[1][1].max_tokens == 16  # OpenAI's default


PROMPTS: list[tuple[Any, list[list[int]]]] = [
    ([7, 8], [[7, 8]]),
    ([[7, 8], [9]], [[7, 8], [9]]),
    (["", "12"], []),
    (["he", "!"], [[261], [4 + 33]]),
    ("<|im_start|>he", [[IM_START, 261]]),
]


@pytest.mark.parametrize(("prompt", "ids"), PROMPTS, ids=str)
def test_prompt_shapes(client: openai.OpenAI, engine: FakeEngine, prompt: Any, ids: list[list[int]]) -> None:
    if not ids:
        with pytest.raises(openai.BadRequestError, match="no tokens"):
            create(client, prompt=prompt)
    else:
        answer = create(client, prompt=prompt)
        assert [choice.index for choice in answer.choices] == list(range(len(ids)))
    assert [given for given, _ in engine.requests] == ids


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
def test_several_prompts_whole_and_streamed(
    client: openai.OpenAI, engine: FakeEngine, tokens_per_step: int
) -> None:
    reply_by_prompt(engine)
    engine.tokens_per_step = tokens_per_step
    prompts = [[9], [4], [6, 6]]
    options: dict[str, Any] = {"prompt": prompts, "echo": True, "logprobs": None, "seed": 5}
    whole = create(client, **options)
    tokenizer = engine.tokenizer
    expected = [tokenizer.decode(p) + "ab" * p[0] + "🎉" for p in prompts]
    assert [choice.text for choice in whole.choices] == expected
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    tokens = [choice.model_extra["timings"]["completion_tokens"] for choice in whole.choices]
    assert whole.usage.completion_tokens == sum(tokens) and whole.usage.prompt_tokens == 4
    assert all(choice.model_extra["seed"] == 5 for choice in whole.choices)
    assert "timings" not in whole.model_extra
    chunks = list(create(client, **options, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    texts, ends = ["", "", ""], []
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            ends.append(choice.index)
            assert choice.model_extra["timings"] == whole.choices[choice.index].model_extra["timings"]
    assert texts == expected and sorted(ends) == [0, 1, 2]


def test_one_failure_ends_all_choices(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.error_at_step, engine.tokens_per_step = 1, 1
    with pytest.raises(openai.InternalServerError, match="NaN in the logits"):
        create(client, prompt=[[9], [4]])
    assert engine.running == set()


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("prompt", ["hi", [5, 6]])
def test_legacy_logprobs(client: openai.OpenAI, engine: FakeEngine, top: int, prompt: Any) -> None:
    answer = create(client, prompt=prompt, logprobs=top)
    shown = answer.choices[0].logprobs
    count = answer.usage.completion_tokens
    assert len(shown.tokens) == len(shown.text_offset) == len(shown.top_logprobs) == count
    assert shown.token_logprobs == [-0.5] * count
    assert shown.tokens[0] == "hello" and shown.tokens[-1] == "<|im_end|>"
    assert "bytes:\\xf0\\x9f" in shown.tokens and "bytes:\\xc3" in shown.tokens
    text = answer.choices[0].text
    for token, offset in zip(shown.tokens, shown.text_offset, strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert text[offset : offset + len(token)] == token
    assert all(shown.top_logprobs[i][token] == -0.5 for i, token in enumerate(shown.tokens))
    assert all(len(one) == top + 1 for one in shown.top_logprobs)
    parts = [c.choices[0].logprobs for c in create(client, prompt=prompt, logprobs=top, stream=True)]
    parts = [part for part in parts if part]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for part in parts for x in getattr(part, name)] == getattr(shown, name)


@pytest.mark.parametrize("tokens_per_step", [1, 4])
@pytest.mark.parametrize("options", [{}, {"max_tokens": 4}, {"stop": "wör"}, {"stop": ["🎉", "zz"]}], ids=str)
def test_stream_equals_whole(
    client: openai.OpenAI, engine: FakeEngine, tokens_per_step: int, options: dict[str, Any]
) -> None:
    engine.tokens_per_step = tokens_per_step
    whole = create(client, **options)
    chunks = list(create(client, **options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    for name in ("timings", "prefix_cache", "seed", "speculation"):
        assert chunks[-1].model_extra[name] == whole.model_extra[name]


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "required"),
    ({"prompt": 5}, "prompt", "a string, a list of token ids"),
    ({"prompt": []}, "prompt", "a string, a list of token ids"),
    ({"prompt": {}}, "prompt", "a string, a list of token ids"),
    ({"prompt": [[]]}, "prompt", "no tokens"),
    ({"prompt": [1, "a"]}, "prompt[1]", "a token id"),
    ({"prompt": [True]}, "prompt[0]", "a token id"),
    ({"prompt": ["a", [1]]}, "prompt[1]", "a string, a list of token ids"),
    ({"prompt": [[1], [1.5]]}, "prompt[1][0]", "a token id"),
    ({"prompt": ["a"] * 65}, "prompt", "at most 64"),
    ({"prompt": [-1]}, "prompt", "out of range"),
    ({"prompt": [10**30]}, "prompt", "out of range"),
    ({"prompt": [10**6], "echo": True}, "prompt", "out of range"),
    ({"n": 33, "prompt": ["a", "b"]}, "n", "1..32"),
    ({"n": 2, "seed": 2**64 - 1}, "seed", "18446744073709551616"),
    ({"best_of": 2}, "best_of", "not supported"),
    ({"suffix": "end"}, "suffix", "not supported"),
    ({"suffix": ""}, "suffix", "not supported"),
    ({"echo": True, "logprobs": 0}, "echo", "logprobs"),
    ({"echo": "yes"}, "echo", "valid boolean"),
    ({"logprobs": True}, "logprobs", "valid integer"),
    ({"logprobs": 21}, "logprobs", "[0, 20]"),
    ({"max_tokens": 0}, "max_tokens", "[1,"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "unknown field"),
    ({"messages": []}, "messages", "unknown field"),
    ({"top_logprobs": 2}, "top_logprobs", "did you mean 'logprobs'"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream true"),
    ({"speculation": "magic"}, "speculation", "lookup@16"),
    ({"model": None}, "model", "required"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_fields(
    http: httpx.Client, engine: FakeEngine, fields: dict[str, Any], param: str, message: str
) -> None:
    reply = http.post(PATH, json={"model": "fake", "prompt": "hi", **fields})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param and message in error["message"] and param in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize("path", [PATH, "/tokenize"])
def test_a_prompt_far_too_long_is_not_tokenized(
    http: httpx.Client, engine: FakeEngine, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(engine.tokenizer, "encode_pieces", refuse)
    for prompt in ("word " * 100_000, "<|im_end|>" * 5000):
        reply = http.post(path, json={"model": "fake", "prompt": prompt})
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert "512" in error["message"] and "at least" in error["message"]
    assert engine.requests == [] and IM_END


def test_a_little_too_long_and_too_many_ids(http: httpx.Client, engine: FakeEngine) -> None:
    for prompt in ("ab" * 400, [5] * 512, [[5], [5] * 512]):
        error = http.post(PATH, json={"model": "fake", "prompt": prompt}).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert engine.requests == []
