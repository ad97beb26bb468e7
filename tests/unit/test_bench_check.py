"""Refusal rules: degenerate text, lost tokens and other ids never get a speed."""

from __future__ import annotations

import pytest

from quickdraft.bench.check import Output, distinct_share, refusal
from quickdraft.types import Timings

TEXT = tuple(range(100, 164))
LOOP = (1, 2, 3, 4) * 16


def output(
    ids: tuple[int, ...], steps: int | None = None, accepted: int = 0, error: str | None = None
) -> Output:
    timings = Timings(
        completion_tokens=len(ids),
        steps=len(ids) - accepted if steps is None else steps,
        accepted={"lookup": accepted} if accepted else {},
    )
    return Output(ids, timings, error)


def check(
    one: Output, plain: Output | None = None, expected: tuple[int, ...] | None = None, **more: bool
) -> str | None:
    return refusal([one], [plain or one], [expected], **more)


def test_share_of_distinct_4_grams() -> None:
    assert distinct_share((1, 2, 3)) is None
    assert distinct_share((1, 2, 3, 4)) == 1.0
    assert distinct_share((5,) * 11) == 1 / 8
    assert distinct_share(LOOP) == 4 / 61


def test_good_text_passes_with_and_without_drafts() -> None:
    assert check(output(TEXT)) is None
    assert check(output(TEXT, accepted=50), output(TEXT)) is None


def test_degenerate_text_is_refused() -> None:
    reason = check(output(LOOP))
    assert reason is not None and "degenerate" in reason and "0.07" in reason


@pytest.mark.parametrize(("distinct", "passes"), [(29, False), (30, True)])
def test_the_limit_is_three_tenths(distinct: int, passes: bool) -> None:
    ids = tuple(range(distinct)) + (7777,) * (103 - distinct)  # 100 4-grams; some straddle the edge
    share = distinct_share(ids)
    assert share is not None
    while share > distinct / 100:
        ids = (*ids[1:], 7777)
        share = distinct_share(ids)
        assert share is not None
    assert share == distinct / 100
    assert (check(output(ids)) is None) is passes


def test_stated_ids_replace_the_share_and_must_be_met() -> None:
    assert check(output(LOOP), expected=LOOP) is None
    assert check(output(LOOP), expected=(*LOOP, 9)) is None  # the output may be shorter than what is stated
    wrong = (*LOOP[:10], 99, *LOOP[11:])
    assert check(output(wrong), expected=LOOP) == "token 10 is 99, not 3 as in the stated ids"
    assert "the end" in str(check(output((*LOOP, 9)), expected=LOOP))


def test_counts_must_add_up() -> None:
    assert "!=" in str(check(output(TEXT, steps=63)))
    assert "!=" in str(check(output(TEXT, steps=64, accepted=1)))
    lost = Output(TEXT[:-1], output(TEXT).timings)
    assert "63 ids" in str(check(lost))


def test_ids_must_be_those_of_plain_decoding() -> None:
    wrong = (*TEXT[:5], 0, *TEXT[6:])
    assert "token 5 is 0" in str(check(output(wrong), output(TEXT)))
    assert "plain decoding gave 64" in str(check(output(TEXT[:60]), output(TEXT)))


def test_a_failed_request_is_refused() -> None:
    assert "NaN" in str(check(output(TEXT, error="NaN logits")))


def test_random_ids_are_not_checked_for_repetition_but_for_everything_else() -> None:
    assert check(output(LOOP), is_text=False) is None
    assert "!=" in str(check(output(LOOP, steps=1), is_text=False))


def test_short_answers_pass_beside_longer_ones_but_not_alone() -> None:
    short, long = output((5, 2)), output(TEXT)
    assert refusal([short, long], [short, long], [None, None]) is None
    assert "too short" in str(refusal([short, short], [short, short], [None, None]))


def test_one_bad_prompt_of_many_is_named() -> None:
    good, bad = output(TEXT), output(LOOP)
    assert str(refusal([good, bad], [good, bad], [None, None])).startswith("prompt 2: degenerate")
