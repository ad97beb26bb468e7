"""`bench policy`: the drafting policy on recorded traces, against hindsight, on any machine's cost curve.

Puts the pieces together: traces, a curve, replay.py for the policy that serves, hindsight.py for what it is
compared with, policy_report.py for what comes out. A model is opened only to record traces or to time steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from quickdraft.bench.curves import MEASURED, PROJECTED, ROOF, RTX3090, Curve, at_context, open_curve
from quickdraft.bench.hindsight import (
    KnownTrace,
    OraclePolicy,
    Static,
    StaticPolicy,
    known_workload,
    run_oracle,
    run_static,
    statics,
)
from quickdraft.bench.judge_traces import judged, without
from quickdraft.bench.policy_report import LongRow, PolicyResult, PolicyRow, Speeds, print_result
from quickdraft.bench.replay import AUTO, Engine, Outcome, replay
from quickdraft.bench.report import check_json_folder, say, write_json, write_text
from quickdraft.bench.traces import (
    TracedWorkload,
    TraceSet,
    dump_traces,
    read_traces,
    shipped_traces,
)
from quickdraft.engine.opened import EngineConfig, open_model
from quickdraft.errors import ConfigError, UnsupportedError
from quickdraft.speculate.costs import ConstantCosts
from quickdraft.speculate.draft import CORPUS, LOOKUP, PREDICTION
from quickdraft.speculate.priors import Priors, fit_priors, to_json
from quickdraft.speculate.promise import auto_models
from quickdraft.types import MAX_ROWS, Speculation

CARD_CONTEXTS: Final = (2_000, 25_000, 112_000)
SHORT_ROWS: Final = 16
TEXTS: Final = (PREDICTION, LOOKUP, CORPUS)
BLOCK_ROWS: Final = (4, 8, SHORT_ROWS, 32, MAX_ROWS)  # caps under which a batch's greedy oracle is tried


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is opened, if one is needed."""

    model: str | Path
    threads: int | None = None
    head_bits: int | None = None
    drafters: tuple[Path, ...] | None = None
    draft_vocab: Path | None = None

    def config(self, *, measure_costs: bool) -> EngineConfig:
        return EngineConfig(
            threads=self.threads, prefix_cache=False, head_bits=self.head_bits, drafters=self.drafters,
            draft_vocab=self.draft_vocab, measure_costs=measure_costs,
        )  # fmt: skip


def run(
    options: ModelOptions,
    curve: str = MEASURED,
    traces_path: Path | None = None,
    record_path: Path | None = None,
    contexts: Sequence[int] | None = None,
    json_path: Path | None = None,
    priors_path: Path | None = None,
    *,
    leave_one_out: bool = False,
) -> PolicyResult:
    """Record if asked, replay, print tables, write files; `priors_path`: the table of priors these traces
    give; `leave_one_out`: each workload once more, by priors of the others. ConfigError for a file that is
    no such file, a curve that lacks what the traces need, or two files of traces."""
    for path in (json_path, record_path, priors_path):
        check_json_folder(path)
    if traces_path is not None and record_path is not None:
        raise ConfigError("--traces and --record", got="both", expected="one of them: recorded ones are used")
    traces = _record(options, record_path) if record_path is not None else _known(traces_path)
    opened = open_curve(curve, lambda: _measured(options))
    opened.require(traces.longest)
    if contexts is None:
        contexts = CARD_CONTEXTS if opened.name in (RTX3090, ROOF, PROJECTED) else ()
    result = simulate(traces, opened, contexts, leave_one_out=leave_one_out)
    print_result(result, Console())
    if json_path is not None:
        write_json(json_path, result.to_dict())
    if priors_path is not None:
        write_json(priors_path, to_json(fit_priors(judged(traces), traces.longest)))
    return result


def simulate(
    traces: TraceSet, curve: Curve, contexts: Sequence[int] = (), *, leave_one_out: bool = False
) -> PolicyResult:
    """Every workload at its own contexts, also by priors of the others where asked; then those of single
    sequences as if every step came after each of `contexts` tokens, with blocks of up to 16 and of up to 64
    rows."""
    known = {work.name: known_workload(work) for work in traces.workloads}
    runs = [_Hindsight(traces, work, known[work.name], curve) for work in traces.workloads]
    best_of_all = _best_of_all(runs)
    rows = tuple(one.row(best_of_all, leave_one_out=leave_one_out) for one in runs)
    long = tuple(
        _Hindsight(traces, work, known[work.name], there).long_row(context)
        for context in contexts
        for there in (at_context(curve, context),)
        for work in traces.workloads
        if work.together == 1
    )
    return PolicyResult(curve.name, curve.assumptions, traces.model, str(best_of_all), rows, long)


