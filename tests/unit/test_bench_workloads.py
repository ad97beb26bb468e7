"""Workloads are well formed without a model: names, order, data, limits, errors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quickdraft.bench.stages import STAIRCASE, parse_stages
from quickdraft.bench.workloads import (
    RANDOM,
    Chat,
    Copy,
    Encoding,
    Workload,
    all_workloads,
    named,
    prompt_ids,
)
from quickdraft.errors import BadParameter, ConfigError, ContextTooLong, UnsupportedError

WORKLOADS = {workload.name: workload for workload in all_workloads()}
NAMES = ["copy", "extract", "code-edit", "rag", "summary", "chat"]
BYTES = Encoding(
    256,
    30_000,
    encode=lambda text: list(text.encode()),
    chat_ids=lambda messages: list("".join(message["content"] for message in messages).encode()),
)


def test_names_and_order() -> None:
    assert list(WORKLOADS) == NAMES
    assert [w.name for w in named(None, has_tokenizer=True)] == NAMES
    assert [w.name for w in named(["chat", "copy", "chat"], has_tokenizer=True)] == ["copy", "chat"]
    assert named(None, has_tokenizer=False) == [RANDOM]


@pytest.mark.parametrize(
    ("names", "has_tokenizer"), [(["copy", "haiku"], True), (["random"], True), (["copy"], False)]
)
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(names: list[str], has_tokenizer: bool) -> None:
    with pytest.raises(ConfigError, match="no such workload") as error:
        named(names, has_tokenizer=has_tokenizer)
    assert ("code-edit" if has_tokenizer else "random") in str(error.value)


@pytest.mark.parametrize("name", NAMES[1:])
def test_chats_end_with_the_user_and_alternate(name: str) -> None:
    for prompt in WORKLOADS[name].prompts:
        assert isinstance(prompt, Chat)
        roles = [message["role"] for message in prompt.messages]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"]
        assert all(message["content"].strip() for message in prompt.messages)


def test_prompts_differ_and_chat_has_eight() -> None:
    assert len(WORKLOADS["chat"].prompts) == 8
    prompts = [prompt for workload in WORKLOADS.values() for prompt in workload.prompts]
    assert len({repr(prompt) for prompt in prompts}) == len(prompts)


def test_texts_hold_what_is_asked_for() -> None:
    last = [
        str(WORKLOADS[name].prompts[0].messages[-1]["content"]) for name in ("extract", "code-edit", "rag")
    ]  # type: ignore[union-attr]
    assert '"email"' in last[0]
    assert "Rename `unpaid` to `open_orders`" in last[1] and "def unpaid(orders)" in last[1]
    assert "Sorrel Bridge" in last[2] and last[2].endswith("Question: Why was the line closed?")


def test_copy_is_the_document_three_times_its_beginning_and_then_its_own_next_ids() -> None:
    copy = WORKLOADS["copy"].prompts[0]
    assert isinstance(copy, Copy)
    document = copy.document.encode()
    (prompt,) = prompt_ids(WORKLOADS["copy"], BYTES)
    assert bytes(prompt.ids) == document * 3 + document[:200]
    assert prompt.expected is not None and bytes(prompt.expected) == document[200:712]
    assert prompt.max_tokens == 512


def test_copy_never_decodes_beyond_what_is_stated() -> None:
    short = Workload("copy", (Copy("x" * 250),), 512)
    (prompt,) = prompt_ids(short, BYTES)
    assert prompt.max_tokens == 50 == len(prompt.expected or ())
    (prompt,) = prompt_ids(short, BYTES, max_tokens=20)
    assert prompt.max_tokens == 20 == len(prompt.expected or ())


def test_max_tokens_replaces_the_limit_and_everything_must_fit() -> None:
    assert {p.max_tokens for p in prompt_ids(WORKLOADS["chat"], BYTES)} == {256}
    assert {p.max_tokens for p in prompt_ids(WORKLOADS["chat"], BYTES, 64)} == {64}
    with pytest.raises(ContextTooLong):
        prompt_ids(WORKLOADS["copy"], replace(BYTES, max_context_tokens=2000))


def test_a_file_without_tokenizer_or_template_says_so() -> None:
    bare = replace(BYTES, encode=None, chat_ids=None)
    with pytest.raises(ConfigError, match="'copy' needs a tokenizer"):
        prompt_ids(WORKLOADS["copy"], bare)
    with pytest.raises(ConfigError, match="'rag' needs a chat template"):
        prompt_ids(WORKLOADS["rag"], bare)


def test_random_ids_are_seeded_and_in_range() -> None:
    first, again = (prompt_ids(RANDOM, replace(BYTES, encode=None)) for _ in range(2))
    assert first == again and first[0].expected is None
    assert len(first[0].ids) == 256 and 0 <= min(first[0].ids) <= max(first[0].ids) < 256
    assert len(set(first[0].ids)) > 100
    small = prompt_ids(RANDOM, Encoding(256, 160))[0]
    assert len(small.ids) + small.max_tokens == 160
    assert not RANDOM.is_text and all(workload.is_text for workload in WORKLOADS.values())


def test_stages_begin_with_off_and_come_once() -> None:
    assert [str(s) for s in parse_stages(None, ["lookup"])] == ["off", "lookup@16"]
    assert [str(s) for s in parse_stages(None, ["lookup", "mtp"])] == ["off", "lookup@16", "mtp"]
    assert tuple(str(s) for s in parse_stages(None, ["lookup", "mtp", "dflash2"])) == STAIRCASE
    assert [str(s) for s in parse_stages(["lookup@16", "off", "lookup@16"], ["lookup"])] == [
        "off",
        "lookup@16",
    ]
    assert [str(s) for s in parse_stages(["auto"], ["lookup"])] == ["off", "auto"]


def test_stages_that_cannot_run_are_errors() -> None:
    with pytest.raises(UnsupportedError, match=r"'mtp'.*got 'mtp\+lookup@8'"):
        parse_stages(["off", "mtp+lookup@8"], ["lookup"])
    with pytest.raises(BadParameter, match="speculation"):
        parse_stages(["fast"], ["lookup"])
