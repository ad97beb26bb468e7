"""No draft changes an answer that is held to a form, all such answers obey it, and what must come is drafted.

On a tiny model whose every token is likely at some time, with tokens that lie across what grammars tell
apart; and a few on the real one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from quickdraft.engine.llm import LLM, output_of
from quickdraft.engine.opened import Opened
from quickdraft.engine.request import Request
from quickdraft.speculate.constraint import FORCED
from quickdraft.speculate.forced import ForcedDrafter
from quickdraft.speculate.lookup import LookupDrafter
from quickdraft.types import FinishReason, SamplingParams, Speculation
from tests.support.constraints import KINDS, SCHEMA, Asked, check_obeys
from tests.support.drafting import RandomDrafting
from tests.support.model import default_model_path
from tests.support.thinking_opened import open_thinker
from tests.support.toy import RandomDrafter

OFF, AUTO = Speculation(), Speculation(auto=True)
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=150),
    "sampled": SamplingParams(temperature=1.0, seed=5, max_tokens=150),
    "cut": SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=6, max_tokens=150),
    "penalised": SamplingParams(
        temperature=0.7, seed=7, max_tokens=150, repetition_penalty=1.2, presence_penalty=0.5,
        logit_bias={40: 2.0}, logprobs=1,
    ),
}  # fmt: skip
FORMS = ("qwen3_coder", "hermes", "json")
CASES = [
    (kind, form) for kind, options in KINDS.items() for form in (FORMS if "tools" in options else FORMS[:1])
]
Answer = tuple[tuple[int, ...], str, str]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    opened = open_thinker(tmp_path_factory.mktemp("thinker"), max_sequences=12, chunk_rows=48)
    yield opened
    opened.close()


def answers(opened: Opened, requests: list[Request]) -> dict[str, Answer]:
    """Ids, text and end of each, all in one batch."""
    texts = {request.request_id: "" for request in requests}
    for request in requests:
        opened.engine.add(request)
    while opened.engine.has_work:
        for event in opened.engine.step():
            texts[event.request.request_id] += output_of(event).text
    assert all(request.error is None for request in requests), [request.error for request in requests]
    return {r.request_id: (tuple(r.output_ids), texts[r.request_id], str(r.finish)) for r in requests}


def request_of(
    opened: Opened, asked: Asked, name: str, params: SamplingParams, drafts: Speculation
) -> Request:
    params = dataclasses.replace(params, speculation=drafts)
    return opened.request(name, asked.ids, params, constraint=asked.constraint)


@pytest.fixture(scope="module", params=SETTINGS)
def truth(request: Any, opened: Opened) -> tuple[SamplingParams, dict[str, Asked], dict[str, Answer]]:
    """What every case answers alone, one token per step."""
    params = SETTINGS[request.param]
    asked = {f"{kind} {form}": Asked(opened, KINDS[kind], form) for kind, form in CASES}
    plain: dict[str, Answer] = {}
    for name, one in asked.items():
        made = request_of(opened, one, name, params, OFF)
        plain |= answers(opened, [made])
        assert made.timings.rows == made.timings.steps == made.timings.completion_tokens
    return params, asked, plain


def test_every_answer_obeys(truth: Any) -> None:
    _, asked, plain = truth
    ended = set()
    for name, (_, text, finish) in plain.items():
        kind = name.rpartition(" ")[0]
        reasoning, content, calls = asked[name].parts(text)
        assert len(reasoning) <= 4 * KINDS[kind]["thinking_budget"]
        if finish == FinishReason.STOP:
            check_obeys(kind, content, calls)
            ended.add(kind)
    assert {"schema", "regex", "choice", "named", "required"} <= ended


@pytest.mark.parametrize("batch", [False, True], ids=["alone", "batch"])
@pytest.mark.parametrize("drafts", ["off", "auto", "random"])
def test_no_draft_and_no_neighbour_changes_an_answer(
    opened: Opened, truth: Any, drafts: str, batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, asked, plain = truth
    if drafts == "random":
        scripted = RandomDrafter({name: list(ids) for name, (ids, _, _) in plain.items()}, 0, 0, seed=4)
        drafting = RandomDrafting([LookupDrafter(), ForcedDrafter(), scripted], seed=2)
        monkeypatch.setattr(opened.engine, "drafting", drafting)
    speculation = OFF if drafts == "off" else AUTO
    requests = [request_of(opened, one, name, params, speculation) for name, one in asked.items()]
    if batch:
        assert answers(opened, requests) == plain
    else:
        for request in requests:
            assert answers(opened, [request]) == {request.request_id: plain[request.request_id]}
    for request in requests:
        timings = request.timings
        assert timings.steps + sum(timings.accepted.values()) == timings.completion_tokens
        assert timings.drafted.get(FORCED, 0) == timings.accepted.get(FORCED, 0), "what must come, came"
    if drafts != "off":
        schema = next(r for r in requests if r.request_id.startswith("schema "))
        assert schema.timings.accepted[FORCED] > 30
        assert schema.timings.steps < schema.timings.completion_tokens / 2 or drafts == "random"


@pytest.mark.parametrize("budget", [0, 1, 2, 9, 40])
@pytest.mark.parametrize("drafts", [OFF, AUTO], ids=str)
def test_thinking_ends_at_the_token(opened: Opened, budget: int, drafts: Speculation) -> None:
    """Also inside a long accepted draft: the free answer repeats itself, so lookup drafts beyond the end."""
    assert opened.tokenizer is not None
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    free = Asked(opened, {})
    ((ids, _, _),) = answers(opened, [request_of(opened, free, "free", params, OFF)]).values()
    asked = Asked(opened, {"thinking_budget": budget})
    request = request_of(opened, asked, "bound", params, drafts)
    ((bound, _, _),) = answers(opened, [request]).values()
    closing = tuple(opened.tokenizer.encode("\n</think>\n\n", special=True))
    assert bound[: budget + len(closing)] == ids[:budget] + closing
    # Where an accepted run reaches the limit, the row behind it gives the first closing token itself.
    assert request.timings.accepted.get(FORCED, 0) in (
        (0,) if drafts.off else (len(closing) - 1, len(closing))
    )


def test_a_model_that_ends_its_thinking_in_time_is_left_alone(opened: Opened) -> None:
    """The budget does not close twice, and counts neither the opening nor the closing of a block."""
    assert opened.tokenizer is not None
    asked = Asked(opened, {"thinking_budget": 3})
    assert asked.constraint is not None
    for text, forced in (("ab</think>", 0), ("abc", 4), ("ab", 0), ("</think>abcdef", 0)):
        matcher = asked.constraint.start()
        for token in opened.tokenizer.encode(text, special=True):
            assert matcher.allows(token)
            matcher.push(token)
        assert len(matcher.forced(64)) == forced, text


@pytest.mark.model
def test_the_real_model() -> None:
    llm = LLM(default_model_path(), kv_memory_bytes=1 << 24)
    prompt = llm.chat_prompt([{"role": "user", "content": "Describe the place."}])
    grammar = llm.grammars.compile("json_schema", json.dumps(SCHEMA), "schema")
    for setting in ("greedy", "cut"):
        plain, auto = (
            llm.generate(
                prompt, dataclasses.replace(SETTINGS[setting], speculation=drafts), constraint=grammar
            )
            for drafts in (OFF, AUTO)
        )
        assert plain.ids == auto.ids and plain.finish_reason == FinishReason.STOP
        jsonschema.validate(json.loads(auto.text or ""), SCHEMA)
        assert auto.timings.accepted[FORCED] == auto.timings.drafted[FORCED] > 10
        assert auto.timings.steps < 0.7 * plain.timings.steps
    llm.close()
