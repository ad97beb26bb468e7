"""The cost curve: its arithmetic, how it is measured within a budget, and the file that remembers it."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quickdraft.engine import measured_costs
from quickdraft.engine.drafters import Drafting
from quickdraft.engine.measured_costs import FOLDER, remember, remembered, settle_curve
from quickdraft.engine.opened import EngineConfig, Opened, open_model
from quickdraft.engine.step_timing import STEADY, Rounds, Timed
from quickdraft.speculate.cost_curve import MeasuredCosts, StepTimes, explain_costs, rising
from quickdraft.speculate.costs import ConstantCosts, drafting_cost
from quickdraft.speculate.draft import Draft
from quickdraft.speculate.online_costs import OnlineCosts
from quickdraft.types import MAX_ROWS, SamplingParams, Speculation
from tests.support.tiny import write_tiny_llama
from tests.support.tiny_hybrid import write_tiny_hybrid

TIMES = StepTimes(
    (1, 2, 4, 16),
    (0, 1000),
    ((0.010, 0.009, 0.014, 0.038), (0.020, 0.021, 0.034, 0.098)),
    {"mtp": 0.002, "dflash2": 0.0038},
    {"mtp": 0.0001},
    {"dflash2": {3: 0.0019, 5: 0.0029, 7: 0.0038}},
)


def test_measured_costs_interpolate_and_go_on_along_the_line() -> None:
    costs = MeasuredCosts(TIMES)
    assert costs.step_cost(1, 0) == costs.step_cost(1, 5000) == 1.0
    assert costs.step_cost(2, 0) == 1.0, "a step of two rows measured as shorter is averaged with that of one"
    assert costs.step_cost(4, 0) == pytest.approx(14 / 9.5)
    assert costs.step_cost(10, 0) == pytest.approx(26 / 9.5)  # between 4 and 16 rows
    assert costs.step_cost(28, 0) == pytest.approx(62 / 9.5)  # beyond
    middle, far = costs.step_cost(16, 500), costs.step_cost(16, 2000)
    assert middle == pytest.approx((38 + 30) / (9.5 + 5.25)) and far == pytest.approx((38 + 120) / (9.5 + 21))
    assert costs.draft_cost("mtp") == pytest.approx(2 / 9.5) and costs.draft_cost("lookup") == 0.0
    assert drafting_cost(costs, "mtp", 3) == pytest.approx(6 / 9.5), "chained drafts run the module once each"
    blocks = [drafting_cost(costs, "dflash2", count) for count in (1, 3, 4, 7, 9)]
    assert blocks == pytest.approx([0.2, 0.2, 29 / 95, 0.4, 0.4]), (
        "the shortest block that has so many tokens"
    )
    few = MeasuredCosts(StepTimes((1, 4), (0,), ((0.1, 0.1),), {}))
    assert few.step_cost(4, 9) == 1.0 and few.step_cost(14, 9) == pytest.approx(5.0), (
        "nearly free up to a point"
    )


@pytest.mark.parametrize("seed", range(20))
def test_more_rows_never_cost_less_however_noisy_the_times_are(seed: int) -> None:
    random = np.random.default_rng(seed)
    lines = tuple(tuple(random.uniform(0.001, 0.1, 6).tolist()) for _ in range(2))
    costs = MeasuredCosts(StepTimes((1, 2, 4, 8, 16, 32), (0, 2048), lines, {}))
    for context in (0, 1, 700, 2048, 100_000):
        curve = [costs.step_cost(rows, context) for rows in range(1, MAX_ROWS + 1)]
        assert curve[0] == 1.0 and all(a <= b + 1e-9 for a, b in itertools.pairwise(curve))


def test_rising_averages_what_falls() -> None:
    assert rising([1.0, 3.0, 2.0, 5.0]) == [1.0, 2.5, 2.5, 5.0]
    assert rising([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]


class Copying:
    """A strong match that goes on for ever."""

    source = "lookup"

    def propose(self, view, budget: int) -> Draft:
        return Draft(tuple(range(budget)), self.source, match_length=12)


class Module:
    """A model that drafts up to 7 tokens."""

    longest, cold_tokens, in_auto = 7, 0, True

    def __init__(self, source: str) -> None:
        self.source = source

    def propose(self, view, budget: int) -> Draft:
        return Draft(tuple(range(budget)), self.source)

    def observe(self, view, verdict, taps) -> None: ...
    def forget(self, request_id: str) -> None: ...
    def resumed(self, view) -> None: ...
    def publishing(self, view) -> None: ...


@dataclass
class View:
    tokens: list[int]
    request_id: str = "r"
    prompt_length: int = 1
    matcher: None = None


def length(drafter, costs, context: int = 10) -> int:
    """Tokens drafted before anything was seen."""
    speculation = Speculation.parse(drafter.source)
    return len(Drafting([drafter], costs).propose(View([1] * context), speculation, 100).tokens)


def test_draft_lengths_follow_the_curve() -> None:
    """Rows that cost next to nothing make longer drafts worth it, dear ones none; so do dear passes."""
    lengths = [length(Copying(), ConstantCosts(cost)) for cost in (0.02, 0.2, 0.4, 0.95)]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 10 and lengths[-1] == 0
    steep = MeasuredCosts(StepTimes((1, 4, 16), (0, 1000), ((1.0, 1.0, 1.2), (1.0, 3.9, 16.0)), {}))
    assert length(Copying(), steep) > 10 and length(Copying(), steep, 4000) == 0, "at that context"
    block, chained = Module("dflash2"), Module("mtp")
    dear, cheap = (ConstantCosts(0.02, {"dflash2": cost, "mtp": cost}) for cost in (4.0, 0.03))
    assert length(block, cheap) > length(chained, cheap) > 0, "a chained drafter pays for every token"
    assert length(block, dear) == length(chained, dear) == 0


class Machine:
    """A clock and steps of `row` seconds a row, `slow(now, rows)` times as long where others use it."""

    def __init__(self, one: float, row: float, slow=lambda now, rows: 1.0) -> None:
        self.now, self.one, self.row, self.steps, self.slow = 0.0, one, row, 0, slow

    def step(self, context: int, rows: int) -> float:
        self.steps += 1
        seconds = (self.one + self.row * (rows - 1)) * (1 + context / 1000) * self.slow(self.now, rows)
        self.now += seconds
        return seconds

    def time_pass(self, tokens: int = 1) -> float:
        return self.step(0, 1) * (3 + tokens) / 16

    def timed(self, budget: float) -> Timed | None:
        models = {
            "mtp": {1: self.time_pass},
            "dflash2": {most: partial(self.time_pass, most) for most in (3, 7)},
        }
        upkeep = {"mtp": lambda: self.time_pass() / 10}
        rounds = Rounds(self.step, models, upkeep, (1, 4, 16, 2), (0, 1000), lambda: self.now)
        rounds.run(budget)
        return rounds.result()

    def times(self, budget: float) -> StepTimes | None:
        timed = self.timed(budget)
        return timed.times if timed is not None else None


def test_times_are_those_of_the_steps() -> None:
    times = Machine(0.01, 0.001).times(budget=10)
    assert times is not None and (times.rows, times.contexts) == ((1, 2, 4, 16), (0, 1000))
    assert times.seconds[0] == pytest.approx((0.010, 0.011, 0.013, 0.025))
    assert times.seconds[1] == pytest.approx((0.020, 0.022, 0.026, 0.050))
    assert times.passes == pytest.approx({"mtp": 0.0025, "dflash2": 0.00625})
    assert times.blocks == {"dflash2": pytest.approx({3: 0.00375, 7: 0.00625})}
    assert times.upkeep["mtp"] == pytest.approx(0.00025)


def test_a_neighbour_who_slows_everything_down_for_a_while_changes_no_cost() -> None:
    quiet = Machine(0.01, 0.001).timed(4)
    bursts = Machine(0.01, 0.001, lambda now, rows: 3.0 if now % 1.0 < 0.4 else 1.0).timed(4)
    assert quiet is not None and bursts is not None and quiet.steady and quiet.spread < 1e-6
    costs, other = MeasuredCosts(quiet.times), MeasuredCosts(bursts.times)
    for rows in (2, 4, 16):
        assert other.step_cost(rows, 0) == pytest.approx(costs.step_cost(rows, 0), rel=0.05)


def test_a_machine_whose_costs_change_while_they_are_timed_is_not_believed() -> None:
    """More than one row costs twice as much in every second moment: no median says what it costs."""
    chance = np.random.default_rng(3)
    timed = Machine(0.01, 0.001, lambda _, rows: float(chance.choice([1.0, 2.0])) if rows > 1 else 1.0).timed(
        3
    )
    assert timed is not None and timed.spread > STEADY and not timed.steady


def test_a_curve_that_was_not_steady_is_timed_again_until_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, found = tmp_path / "curve.json", [Timed(TIMES, 0.3), Timed(TIMES, 0.4), Timed(TIMES, 0.02)]
    monkeypatch.setattr(measured_costs, "time_steps", lambda *_: found.pop(0))
    spreads = []
    for _ in range(5):
        measured_costs.measured_costs(None, [], file)
        kept = remembered(file)
        assert kept is not None
        spreads.append(kept.spread)
    assert spreads == [0.3, 0.3, 0.02, 0.02, 0.02] and not found, "the steadiest stays, a steady one for good"


@pytest.mark.parametrize(
    ("steps", "wrong", "there", "same"),
    [(30, 3.0, True, True), (150, 3.0, False, False), (3000, 3.0, True, False)],
)
def test_a_curve_that_steps_contradict_does_not_stay(
    tmp_path: Path, steps: int, wrong: float, there: bool, same: bool
) -> None:
    """A few steps say nothing, some that it is to be measured again, many what it is."""
    file = tmp_path / "curve.json"
    remember(file, Timed(TIMES, 0.0))
    costs = OnlineCosts(MeasuredCosts(TIMES))
    for rows in [1, 16] * (steps // 2):
        costs.observe_step(rows, 0, MeasuredCosts(TIMES).seconds(rows, 0) * (wrong if rows == 16 else 1.0))
    settle_curve(costs, file)
    assert file.exists() == there
    if there:
        assert (remembered(file) == Timed(TIMES, 0.0)) == same


@pytest.mark.parametrize(
    ("one", "rows", "contexts"),
    [
        (0.05, (1, 2, 4, 16), (0, 1000)),
        (0.1, (1, 4, 16), (0, 1000)),
        (0.15, (1, 2, 4), (0,)),
        (0.8, None, None),
    ],
)
def test_a_slow_model_gets_what_the_budget_allows(
    one: float, rows: tuple | None, contexts: tuple | None
) -> None:
    machine = Machine(one, one / 20)
    times = machine.times(budget=1.5)
    assert machine.now < 1.5 + one
    if rows is None:
        assert times is None and machine.steps <= 3
    else:
        assert times is not None and (times.rows, times.contexts) == (rows, contexts)


def test_the_file_comes_back_and_damage_is_no_curve(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "curve.json"
    assert remembered(file) is None
    remember(file, Timed(TIMES, 0.05))
    assert remembered(file) == Timed(TIMES, 0.05) and [path.name for path in file.parent.iterdir()] == [
        "curve.json"
    ]
    good = json.loads(file.read_text())
    for change in (
        {"schema": "other"}, {"rows": [1, 2]}, {"rows": [2, 4, 8, 16]}, {"rows": [1, 4, 2, 16]}, {"rows": 3},
        {"rows": [1, 2, 4, 65]}, {"rows": [1, 2, 4, True]}, {"contexts": [0]}, {"contexts": [5, 1000]},
        {"seconds": [[0.1, 0.1, 0.1, -0.1]] * 2}, {"seconds": [[0.1, 0.1, 0.1, "x"]] * 2},
        {"seconds": [[0.1, 0.1, 0.1, float("nan")]] * 2}, {"passes": {"mtp": 0}}, {"passes": [1]},
        {"spread": -1.0}, {"spread": None}, {"upkeep": {"mtp": -1.0}},
        {"blocks": {"dflash2": {"3": 0.0}}}, {"blocks": {"dflash2": {"x": 0.1}}},
        {"blocks": {"dflash2": 0.1}},
        {"blocks": {"dflash2": {"0": 0.1}}}, {"blocks": {"dflash2": {}}},
        {"contexts": [], "seconds": []}, {"rows": [], "seconds": [[], []]},
    ):  # fmt: skip
        file.write_text(json.dumps(good | change))
        assert remembered(file) is None, change
    for text in ("", "[]", "null", '{"schema"', "[" * 100_000):
        file.write_text(text)
        assert remembered(file) is None, text[:20]


@pytest.fixture(params=["llama", "hybrid"])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUICKDRAFT_CACHE", str(tmp_path / "cache"))
    if request.param == "llama":
        return write_tiny_llama(tmp_path / "tiny.gguf", tokenizer=False)
    return write_tiny_hybrid(tmp_path / "hybrid")


def opened(model: Path, **settings: Any) -> Opened:
    config = EngineConfig(threads=1, measure_costs=True, kv_memory_bytes=1 << 22, **settings)
    return open_model(model, config)


def test_opening_measures_once_and_leaves_nothing_behind(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(model)
    assert isinstance(first.costs, OnlineCosts) and first.costs.times.rows[:2] == (1, 2)
    assert ("mtp" in first.costs.times.passes) == ("mtp" in first.sources)
    assert explain_costs(first.costs) in first.explain() and "not measured" not in explain_costs(first.costs)
    pool = first.engine.scheduler.pool
    assert pool.free == pool.count and pool.take(3) == [0, 1, 2], "the pool is as new"
    assert first.engine.stats.steps == 0 and first.engine.metrics().draft_cold_tokens == 0
    (file,) = (tmp_path / "cache" / FOLDER).iterdir()
    kept = file.read_bytes()
    monkeypatch.setattr(measured_costs, "time_steps", lambda *_: pytest.fail("measured again"))
    again = opened(model)
    assert isinstance(again.costs, OnlineCosts) and again.costs.times == first.costs.times
    monkeypatch.undo()
    monkeypatch.setenv("QUICKDRAFT_CACHE", str(tmp_path / "cache"))
    file.write_bytes(kept[:-9])
    assert isinstance(opened(model).costs, OnlineCosts) and remembered(file) is not None


def test_a_drafter_of_other_files_has_a_curve_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUICKDRAFT_CACHE", str(tmp_path / "cache"))
    model, vocab = write_tiny_hybrid(tmp_path / "hybrid"), tmp_path / "vocab.json"
    size = opened(model).runner.model.config.vocabulary_size
    ids = list(range(0, size, 3))
    text = {"schema": "quickdraft-draft-vocab-1", "vocabulary_size": size, "ids": ids, "coverage": 0.5}
    vocab.write_text(json.dumps(text | {"counted_tokens": 9}))
    for _ in range(2):
        opened(model, draft_vocab=vocab)
    assert len(list((tmp_path / "cache" / FOLDER).iterdir())) == 2


def test_measuring_changes_no_token(model: Path) -> None:
    plain = open_model(model, EngineConfig(threads=1, kv_memory_bytes=1 << 22))
    assert isinstance(plain.costs, ConstantCosts) and "not measured" in "".join(plain.explain())
    answers = []
    for one in (plain, opened(model)):
        params = SamplingParams(
            temperature=0.0, max_tokens=48, ignore_eos=True, speculation=Speculation(auto=True)
        )
        request = one.request("r", [5, 6, 7, 8] * 6, params)
        one.engine.add(request)
        while one.engine.has_work:
            one.engine.step()
        answers.append(request.tokens[request.prompt_length :])
        one.close()
    assert answers[0] == answers[1] and len(answers[0]) == 48