class _Hindsight:
    """A workload on a curve: every static setting of it, once."""

    def __init__(
        self, traces: TraceSet, work: TracedWorkload, known: Sequence[KnownTrace], curve: Curve
    ) -> None:
        self._traces, self._longest, self._work = traces, traces.longest, work
        self._known, self._curve = known, curve
        self.static = {setting: self._static(setting) for setting in statics(known)}
        self.plain = self.static[Static()]
        self._shipped = traces.shipped
        self._in_auto = auto_models(self._longest, traces.held_out, curve.costs)

    def row(self, one_for_all: Static, *, leave_one_out: bool) -> PolicyRow:
        """The policy as it serves, beside hindsight."""
        others = (
            fit_priors(judged(without(self._traces, self._work)), self._longest) if leave_one_out else None
        )
        policy, best = self._policy(AUTO), self.best()
        lost = policy.drafting_seconds + policy.refused_seconds
        common = self.static.get(one_for_all, self.plain)
        return PolicyRow(
            self._work.name,
            policy.tokens_per_second,
            self.static[best].tokens_per_second,
            self._oracle(MAX_ROWS).tokens_per_second,
            self.plain.tokens_per_second,
            policy.mean_rows,
            policy.tokens_per_step,
            str(best),
            common.tokens_per_second,
            lost / self.plain.seconds,
            self._policy(AUTO, others).tokens_per_second if others is not None else None,
        )

    def long_row(self, context: int) -> LongRow:
        """With blocks of at most 16 and of at most 64 rows."""

        sources = (*TEXTS, *self._in_auto)

        def of(rows: int) -> Speeds:
            outcomes = (
                self._policy(Speculation(sources=sources, max_rows=rows)),
                self.static[self.best(rows)],
                self._oracle(rows),
            )
            return Speeds(*(one.tokens_per_second for one in outcomes))

        plain = self.plain.tokens_per_second
        return LongRow(context, self._work.name, plain, of(SHORT_ROWS), of(MAX_ROWS))

    def best(self, most_rows: int = MAX_ROWS) -> Static:
        """The fastest setting, of equal ones the first and shortest."""
        fitting = [setting for setting in self.static if setting.count < most_rows]
        return min(fitting, key=lambda setting: self.static[setting].seconds)

    def _static(self, setting: Static) -> Outcome:
        if self._work.together == 1:
            return run_static(self._known, self._curve, setting)
        offers = {one.trace.name: one for one in self._known}
        return replay(self._work, self._curve, lambda: StaticPolicy(setting, offers))

    def _oracle(self, most_rows: int) -> Outcome:
        if self._work.together == 1:
            return sum((run_oracle(one, self._curve, most_rows) for one in self._known), Outcome())
        offers, curve = {one.trace.name: one for one in self._known}, self._curve
        greedy = (
            replay(self._work, curve, partial(OraclePolicy, curve, offers, rows))
            for rows in BLOCK_ROWS
            if rows <= most_rows
        )
        return min(greedy, key=lambda outcome: outcome.seconds)

    def _policy(self, speculation: Speculation, priors: Priors | None = None) -> Outcome:
        curve, longest, models, shipped = self._curve, self._longest, self._in_auto, self._shipped
        return replay(
            self._work, curve, lambda: Engine(curve, longest, models, speculation, shipped, priors=priors)
        )


def _best_of_all(runs: Sequence[_Hindsight]) -> Static:
    """The one setting for every workload: the highest mean of logarithms of the gain over plain."""

    def gain(setting: Static) -> float:
        return sum(math.log(one.plain.seconds / one.static.get(setting, one.plain).seconds) for one in runs)

    settings = dict.fromkeys(setting for one in runs for setting in one.static)
    return max(settings, key=gain)


def _known(path: Path | None) -> TraceSet:
    return shipped_traces() if path is None else read_traces(path)


def _record(options: ModelOptions, path: Path) -> TraceSet:
    from quickdraft.bench.record_traces import record_opened, traced_workloads

    with closing(open_model(options.model, options.config(measure_costs=False))) as opened:
        traces = record_opened(opened, traced_workloads())
    write_text(path, dump_traces(traces))
    say(f"traces written to {path}")
    return traces


def _measured(options: ModelOptions) -> Curve:
    """The curve the engine would use for this model here."""
    with closing(open_model(options.model, options.config(measure_costs=True))) as opened:
        name, costs = opened.name, opened.costs
    if isinstance(costs, ConstantCosts):
        raise UnsupportedError(
            f"steps of {name} take too long to be timed when it is opened",
            hint="`bench verify-cost --json FILE`, then --curve FILE",
        )
    return Curve(MEASURED, costs.times, (f"timed for {name} on this machine",))
