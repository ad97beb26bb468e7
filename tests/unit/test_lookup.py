"""Context lookup equals its naive definition, continues periods, and is per request."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from quickdraft.speculate.lookup import MAX_MATCH, MIN_MATCH, LookupDrafter, LookupIndex


def naive(tokens: list[int], count: int) -> tuple[int, ...]:
    """For lengths 12 down to 3: the most recent earlier occurrence of the suffix; its continuation."""
    for length in range(min(MAX_MATCH, len(tokens) - 1), MIN_MATCH - 1, -1):
        suffix = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == suffix:
                text = list(tokens)
                for _ in range(count):  # text grows by what is proposed, so periods go on
                    text.append(text[start + length + len(text) - len(tokens)])
                return tuple(text[len(tokens) :])
    return ()


def fast(index: LookupIndex, count: int) -> tuple[int, ...]:
    length, start = index.find()
    return index.continuation(start, count) if length else ()


def cases() -> list[list[int]]:
    source = random.Random(1)
    result: list[list[int]] = []
    for number in range(1000):
        size = source.randrange(0, 120)
        letters = source.choice([2, 3, 5, 40])
        tokens = [source.randrange(letters) for _ in range(size)]
        if number % 4 == 0:  # periodic, with a random start
            period = source.choice([1, 2, 3, 7])
            word = [source.randrange(letters) for _ in range(period)]
            tokens = tokens[: source.randrange(20)] + (word * 40)[: source.randrange(1, 80)]
        result.append(tokens)
    return result


def test_equal_to_the_naive_version() -> None:
    matched = 0
    for tokens in cases():
        index = LookupIndex()
        index.extend(tokens)
        assert fast(index, 17) == naive(tokens, 17), tokens
        matched += bool(naive(tokens, 17))
    assert matched > 300


def test_token_by_token_equals_all_at_once() -> None:
    for tokens in cases()[:200]:
        grown, whole = LookupIndex(), LookupIndex()
        for token in tokens:
            grown.extend([token])
        whole.extend(tokens)
        assert grown.find() == whole.find()


def test_periods_go_on() -> None:
    index = LookupIndex()
    index.extend([9, 1, 2, 3, 1, 2, 3, 1, 2, 3])
    assert fast(index, 7) == (1, 2, 3, 1, 2, 3, 1)


def test_an_index_does_constant_work_per_token() -> None:
    index = LookupIndex()
    index.extend(list(range(25_000)))
    entries = sum(len(ends) for _, ends in index._ends)
    assert entries <= 25_000 * (MAX_MATCH - MIN_MATCH + 1)
    index.extend([1, 2, 3])
    assert index.find() == (3, 4)


@dataclass
class View:
    request_id: str
    tokens: list[int] = field(default_factory=list)
    prompt_length: int = 0


def test_requests_do_not_see_each_other() -> None:
    drafter = LookupDrafter()
    one, two = View("one", [1, 2, 3, 4, 5, 1, 2, 3]), View("two", [1, 2, 3])
    assert drafter.propose(two, 4).tokens == ()
    assert drafter.propose(one, 4).tokens == (4, 5, 1, 2)
    assert drafter.propose(two, 4).tokens == ()
    drafter.forget("one")
    one.tokens = [7, 7]
    assert drafter.propose(one, 4).tokens == ()
