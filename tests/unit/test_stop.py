"""Stop strings: the same result for every cut, nothing of a stop string released, nothing held too long."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quickdraft.text.stop import StopScanner
from quickdraft.text.stream import TextStream
from tests.support.byte_tokenizer import IM_END, byte_tokenizer

TOKENIZER = byte_tokenizer()


def expected(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """By definition: the stop string that ends first, of those the longest, cuts the text."""
    hits = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    if not hits:
        return text, None
    end, length, found = min(hits)
    return text[: end + length], found


def scan(pieces: list[str], stop: tuple[str, ...]) -> tuple[str, str | None]:
    scanner = StopScanner(stop)
    released = [scanner.feed(piece)[0] for piece in pieces]
    return "".join([*released, scanner.finish()]), scanner.hit


CASES = [
    ("hello END world", ("END",)),
    ("hello EN", ("END",)),
    ("aaaab", ("aab",)),
    ("abcabcabd rest", ("abcabd",)),
    ("xyz", ("y", "xyz")),
    ("xyz", ("yz", "xyz")),
    ("one two", ("two", "one")),
    ("日本語🎉終わり", ("🎉",)),
    ("no stop here", ()),
    ("\n\n\nUser:", ("\nUser:", "\n\nUser")),
    ("stop", ("stop",)),
    ("aXbXc", ("X",)),
]


@pytest.mark.parametrize(("text", "stop"), CASES)
def test_every_cut_in_two_and_three(text: str, stop: tuple[str, ...]) -> None:
    want = expected(text, stop)
    for i in range(len(text) + 1):
        for j in range(i, len(text) + 1):
            assert scan([text[:i], text[i:j], text[j:]], stop) == want
    assert scan(list(text), stop) == want


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3), st.data())
def test_random_texts_and_cuts(text: str, stop: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[i:j] for i, j in pairwise([0, *cuts, len(text)])]
    assert scan(pieces, tuple(stop)) == expected(text, tuple(stop))


def test_holds_back_exactly_the_longest_possible_beginning() -> None:
    scanner = StopScanner(("END", "EX"))
    assert scanner.feed("say E") == ("say ", False)
    assert scanner.feed("N") == ("", False)
    assert scanner.feed("E") == ("EN", False)
    assert scanner.feed("X") == ("", True)
    assert scanner.feed("more") == ("", True) and scanner.finish() == ""


def test_a_stop_string_that_may_not_stop_yet_is_text() -> None:
    scanner = StopScanner(("END",))
    assert scanner.feed("a END b EN", allow_stop=False) == ("a END b ", False)
    assert scanner.feed("D c") == ("", True)  # begun before, completed after: a stop


def run(ids: list[int], stop: tuple[str, ...] = (), first_allowed: int = 0) -> tuple[str, list[str], bool]:
    stream, takes, hit = TextStream(TOKENIZER, stop), [], False
    for index, token in enumerate(ids):
        hit = stream.push(token, index >= first_allowed)
        takes.append(stream.take())
        if hit:
            break
    stream.finish()
    takes.append(stream.take())
    return "".join(takes), takes, hit


def test_text_stream_joins_bytes_and_stops() -> None:
    ids = TOKENIZER.encode("hello 🎉 world STOP never")
    text, takes, hit = run(ids, ("STOP",))
    assert (text, hit) == ("hello 🎉 world ", True)
    assert not any("�" in take or "S" in take for take in takes)


def test_text_stream_without_a_hit_equals_decode() -> None:
    ids = [*TOKENIZER.encode("hello 🎉 STO"), IM_END, 4 + 0xF0]  # ends inside a character
    text, _, hit = run(ids, ("STOP",))
    assert text == TOKENIZER.decode(ids) == "hello 🎉 STO�" and not hit


def test_text_stream_minimum_tokens_defer_stops() -> None:
    ids = [4 + ord(c) for c in "aXbXc"]
    assert run(ids, ("X",))[0] == "a"
    assert run(ids, ("X",), first_allowed=2)[0] == "aXb"
    assert run(ids, ("X",), first_allowed=4)[0] == "aXbXc"
