"""What `auto` may lose on chat, where drafts hardly pay: on any curve, and where it believes a wrong one.

Counted on the recorded chat traces: rows, passes of models and following, by a curve's times.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from quickdraft.bench.curves import SHIPPED, Curve, open_curve
from quickdraft.bench.hindsight import Static, known, run_static
from quickdraft.bench.replay import Engine, replay
from quickdraft.bench.traces import Trace, TracedWorkload, shipped_traces
from quickdraft.speculate.costs import Costs
from quickdraft.speculate.decide import CONTEXT_INCOME, CONTEXT_START, MODEL_INCOME, MODEL_START
from quickdraft.speculate.online_costs import OnlineCosts
from quickdraft.speculate.promise import auto_models

INCOME, START = CONTEXT_INCOME + MODEL_INCOME, CONTEXT_START + MODEL_START
MOST = 1.03  # of plain decoding's time
TRACES = shipped_traces()
(CHAT,) = (work for work in TRACES.workloads if work.name == "chat")
BOTH = tuple(TRACES.longest)


def hopeless(trace: Trace) -> Trace:
    """The same answer, by models that are always wrong."""
    never = 1 + max(trace.output)
    drafts = {
        source: tuple(replace(one, tokens=(never,) * len(one.tokens)) for one in of)
        for source, of in trace.drafts.items()
    }
    return replace(trace, drafts=drafts)


HOPELESS = TracedWorkload("hopeless", tuple(map(hopeless, CHAT.traces)))


def machine(two_rows: float, one_pass: float, follow: float = 0.005) -> Curve:
    """The recorded CPU, with steps of two rows, passes and following of these costs in plain steps; a block
    of 8 rows takes three of `mtp`'s passes."""
    curve = open_curve(SHIPPED, lambda: pytest.fail("not measured"))
    one = curve.times.seconds[0][0]
    lines = tuple(
        (line[0], two_rows * line[0], *(max(two_rows * line[0], seconds) for seconds in line[2:]))
        for line in curve.times.seconds
    )
    blocks = {most: one * one_pass * part for most, part in ((3, 1.4), (5, 2.1), (7, 3.0))}
    times = replace(
        curve.times, seconds=lines, passes={"mtp": one * one_pass, "dflash2": blocks[7]},
        upkeep=dict.fromkeys(BOTH, follow * one), blocks={"dflash2": blocks},
    )  # fmt: skip
    return Curve("machine", times)


def lost(
    true: Curve, models: tuple[str, ...], believed: Costs | None = None, work: TracedWorkload = CHAT
) -> tuple[float, float, float]:
    """Time of `auto` over plain decoding's, of all sequences one after the other; plain steps that the worst
    of them lost beyond INCOME; and rows per step."""
    spent = plain = worst = 0.0
    steps = rows = 0
    for trace in work.traces:
        one = TracedWorkload("one", (trace,))
        found = replay(
            one,
            true,
            lambda: Engine(true, TRACES.longest, models, shipped=TRACES.shipped, believed=believed),
        )
        alone = run_static([known(trace)], true, Static())
        spent, plain = spent + found.seconds, plain + alone.seconds
        over = found.seconds - alone.seconds * (1 + INCOME)
        worst = max(worst, over * alone.tokens / alone.seconds)
        steps, rows = steps + found.steps, rows + found.rows
    return spent / plain, worst, rows / steps


@pytest.mark.parametrize("two_rows", [1.0, 1.1, 1.2, 1.3, 1.5])
@pytest.mark.parametrize("one_pass", [0.05, 0.15, 0.3])
def test_chat_is_never_slower_than_plain_decoding_by_more_than_the_credit(
    two_rows: float, one_pass: float
) -> None:
    true = machine(two_rows, one_pass)
    share, worst, rows = lost(true, auto_models(TRACES.longest, TRACES.held_out, true.costs))
    assert share <= MOST and worst <= START and rows > 1.0
    share, worst, rows = lost(true, BOTH, work=HOPELESS)
    assert worst <= START, "a short answer may lose what every request may at first, and no more"
    assert rows > 1.0, "something was tried"


@pytest.mark.parametrize("two_rows", [1.1, 1.3, 1.5, 2.0])
def test_a_curve_that_is_wrong_is_corrected_before_much_is_lost(two_rows: float) -> None:
    """Rows believed to be free, passes at a third of what they take: a server that goes by this and times its
    steps. What it loses while it learns is bounded, and the second time the same texts lose nothing."""
    true, wrong = machine(two_rows, 0.3), machine(1.0, 0.1)
    costs = OnlineCosts(wrong.costs)
    first, _, rows_before = lost(true, ("mtp",), costs)
    second, _, rows_after = lost(true, ("mtp",), costs)
    frozen, _, _ = lost(true, ("mtp",), OnlineCosts(wrong.costs, frozen=True))
    assert first <= MOST + max(0.0, 0.1 * (two_rows - 1.5)), "dearer than any machine seen: 8 %"
    assert second <= MOST and second <= first + 0.01 and rows_after <= rows_before + 0.05
    if two_rows >= 1.3:
        assert second < frozen - 0.01, "it is the correction that does it"
        assert costs.step_cost(2, 100) > 1.0 + 0.4 * (two_rows - 1.0)
