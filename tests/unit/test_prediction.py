"""Suffix order equals its naive definition; a prediction is followed, left and found again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from quickdraft.speculate.prediction import NEAR, Alignment, PredictionDrafter
from quickdraft.speculate.suffix_order import (
    LONGEST_MATCH,
    SEPARATOR,
    SuffixOrder,
    backwards,
    sorted_positions,
)


def order_of(text: list[int]) -> SuffixOrder:
    data = backwards(text)
    return SuffixOrder(data, len(text), sorted_positions(data))


def naive(text: list[int], tokens: list[int]) -> tuple[int, set[int]]:
    """The longest match, and all positions that have it."""
    lengths = {}
    for position in range(1, len(text)):
        if SEPARATOR not in (text[position], text[position - 1]):
            pairs = zip(reversed(text[:position]), reversed(tokens[-LONGEST_MATCH:]), strict=False)
            same = [one == other for one, other in pairs]
            lengths[position] = same.index(False) if False in same else len(same)
    best = max(lengths.values(), default=0)
    return best, {position for position, length in lengths.items() if length == best} if best else set()


def test_the_order_finds_what_the_naive_search_finds() -> None:
    source, matched = random.Random(2), 0
    for _ in range(600):
        letters = source.choice([2, 3, 40])
        text = [source.randrange(letters) for _ in range(source.randrange(0, 120))]
        text = [SEPARATOR if source.random() < 0.05 else token for token in text]
        if source.random() < 0.3:
            text = text[:5] * 20
        tokens = [source.randrange(letters) for _ in range(source.randrange(1, 6))]
        tokens = text[: source.randrange(len(text) + 1)] * source.randrange(2) + tokens
        tokens = [token for token in tokens if token != SEPARATOR] or [1]
        length, position = order_of(text).find(tokens)
        expected, positions = naive(text, tokens)
        assert length == expected, (text, tokens)
        if expected:
            matched += 1
            assert position in positions
            assert set(order_of(text).all_of(tokens[-length:]).tolist()) == positions
            assert text[position] == order_of(text).following(position, 1)[0]
        else:
            assert position == 0
    assert matched > 300


def test_what_follows_ends_with_its_text() -> None:
    order = order_of([1, 2, 3, SEPARATOR, 4, 5])
    assert order.following(1, 9) == (2, 3)
    assert order.following(1, 1) == (2,)
    assert order.following(5, 9) == (5,)


PREDICTION = list(range(100, 300))


@pytest.mark.parametrize(
    ("answer", "following"),
    [
        ([], 100),  # from the first token on
        (PREDICTION[:50], 150),
        ([*PREDICTION[:50], 7], None),  # a word of its own
        ([*PREDICTION[:50], 7, 151], 152),  # that stood for the predicted one
        ([*PREDICTION[:50], 7, 8, 9, 150], 151),  # that was put in
        ([*PREDICTION[:50], 160], 161),  # what lay between was left out
        ([*PREDICTION[:50], 150 + NEAR + 9], None),  # one token far ahead is an accident,
        ([*PREDICTION[:50], 240, 241, 242], 243),  # three are none
        ([*PREDICTION[:50], 110], None),  # and so it is with what was said before
        ([*PREDICTION[:50], 110, 111, 112], 113),
        ([1, 2, 3, *PREDICTION[:4]], 104),  # an answer that begins otherwise
        ([1, 2, 3], None),
        (PREDICTION, None),  # said to its end
        ([*PREDICTION, 5], None),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_an_answer_is_followed(answer: list[int], following: int | None, at_once: bool) -> None:
    alignment = Alignment(PREDICTION)
    for piece in [answer] if at_once else [[token] for token in answer]:
        alignment.extend(piece)
    assert alignment.continuation(1) == (() if following is None else (following,))


def test_of_equal_places_the_nearest_ahead_is_taken() -> None:
    lines = [[1, 2, 3, 40 + number] for number in range(5)]
    alignment = Alignment([token for line in lines for token in line])
    alignment.extend([*lines[0], *lines[1], 1, 2, 3])
    assert alignment.continuation(2) == (42, 1) and alignment.match_length > 11
    alignment.extend([99, 1, 2, 3])  # the third line ended otherwise
    assert alignment.continuation(1) == (43,) and alignment.match_length == 3
    alignment.extend([44])  # it was the fifth's end that came: the last line is over
    assert alignment.continuation(1) == ()


@pytest.mark.parametrize("size", [0, 1, 2])
def test_tiny_predictions(size: int) -> None:
    alignment = Alignment([5] * size)
    assert alignment.continuation(9) == (5,) * size
    alignment.extend([6, 5])
    assert alignment.continuation(9) == (5,) * max(0, size - 1)


@dataclass
class View:
    request_id: str
    prediction: list[int]
    tokens: list[int] = field(default_factory=lambda: [100, 101])
    prompt_length: int = 2


def test_requests_follow_their_own_predictions() -> None:
    drafter = PredictionDrafter()
    one, two, none = View("one", [100, 3, 4, 5]), View("two", [7, 8, 9]), View("none", [])
    assert drafter.propose(one, 2).tokens == (100, 3)  # the prompt is no part of the answer
    assert drafter.propose(two, 9).tokens == (7, 8, 9)
    assert not drafter.propose(none, 9).tokens
    assert not drafter.propose(one, 0).tokens
    one.tokens = [*one.tokens, 100, 3]
    assert drafter.propose(one, 9).tokens == (4, 5)
    drafter.forget("one")
    drafter.forget("none")
    assert drafter.propose(two, 1).tokens == (7,)
    assert set(drafter._alignments) == {"two"}
