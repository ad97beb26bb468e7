"""The simulator: traces, replay and hindsight on scripted traces whose answers are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quickdraft.bench.curves import Curve, at_context, open_curve, parse_times
from quickdraft.bench.hindsight import (
    OraclePolicy,
    Static,
    StaticPolicy,
    known,
    run_oracle,
    run_static,
    statics,
)
from quickdraft.bench.judge_traces import without
from quickdraft.bench.policy import simulate
from quickdraft.bench.replay import Engine, replay
from quickdraft.bench.traces import (
    Trace,
    TracedWorkload,
    TraceSet,
    dump_traces,
    parse_traces,
    shipped_traces,
)
from quickdraft.errors import ConfigError
from quickdraft.speculate.cost_curve import StepTimes
from quickdraft.speculate.decide import CONTEXT_INCOME, CONTEXT_START, MODEL_INCOME, MODEL_START
from quickdraft.speculate.draft import Draft

INCOME, START = CONTEXT_INCOME + MODEL_INCOME, CONTEXT_START + MODEL_START
NEAR = 0.95  # of the best static setting in hindsight
ROWS = tuple(range(1, 65))


def line_curve(per_row: float, plain: float = 1.0, passes: dict[str, float] | None = None) -> Curve:
    """Every step of r rows takes plain + per_row * (r - 1) seconds at any context."""
    seconds = tuple(plain + per_row * (rows - 1) for rows in ROWS)
    return Curve("line", StepTimes(ROWS, (0,), (seconds,), passes or {}))


def scripted(right: int, drafted: int, tokens: int, source: str = "dflash2", name: str = "one") -> Trace:
    """Ids that never repeat, so lookup finds nothing; a model gets `right` of `drafted` tokens right."""
    output = tuple(range(1000, 1000 + tokens))
    drafts = tuple(
        Draft((*output[at : at + right][:drafted], *([7] * (drafted - len(output[at : at + right])))), source)
        for at in range(tokens)
    )
    return Trace(name, (1, 2, 3), output, tokens, {source: drafts})


def copying(tokens: int, name: str = "copy") -> Trace:
    """A prompt of distinct ids whose beginning is written again."""
    text = tuple(range(100, 100 + tokens + 10))
    return Trace(name, (*text, *text[:10]), text[10:], tokens, {})


def noise(tokens: int, name: str = "noise") -> Trace:
    """The same four ids in front of another one each time: lookup proposes, and is always wrong."""
    output = tuple(id for n in range(tokens // 5) for id in (1, 2, 3, 4, 1000 + n))
    return Trace(name, (1, 2, 3, 4, 999), output, len(output), {})


@pytest.mark.parametrize(
    ("right", "drafted", "per_row", "draft_pass", "expected"),
    [
        (3, 7, 0.1, 0.0, Static("dflash2", 3)),  # what is always right, and no row more
        (7, 7, 0.1, 0.0, Static("dflash2", 7)),
        (3, 7, 2.0, 0.0, Static()),  # rows are dear
        (3, 7, 0.1, 9.0, Static()),  # the drafter is
        (0, 7, 0.1, 0.0, Static()),
    ],
)
def test_the_best_static_setting_is_found(
    right: int, drafted: int, per_row: float, draft_pass: float, expected: Static
) -> None:
    curve = line_curve(per_row, passes={"dflash2": draft_pass})
    traces = [known(scripted(right, drafted, 40))]
    best = min(statics(traces), key=lambda setting: run_static(traces, curve, setting).seconds)
    assert best == expected


def test_a_static_setting_is_counted_by_hand() -> None:
    trace = known(scripted(right=3, drafted=7, tokens=10))
    outcome = run_static([trace], line_curve(0.5, passes={"dflash2": 0.25}), Static("dflash2", 5))
    # 4 tokens, 4 tokens, and the last 2 in a block that the limit clips to 2 rows
    assert (outcome.tokens, outcome.steps, outcome.rows) == (10, 3, 6 + 6 + 2)
    assert outcome.drafting_seconds == pytest.approx(3 * 0.25)
    assert outcome.refused_seconds == pytest.approx(2 * 2 * 0.5)
    assert outcome.seconds == pytest.approx(3 + 11 * 0.5 + 0.75)


def test_chained_sources_pay_for_every_token() -> None:
    trace = known(scripted(right=3, drafted=3, tokens=8, source="mtp"))
    outcome = run_static([trace], line_curve(0.0, passes={"mtp": 0.25}), Static("mtp", 3))
    assert outcome.drafting_seconds == pytest.approx(6 * 0.25)


def test_blocks_pay_for_the_shortest_that_has_so_many_tokens() -> None:
    trace = replace(scripted(right=3, drafted=7, tokens=60), max_tokens=100)
    curve = line_curve(0.1, passes={"dflash2": 0.9})
    curve = replace(curve, times=replace(curve.times, blocks={"dflash2": {3: 0.2, 5: 0.5, 7: 0.9}}))
    for count, each in ((2, 0.2), (3, 0.2), (4, 0.5), (7, 0.9)):
        outcome = run_static([known(trace)], curve, Static("dflash2", count))
        assert outcome.drafting_seconds == pytest.approx(each * outcome.steps)
    played = replay(TracedWorkload("w", (trace,)), curve, lambda: Engine(curve, {"dflash2": 7}, ("dflash2",)))
    assert played.drafting_seconds == pytest.approx(0.2 * played.steps, rel=0.3), (
        "the short block, nearly always"
    )
    assert played.tokens_per_step > 3.0


def test_a_workload_is_left_out_with_its_texts_wherever_they_stand() -> None:
    one, other = scripted(1, 2, 20, name="one"), copying(20, name="other")
    again = replace(one, name="again", prediction=(1, 2))
    works = (TracedWorkload("a", (one,)), TracedWorkload("b", (other, again)), TracedWorkload("c", (again,)))
    left = without(TraceSet("toy", {"dflash2": 7}, works), works[0])
    assert [(work.name, [trace.name for trace in work.traces]) for work in left.workloads] == [
        ("b", ["other"])
    ]


def test_the_oracle_takes_what_is_right_and_what_pays() -> None:
    trace = known(scripted(right=3, drafted=7, tokens=12))
    assert run_oracle(trace, line_curve(0.5)).seconds == pytest.approx(3 * 2.5)
    assert run_oracle(trace, line_curve(2.0)).seconds == pytest.approx(12.0)
    assert run_oracle(trace, line_curve(0.5), most_rows=2).seconds == pytest.approx(6 * 1.5)


@pytest.mark.parametrize("setting", [Static(), Static("dflash2", 2), Static("dflash2+lookup", 5)])
def test_replay_and_arithmetic_agree_on_static_settings(setting: Static) -> None:
    trace = scripted(right=2, drafted=6, tokens=50)
    work, one, curve = TracedWorkload("w", (trace,)), known(trace), line_curve(0.3, passes={"dflash2": 0.2})
    played = replay(work, curve, lambda: StaticPolicy(setting, {trace.name: one}))
    direct = run_static([one], curve, setting)
    assert (played.tokens, played.steps, played.rows) == (direct.tokens, direct.steps, direct.rows)
    assert played.seconds == pytest.approx(direct.seconds)
    assert played.refused_seconds == pytest.approx(direct.refused_seconds)


WORLDS = [
    (scripted(7, 7, 60), 0.1, 0.1),
    (scripted(2, 7, 120), 0.3, 0.4),
    (scripted(0, 7, 200), 0.4, 0.3),
    (copying(150), 0.05, 0.0),
    (copying(150), 0.4, 0.0),
    (noise(400), 0.4, 0.0),
]


@pytest.mark.parametrize(("trace", "per_row", "draft_pass"), WORLDS)
def test_the_policy_lies_between_its_probe_budget_and_the_oracle(
    trace: Trace, per_row: float, draft_pass: float
) -> None:
    curve = line_curve(per_row, passes={"dflash2": draft_pass})
    longest = dict.fromkeys(trace.drafts, 7)
    work, one = TracedWorkload("w", (trace,)), known(trace)
    played = replay(work, curve, lambda: Engine(curve, longest, tuple(longest)))
    plain, best = run_static([one], curve, Static()), run_oracle(one, curve)
    assert played.tokens == plain.tokens == best.tokens == len(trace.output)
    assert best.seconds <= played.seconds + 1e-9
    assert played.seconds <= plain.seconds * (1 + INCOME) + START + 1e-9
    if run_static([one], curve, Static(*WINS.get(trace.name, ("", 0)))).seconds < 0.8 * plain.seconds:
        assert played.seconds < 0.9 * plain.seconds  # it did draft


WINS = {"one": ("dflash2", 3), "copy": ("lookup", 9)}


def test_a_batch_shares_its_steps_and_ends_with_its_longest() -> None:
    traces = tuple(copying(40 + 10 * n, f"copy-{n}") for n in range(4))
    curve, work = line_curve(0.25), TracedWorkload("four", traces, together=4)
    offers = {trace.name: known(trace) for trace in traces}
    plain = replay(work, curve, lambda: StaticPolicy(Static(), offers))
    # 40 steps of four rows, then ten each of three, two and one
    assert plain.seconds == pytest.approx(40 * 1.75 + 10 * (1.5 + 1.25 + 1.0))
    assert (plain.tokens, plain.steps) == (220, 220)
    policy = replay(work, curve, lambda: Engine(curve, {}, ()))
    oracle = replay(work, curve, lambda: OraclePolicy(curve, offers))
    assert policy.tokens == oracle.tokens == 220
    assert oracle.seconds <= policy.seconds < plain.seconds


def test_a_batch_has_no_more_rows_than_a_step_verifies() -> None:
    traces = tuple(copying(200, f"copy-{n}") for n in range(4))
    offers = {trace.name: known(trace) for trace in traces}
    work = TracedWorkload("four", traces, together=4)
    played = replay(work, line_curve(0.0), lambda: StaticPolicy(Static("lookup", 63), offers))
    assert played.tokens == 800  # replay asserts that no step has more than it may


def test_traces_come_back_from_their_file() -> None:
    one, two = scripted(2, 5, 6), scripted(0, 5, 3, name="two")
    scored = tuple(Draft(d.tokens, d.source, tuple(0.5 for _ in d.tokens)) for d in one.drafts["dflash2"])
    one = Trace("one", one.prompt, one.output, 9, {"dflash2": scored}, (5, 6), ((7, 8), (9,)))
    works = TracedWorkload("a", (one,)), TracedWorkload("b", (one, two), together=2)
    traces = TraceSet("toy", {"dflash2": 5}, works, {"dflash2": (1.5, 2.0)}, ("dflash2",))
    text = dump_traces(traces)
    assert parse_traces(text, "file") == traces
    assert len(text.splitlines()) == 3


GOOD = dump_traces(TraceSet("toy", {"mtp": 3}, (TracedWorkload("a", (scripted(1, 2, 2, "mtp"),)),)))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("quickdraft-traces-2", "quickdraft-traces-0", "first line"),
        ('"longest":{"mtp":3}', '"longest":{"mtp":64}', "longest"),
        ('"longest":{"mtp":3}', '"longest":{"mtp":1}', "drafts"),
        ('"longest":{"mtp":3}', '"longest":{}', "drafts"),
        ('"together":1', '"together":0', "together"),
        ('"together":1', '"together":1,"more":1', "more"),
        ('"traces":["one"]', '"traces":["other"]', "traces"),
        ('"max_tokens":2', '"max_tokens":1', "max_tokens"),
        ('"output":[1000,1001]', '"output":[]', "output"),
        ('"output":[1000,1001]', '"output":[1000,-1]', "output"),
        ('"output":[1000,1001]', '"output":[1000]', "drafts"),
        ('"scores":{}', '"scores":{"mtp":[[0.5],[]]}', "scores"),
        ('"scores":{}', '"scores":{},"extra":0', "extra"),
        ('"prediction":[]', '"prediction":[-1]', "prediction"),
        ('"corpus":[]', '"corpus":[[]]', "corpus"),
        ('"held_out":{}', '"held_out":{"mtp":["much"]}', "held_out"),
        ('"held_out":{}', '"held_out":{"dflash":[1.5]}', "held_out"),
        ('"shipped":[]', '"shipped":["dflash"]', "shipped"),
        ('{"name":"one"', '["name"', "JSON"),
    ],
)
def test_a_damaged_file_of_traces_is_an_error_that_names_the_field(old: str, new: str, named: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError, match=named):
        parse_traces(GOOD.replace(old, new), "file")


def test_the_card_s_curve_goes_through_what_was_published() -> None:
    curve = open_curve("rtx3090", pytest.fail)
    milliseconds = [
        1000 * (curve.row_seconds(rows, context) + drafter)
        for rows, context, drafter in (
            (1, 0, 0.0),
            (8, 0, curve.draft_seconds("dflash2", 7)),
            (5, 0, curve.draft_seconds("mtp", 4)),
            (8, 25_000, 0.003),
            (16, 25_000, 0.003),
            (16, 50_000, 0.003),
        )
    ]
    assert milliseconds == pytest.approx([21.7, 26.5, 24.8, 30.0, 39.5, 48.2])
    beyond = [1000 * curve.row_seconds(rows, 25_000) + 3.0 for rows in (19, 21)]
    assert sum(beyond) == pytest.approx(47.8 + 47.2)
    assert all(a <= b for a, b in zip(curve.base, curve.base[1:], strict=False))
    roof = open_curve("rtx3090-roofline", pytest.fail)
    for context in (2_000, 25_000, 112_000):
        there, card = at_context(roof, context), at_context(curve, context)
        assert all(there.base[rows] < card.base[rows] for rows in ROWS)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "JSON"),
        ('{"schema": "other"}', "schema"),
        ('{"schema": "quickdraft-costs-3", "rows": [2, 4], "contexts": [0]}', "rows"),
        ('{"schema": "quickdraft-costs-3", "rows": [1, 2], "contexts": [9, 0]}', "contexts"),
        ('{"schema": "quickdraft-costs-3", "rows": [1, 2], "contexts": [0], "seconds": [[1]]}', "seconds"),
        (
            '{"schema": "quickdraft-costs-3", "rows": [1, 2], "contexts": [0], "seconds": [[1, 2]], '
            '"passes": {"mtp": 0}}',
            "passes",
        ),
        (
            '{"schema": "quickdraft-costs-3", "rows": [1, 2], "contexts": [0], "seconds": [[1, 2]], '
            '"blocks": {"dflash2": {"x": 1}}}',
            "blocks",
        ),
        ('{"schema": "quickdraft-verify-cost-1", "rows": [1, 2], "contexts": [0]}', "step_ms"),
    ],
)
def test_a_file_that_is_no_curve_is_an_error(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_times(text, "file")


def test_a_curve_without_a_drafter_s_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match="mtp"):
        line_curve(0.1).require({"mtp": 3})


@pytest.mark.parametrize("name", ["cpu", "rtx3090"])
def test_the_policy_on_the_shipped_traces(name: str) -> None:
    traces = shipped_traces()
    assert traces.workloads[-1].together == 4
    result = simulate(traces, open_curve(name, pytest.fail))
    rows = {row.workload: row for row in result.rows}
    assert list(rows) == [
        "copy", "extract", "code-edit", "rag", "summary", "chat", "random", "adversarial", "prediction",
        "corpus", "mixed",
    ]  # fmt: skip
    for row in result.rows:
        assert row.policy_tokens_per_second >= NEAR * row.best_static, row
        assert row.policy_tokens_per_second >= 0.97 * row.plain, row
        if row.workload != "mixed":  # its oracle goes step by step
            assert max(row.policy_tokens_per_second, row.best_static) <= row.oracle + 1e-6, row
    assert rows["copy"].tokens_per_step > 12
    random = rows["random"]
    assert random.spent_of_plain < 0.03 or random.policy_tokens_per_second > random.plain, random
