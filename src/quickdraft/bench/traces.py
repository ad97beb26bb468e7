"""Traces: what a target emitted and what the models that draft would have proposed at every position of it.

Verification never changes a token, so a trace holds for any drafting decision; replay.py plays decisions
over it without a model. Sources that read tokens alone (lookup) are not kept: they are run again, by the
same code that serves, over the tokens that are. A file is JSON lines: a head, then one line per sequence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Final

from quickdraft.errors import ConfigError
from quickdraft.speculate.draft import Draft
from quickdraft.types import MAX_ROWS, SOURCES

SCHEMA: Final = "quickdraft-traces-2"
SHIPPED: Final = "traces-smollm2-135m.jsonl"
MAX_ID: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Trace:
    """One sequence. `drafts[source][i]` is the whole proposal before output[i], empty where the source had
    none; `max_tokens` is the request's limit, which drafts are clipped to. `prediction` came with the
    request; `corpus` are the texts of its lookup corpus, none without one."""

    name: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    max_tokens: int
    drafts: Mapping[str, tuple[Draft, ...]] = field(default_factory=dict)
    prediction: tuple[int, ...] = ()
    corpus: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class TracedWorkload:
    """Sequences that are counted together; `together` of them are decoded in one batch."""

    name: str
    traces: tuple[Trace, ...]
    together: int = 1


@dataclass(frozen=True, slots=True)
class TraceSet:
    """A file of traces. `longest`: the models that draft in it, and the most tokens each drafts; `held_out`:
    what their makers noted of them (speculate/promise.py); `shipped`: those that came with the package."""

    model: str
    longest: Mapping[str, int]
    workloads: tuple[TracedWorkload, ...]
    held_out: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    shipped: tuple[str, ...] = ()


def shipped_traces() -> TraceSet:
    """Those of the default model that come with the package."""
    place = resources.files("quickdraft.bench").joinpath("data", SHIPPED)
    return parse_traces(place.read_text("ascii"), SHIPPED)


def read_traces(path: Path) -> TraceSet:
    """ConfigError for a file that cannot be read or is no such file; it names line and field."""
    try:
        text = path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read traces from {path}", got=str(error)) from error
    return parse_traces(text, str(path))


def dump_traces(traces: TraceSet) -> str:
    """The text of a file of traces; a sequence of several workloads is written once."""
    sequences = {trace.name: trace for work in traces.workloads for trace in work.traces}
    head = {
        "schema": SCHEMA,
        "model": traces.model,
        "longest": dict(traces.longest),
        "held_out": {source: list(notes) for source, notes in traces.held_out.items()},
        "shipped": list(traces.shipped),
        "workloads": [
            {"name": work.name, "together": work.together, "traces": [trace.name for trace in work.traces]}
            for work in traces.workloads
        ],
    }
    lines = [head, *map(_line, sequences.values())]
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def parse_traces(text: str, where: str) -> TraceSet:
    """The traces of a file's text; ConfigError as read_traces. `where` is for messages."""
    lines = [_Object(line, f"{where}: line {number}") for number, line in enumerate(text.splitlines(), 1)]
    if not lines or lines[0].get("schema", str) != SCHEMA:
        raise ConfigError(
            f"{where}: not a file of traces", expected=f'a first line with "schema": "{SCHEMA}"'
        )
    head = lines[0]
    longest = head.get("longest", dict)
    for source, count in longest.items():
        if source not in SOURCES or type(count) is not int or not 1 <= count < MAX_ROWS:
            raise head.wrong("longest", f"{source}: {count}", f"a draft source and 1..{MAX_ROWS - 1}")
    held_out = {
        source: head.numbers("held_out", notes) for source, notes in head.get("held_out", dict).items()
    }
    if not set(held_out) <= set(longest):
        raise head.wrong("held_out", ", ".join(held_out), f"of {', '.join(longest) or 'no source'}")
    shipped = tuple(head.get("shipped", list))
    if any(one not in list(longest) for one in shipped):
        raise head.wrong("shipped", repr(shipped)[:60], f"of {', '.join(longest) or 'no source'}")
    traces: dict[str, Trace] = {}
    for line in lines[1:]:
        trace = _trace(line, longest)
        if trace.name in traces:
            raise line.wrong("name", repr(trace.name), "each name once")
        traces[trace.name] = trace
    workloads = tuple(_workload(head, each, traces) for each in head.get("workloads", list))
    if not workloads:
        raise head.wrong("workloads", "none", "at least one")
    head.end()
    return TraceSet(head.get("model", str), longest, workloads, held_out, shipped)


