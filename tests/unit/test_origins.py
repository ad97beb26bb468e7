"""TokenOrigins: released text cut at tokens, whatever was held back, cut off or never completed."""

from __future__ import annotations

import pytest

from quickdraft.text.origins import Origin, TokenOrigins
from quickdraft.text.stream import TextStream
from tests.support.byte_tokenizer import IM_END, byte_tokenizer

TOKENIZER = byte_tokenizer()
CASES = [
    ("hello wörld 🎉!", (), []),
    ("日本語🎉終わり", ("🎉",), []),
    ("hello hello END of it", ("END",), []),
    ("hello EN", ("END",), []),
    ("ab", (), [IM_END, *TOKENIZER.encode("c")]),
    ("", (), [TOKENIZER.encode("é")[0]]),
    ("ab", (), [TOKENIZER.encode("é")[0]]),
    ("hello", ("hello",), []),
]


def follow(tokens: list[int], stop: tuple[str, ...], step: int) -> tuple[str, list[list[Origin]], list[str]]:
    """What an answer of these tokens, `step` at a time, gives; the source of a token is its number."""
    stream, origins = TextStream(TOKENIZER, stop), TokenOrigins(TOKENIZER)
    texts, found, hit = [], [], False
    for start in range(0, len(tokens), step):
        part = []
        for token in tokens[start : start + step]:
            part.append(token)
            hit = stream.push(token, allow_stop=True)
            if hit:
                break
        if hit or start + step >= len(tokens):
            stream.finish()
        text = stream.take()
        sources = [str(start + i) for i in range(len(part))]
        found.append(origins.feed(part, sources, text))
        texts.append(text)
        if hit:
            break
    return "".join(texts), found, texts


@pytest.mark.parametrize(("text", "stop", "more"), CASES)
def test_texts_join_to_what_was_released_and_keep_their_token(
    text: str, stop: tuple[str, ...], more: list[int]
) -> None:
    tokens = [*TOKENIZER.encode(text), *more]
    whole, alone, _ = follow(tokens, stop, 1)
    for step in (1, 2, 3, len(tokens)):
        again, found, texts = follow(tokens, stop, step)
        assert again == whole
        assert ["".join(one.text for one in part) for part in found] == texts
        by_token = [{one.source: one.text} for part in found for one in part]
        assert joined(by_token) == joined([{one.source: one.text} for part in alone for one in part])


def joined(parts: list[dict[str, str]]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for part in parts:
        for source, text in part.items():
            texts[source] = texts.get(source, "") + text
    return texts


def test_a_character_belongs_to_the_token_that_completes_it_and_held_text_to_its_own() -> None:
    pieces = ["a", *"é".encode()]
    tokens = [TOKENIZER.encode("a")[0], *TOKENIZER.encode("é")]
    assert len(tokens) == len(pieces), "é is two tokens here"
    origins = TokenOrigins(TOKENIZER)
    assert origins.feed(tokens[:2], ["lookup", "lookup"], "a") == [Origin("a", "lookup")]
    assert origins.feed(tokens[2:], ["model"], "é") == [Origin("é", "model")]
    held = TokenOrigins(TOKENIZER)
    assert held.feed(TOKENIZER.encode("EN"), ["mtp", "mtp"], "") == []
    assert held.feed(TOKENIZER.encode("x"), ["model"], "ENx") == [
        Origin("E", "mtp"), Origin("N", "mtp"), Origin("x", "model")
    ]  # fmt: skip
