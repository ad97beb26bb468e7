"""Counts per source: a request's timings and the global numbers move together; the window forgets."""

from __future__ import annotations

from collections import Counter

from quickdraft.speculate.draft import TARGET, Verdict, token_sources
from quickdraft.speculate.stats import WINDOW_DRAFTS, SourceStats, SpeculationStats
from quickdraft.types import FinishReason, Timings


def test_one_record_counts_in_both_places() -> None:
    stats, one, two = SpeculationStats(), Timings(), Timings()
    stats.record(one, "lookup", Verdict((1, 2, 3), drafted=5))
    stats.record(one, "", Verdict((4,), drafted=0))
    stats.record(two, "lookup", Verdict((1,), drafted=2))
    stats.record(two, "mtp", Verdict((1, 2), drafted=1, finish=FinishReason.STOP))
    assert (one.steps, one.rows, one.completion_tokens) == (2, 7, 4)
    assert (one.drafted, one.accepted) == ({"lookup": 5}, {"lookup": 2})
    assert (two.drafted, two.accepted) == ({"lookup": 2, "mtp": 1}, {"lookup": 0, "mtp": 1})
    for timings in (one, two):
        assert timings.steps + sum(timings.accepted.values()) == timings.completion_tokens
    assert stats.to_dict() == {
        "steps": 4,
        "rows": 12,
        "tokens": 7,
        "sources": {
            "lookup": {"drafts": 2, "drafted": 7, "accepted": 2, "recent_acceptance": 2 / 7},
            "mtp": {"drafts": 1, "drafted": 1, "accepted": 1, "recent_acceptance": 1.0},
        },
    }


def test_a_fused_draft_counts_for_the_model_and_then_for_lookup() -> None:
    stats, timings = SpeculationStats(), Timings()
    stats.record(timings, "dflash2", Verdict((1, 2, 3), drafted=5), extended=2)
    stats.record(timings, "dflash2", Verdict((1, 2, 3, 4, 5), drafted=5), extended=2)
    assert timings.drafted == {"dflash2": 6, "lookup": 4}
    assert timings.accepted == {"dflash2": 5, "lookup": 1}
    assert timings.steps + sum(timings.accepted.values()) == timings.completion_tokens


def test_the_source_of_each_token_is_the_one_that_it_counts_for() -> None:
    for drafted, extended in ((0, 0), (5, 0), (5, 2), (5, 5)):
        for emitted in range(drafted + 2):
            verdict, timings = Verdict(tuple(range(emitted)), drafted), Timings()
            SpeculationStats().record(timings, "mtp", verdict, extended, "corpus")
            sources = token_sources(verdict, "mtp", extended, "corpus")
            counted = {name: count for name, count in timings.accepted.items() if count}
            assert Counter(sources) == {**({TARGET: 1} if emitted else {}), **counted}
            assert list(sources) == sorted(sources, key=("mtp", "corpus", TARGET).index)


def test_a_block_whose_first_row_failed_is_no_step() -> None:
    stats, timings = SpeculationStats(), Timings()
    stats.record(timings, "lookup", Verdict((), drafted=4, finish=FinishReason.ERROR))
    assert (timings.steps, timings.rows, timings.drafted, stats.steps, stats.sources) == (0, 0, {}, 0, {})


def test_the_window_shows_a_collapse_the_lifetime_average_hides() -> None:
    source = SourceStats()
    assert source.recent_acceptance is None
    for _ in range(4 * WINDOW_DRAFTS):
        source.record(10, 10)
    for _ in range(WINDOW_DRAFTS):
        source.record(10, 0)
    assert source.recent_acceptance == 0.0
    assert source.accepted / source.drafted == 0.8