class _Object:
    """A JSON object of the file, read field by field: absent, wrong and unknown ones are errors."""

    def __init__(self, line: str | Any, where: str) -> None:
        self._where, self._used = where, set[str]()
        try:
            self._fields = json.loads(line) if isinstance(line, str) else line
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON", got=str(error)) from error
        if not isinstance(self._fields, dict):
            raise ConfigError(f"{where}: not a JSON object", got=repr(self._fields)[:60])

    def get(self, name: str, kind: type) -> Any:
        self._used.add(name)
        value = self._fields.get(name)
        if type(value) is not kind:
            raise self.wrong(name, repr(value)[:60], f"a value of type {kind.__name__}")
        return value

    def ids(self, name: str, least: int) -> tuple[int, ...]:
        return self.id_list(name, self.get(name, list), least)

    def id_list(self, name: str, value: Any, least: int) -> tuple[int, ...]:
        good = type(value) is list and all(type(each) is int and 0 <= each <= MAX_ID for each in value)
        if not good or len(value) < least:
            raise self.wrong(name, repr(value)[:60], f"at least {least} token ids")
        return tuple(value)

    def numbers(self, name: str, value: Any) -> tuple[float, ...]:
        good = type(value) is list and all(type(one) in (int, float) and math.isfinite(one) for one in value)
        if not good:
            raise self.wrong(name, repr(value)[:60], "a list of numbers")
        return tuple(map(float, value))

    def wrong(self, name: str, got: str, expected: str) -> ConfigError:
        return ConfigError(f"{self._where}: bad '{name}'", got=got, expected=expected)

    def end(self) -> None:
        unknown = sorted(set(self._fields) - self._used - {"schema", "model"})
        if unknown:
            raise ConfigError(f"{self._where}: unknown field", got=repr(unknown[0][:60]))


def _workload(head: _Object, value: Any, traces: Mapping[str, Trace]) -> TracedWorkload:
    one = _Object(value, "workloads")
    names, name, together = one.get("traces", list), one.get("name", str), one.get("together", int)
    missing = [each for each in names if each not in traces]
    if missing or not names:
        raise one.wrong("traces", repr(missing[:1]), "names of sequences of this file, at least one")
    if together < 1:
        raise one.wrong("together", str(together), "at least 1")
    one.end()
    return TracedWorkload(name, tuple(traces[each] for each in names), together)


def _trace(line: _Object, longest: Mapping[str, int]) -> Trace:
    output, max_tokens = line.ids("output", 1), line.get("max_tokens", int)
    if max_tokens < len(output):
        raise line.wrong("max_tokens", str(max_tokens), f"at least the {len(output)} tokens of the output")
    drafts, scores = line.get("drafts", dict), line.get("scores", dict)
    if set(drafts) != set(longest) or not set(scores) <= set(drafts):
        raise line.wrong("drafts", ", ".join(drafts) or "none", f"of {', '.join(longest) or 'no source'}")
    found = {
        source: _drafts(line, source, drafts[source], scores.get(source), len(output), longest[source])
        for source in drafts
    }
    corpus = tuple(line.id_list("corpus", text, 1) for text in line.get("corpus", list))
    trace = Trace(
        line.get("name", str),
        line.ids("prompt", 1),
        output,
        max_tokens,
        found,
        line.ids("prediction", 0),
        corpus,
    )
    line.end()
    return trace


def _drafts(
    line: _Object, source: str, tokens: Any, scores: Any, count: int, longest: int
) -> tuple[Draft, ...]:
    scores = [[]] * count if scores is None else scores
    for name, value in (("drafts", tokens), ("scores", scores)):
        if type(value) is not list or len(value) != count:
            raise line.wrong(name, f"{source} {repr(value)[:40]}", f"one proposal for each of {count} tokens")
    found = []
    for ids, odds in zip(tokens, scores, strict=True):
        draft = line.id_list("drafts", ids, 0)
        if len(draft) > longest:
            raise line.wrong("drafts", f"{len(draft)} tokens of {source}", f"at most {longest}")
        margins = line.numbers("scores", odds)
        if len(margins) not in (0, len(draft)):
            raise line.wrong("scores", repr(odds)[:60], "no number or one for each drafted token")
        found.append(Draft(draft, source if draft else "", margins))
    return tuple(found)


def _line(trace: Trace) -> dict[str, object]:
    scored = {source for source, drafts in trace.drafts.items() if any(draft.scores for draft in drafts)}
    return {
        "name": trace.name,
        "max_tokens": trace.max_tokens,
        "prompt": list(trace.prompt),
        "output": list(trace.output),
        "prediction": list(trace.prediction),
        "corpus": [list(text) for text in trace.corpus],
        "drafts": {source: _tokens(drafts) for source, drafts in trace.drafts.items()},
        "scores": {source: _scores(trace.drafts[source]) for source in sorted(scored)},
    }


def _tokens(drafts: Sequence[Draft]) -> list[list[int]]:
    return [list(draft.tokens) for draft in drafts]


def _scores(drafts: Sequence[Draft]) -> list[list[float]]:
    return [[round(score, 4) for score in draft.scores] for draft in drafts]
