"""Tokenizer and Detokenizer on a small vocabulary: exact bytes, control tokens, every cut."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quickdraft.errors import ModelFormatError, RequestError, UnsupportedError
from quickdraft.text.detokenizer import Detokenizer
from quickdraft.text.pretokenizers import KNOWN
from quickdraft.text.tokenizer import Tokenizer
from tests.support.byte_tokenizer import IM_END, IM_START, TOOL_CALL, byte_tokenizer, byte_tokenizer_data

TOKENIZER = byte_tokenizer()
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT)
def test_decode_of_encode_is_the_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(st.integers(0, TOKENIZER.vocabulary_size - 1), max_size=30))
def test_detokenizer_pieces_join_to_the_whole(ids: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(token) for token in ids] + [detokenizer.finish()]
    assert "".join(pieces) == TOKENIZER.decode(ids)


@given(st.binary(max_size=12))
def test_detokenizer_equals_the_whole_for_broken_utf8(raw: bytes) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(4 + byte) for byte in raw] + [detokenizer.finish()]
    assert "".join(pieces) == raw.decode("utf-8", errors="replace")


@given(
    TEXT | st.text("h\u1100\u1161\u11a8\u03a9\u0314\u0342\u0345 helo<tool_call>"),
    st.sampled_from(["smollm", "qwen2"]),
)
def test_fewest_tokens_is_a_lower_bound(text: str, pre_tokenizer: str) -> None:
    tokenizer = Tokenizer(byte_tokenizer_data(pre_tokenizer=pre_tokenizer))
    pieces = list(tokenizer.split_special(text))
    assert tokenizer.fewest_tokens(pieces) <= len(tokenizer.encode_pieces(pieces))


def test_incomplete_characters_are_held_back() -> None:
    ids = [4 + byte for byte in "é🎉".encode()]
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push(token) for token in ids] == ["", "é", "", "", "", "🎉"]
    detokenizer.push(ids[0])
    assert detokenizer.finish() == "�"


def test_merges_and_digits() -> None:
    pieces = [TOKENIZER.token_text(token) for token in TOKENIZER.encode("hello world 12")]
    assert pieces == ["hello", " w", "o", "r", "l", "d", " ", "1", "2"]  # every digit alone: no merge "12"
    gpt2 = Tokenizer(byte_tokenizer_data(pre_tokenizer="gpt2"))
    assert [gpt2.token_text(token) for token in gpt2.encode("a 12")] == ["a", " ", "12"]


def test_control_tokens_in_text_are_text_unless_asked_for() -> None:
    text = "a<|im_end|>b"
    assert IM_END not in TOKENIZER.encode(text)
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    ids = TOKENIZER.encode(text, special=True)
    assert ids == [4 + ord("a"), IM_END, 4 + ord("b")]
    assert TOKENIZER.decode(ids) == "ab"
    assert TOKENIZER.decode(ids, skip_special=False) == text


@pytest.mark.parametrize("word", ["pad", "Ġpad"])
def test_a_word_that_reads_like_a_control_token_is_text_even_where_words_skip_the_merges(word: str) -> None:
    data = byte_tokenizer_data(pre_tokenizer="llama-bpe")
    tokens = tuple(word if token == "<|im_start|>" else token for token in data.tokens)
    ids = Tokenizer(dataclasses.replace(data, tokens=tokens)).encode("pad pad")
    assert IM_START not in ids
    assert TOKENIZER.decode(ids) == "pad pad"


def test_user_defined_tokens_are_always_tokens_and_always_text() -> None:
    ids = TOKENIZER.encode("x<tool_call>y")
    assert ids[1] == TOOL_CALL and TOKENIZER.decode(ids) == "x<tool_call>y"


def test_bos_follows_the_file_and_can_be_overridden() -> None:
    assert TOKENIZER.encode("a") == [4 + ord("a")]
    assert TOKENIZER.encode("a", add_bos=True)[0] == IM_START
    with_bos = Tokenizer(dataclasses.replace(byte_tokenizer_data(), add_bos=True))
    assert with_bos.encode("")[0] == IM_START
    assert with_bos.encode("", add_bos=False) == []


def test_eos_has_no_bytes_even_if_the_file_calls_it_normal() -> None:
    data = byte_tokenizer_data()
    types = (3, 3, 1, *data.token_types[3:])
    assert Tokenizer(dataclasses.replace(data, token_types=types)).token_bytes(IM_END) == b""


def test_lone_surrogate_is_a_request_error() -> None:
    with pytest.raises(RequestError, match=r"U\+D83D at character 1"):
        TOKENIZER.encode("a\ud83d")


def test_unknown_kinds_are_named() -> None:
    data = byte_tokenizer_data()
    with pytest.raises(UnsupportedError, match=r"got 'llama'; expected gpt2"):
        Tokenizer(dataclasses.replace(data, model="llama"))
    with pytest.raises(UnsupportedError, match=r"'klingon'.*qwen2, qwen35, smollm"):
        Tokenizer(dataclasses.replace(data, pre_tokenizer="klingon"))


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_every_known_pre_tokenizer_round_trips(name: str) -> None:
    tokenizer = Tokenizer(byte_tokenizer_data(pre_tokenizer=name))
    text = "I'll  pay\t12345€ — déjà vu\r\n\r\n  日本語 🎉 'S\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "change",
    [
        {"token_types": (1,)},
        {"merges": ("no such",)},
        {"merges": ("unsplit",)},
        {"eos_ids": (10_000,)},
        {"bos_id": -1},
        {"tokens": ("a",) * 268},
    ],
)
def test_contradicting_tables_are_format_errors(change: dict[str, object]) -> None:
    with pytest.raises(ModelFormatError):
        Tokenizer(dataclasses.replace(byte_tokenizer_data(), **change))  # type: ignore[arg-type]
