"""Replay: the engine's drafting code over traces, without the model.

Each step the policy is asked as the scheduler asks it, the walk is the trace itself, and the verdict goes
back; what the step would take is counted on a curve. Rows, passes of drafters and refused rows are counted
from what the policy does, whatever it believes they cost. Knows no file and no table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

from quickdraft.bench.curves import Curve
from quickdraft.bench.traces import Trace, TracedWorkload
from quickdraft.config import DEFAULT_MAX_SEQUENCES
from quickdraft.engine.drafters import Asking, Drafting
from quickdraft.speculate.corpus import CorpusDrafter, CorpusInMemory
from quickdraft.speculate.costs import CHAINED_SOURCES, Costs
from quickdraft.speculate.draft import CORPUS, Draft, Drafter, SequenceView, Verdict, allows
from quickdraft.speculate.fusion import agreement
from quickdraft.speculate.lookup import LookupDrafter
from quickdraft.speculate.prediction import PredictionDrafter
from quickdraft.speculate.priors import Priors
from quickdraft.types import MAX_ROWS, Speculation

MAX_WANTED: Final = max(MAX_ROWS, DEFAULT_MAX_SEQUENCES * 16)  # verified rows of a step, over all sequences
AUTO: Final = Speculation(auto=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What decoding would have taken. `drafting_seconds`: passes of drafters; `refused_seconds`: what the
    rows added that did not give a token."""

    tokens: int = 0
    steps: int = 0  # of sequences: a batch of four takes four at once
    rows: int = 0
    seconds: float = 0.0
    drafting_seconds: float = 0.0
    refused_seconds: float = 0.0

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Outcome)))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def mean_rows(self) -> float:
        return self.rows / self.steps

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps


class View:
    """speculate.draft.SequenceView of a trace that is `done` tokens into its output."""

    matcher = None

    def __init__(self, request_id: str, trace: Trace) -> None:
        self.request_id, self.trace = request_id, trace
        self.tokens, self.prompt_length = list(trace.prompt), len(trace.prompt)

    @property
    def prediction(self) -> tuple[int, ...]:
        return self.trace.prediction

    @property
    def done(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def finished(self) -> bool:
        return self.done == len(self.trace.output)

    @property
    def room(self) -> int:
        """Drafted tokens that the request's own limit leaves room for."""
        return min(MAX_ROWS, self.trace.max_tokens - self.done) - 1

    def walk(self, drafted: Sequence[int]) -> Verdict:
        """What the target makes of these drafted tokens; they are emitted as far as they are its own."""
        rest = self.trace.output[self.done :]
        emitted = rest[: agreement(drafted, rest) + 1]
        self.tokens += emitted
        return Verdict(emitted, len(drafted))


class RecordedDrafter:
    """speculate.draft.FollowingDrafter whose model has already spoken; counts the passes and the followed
    tokens that it would take. What it says does not depend on how long it followed."""

    cold_tokens = 0

    def __init__(self, source: str, longest: int, in_auto: bool) -> None:
        self.source, self.longest, self.in_auto, self.followed = source, longest, in_auto, 0
        self.asked: Counter[int] = Counter()  # how often for so many tokens
        self._left: set[str] = set()

    def propose(self, view: SequenceView, budget: int) -> Draft:
        assert isinstance(view, View), "over traces only"
        whole = view.trace.drafts[self.source][view.done]
        tokens = whole.tokens[: max(0, budget)]
        if tokens:
            self.asked[len(tokens) if self.source in CHAINED_SOURCES else budget] += 1
        return Draft(tokens, whole.source, whole.scores[: len(tokens)])

    def observe(self, view: SequenceView, verdict: Verdict, taps: Any) -> None:
        """Follow."""
        if view.request_id not in self._left:
            self.followed += len(verdict.tokens)

    def follow(self, request_id: str, followed: bool) -> None:
        """See FollowingDrafter."""
        (self._left.discard if followed else self._left.add)(request_id)

    def seconds(self, curve: Curve) -> float:
        """Of all passes and followed tokens."""
        passes = sum(curve.draft_seconds(self.source, count) * times for count, times in self.asked.items())
        return passes + self.followed * curve.upkeep_seconds(self.source)

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""
        self._left.discard(request_id)

    def resumed(self, view: SequenceView) -> None:
        """Nothing is kept."""

    def publishing(self, view: SequenceView) -> None:
        """Nothing is kept."""


class TracedCorpus:
    """speculate.draft.Drafter over the corpus of each trace."""

    source = CORPUS

    def __init__(self) -> None:
        self._opened: dict[str, CorpusDrafter] = {}  # by request

    def propose(self, view: SequenceView, budget: int) -> Draft:
        """See CorpusDrafter; nothing without a corpus."""
        assert isinstance(view, View), "over traces only"
        if not view.trace.corpus:
            return Draft()
        opened = self._opened.get(view.request_id)
        if opened is None:
            opened = self._opened[view.request_id] = CorpusDrafter(CorpusInMemory(view.trace.corpus))
        return opened.propose(view, budget)

    def observe(self, view: SequenceView, verdict: Verdict, taps: Any) -> None:
        """Nothing to learn."""

    def forget(self, request_id: str) -> None:
        """Drop its corpus."""
        self._opened.pop(request_id, None)


def text_drafters() -> list[Drafter]:
    """Those that read texts, as a server has them: engine/text_sources.py."""
    return [PredictionDrafter(), LookupDrafter(), TracedCorpus()]


class Policy(Protocol):
    """Whatever decides what is drafted."""

    def propose(self, views: Sequence[View], spare: int) -> Sequence[Draft]:
        """A draft for each sequence within its own room, all of them together at most `spare` tokens."""

    def observe(self, view: View, verdict: Verdict) -> None:
        """What became of it; a sequence at its end is not asked for again."""

    def drafting_seconds(self, curve: Curve) -> float:
        """Of all passes of drafters so far."""


class Engine:
    """The policy that serves: engine.drafters over texts and the recorded models."""

    def __init__(
        self,
        curve: Curve,
        longest: Mapping[str, int],
        in_auto: Sequence[str],
        speculation: Speculation = AUTO,
        shipped: Sequence[str] = (),
        believed: Costs | None = None,
        priors: Priors | None = None,
    ) -> None:
        """`in_auto`: the models that `auto` uses. `shipped`, `priors`: see Drafting. `believed`: costs that
        it goes by instead of the curve's; those that follow the machine (OnlineCosts) are told what steps
        and passes of a sequence alone take on the curve."""
        self._models = [
            RecordedDrafter(name, most, name in in_auto)
            for name, most in longest.items()
            if allows(speculation, name, name in in_auto)  # no other follows the text
        ]
        self._drafting = Drafting(
            [*text_drafters(), *self._models],
            believed or curve.costs,
            clock=lambda: self.drafting_seconds(curve),
            shipped=shipped,
            priors=priors,
        )
        self._curve, self._speculation, self._together = curve, speculation, 0

    def propose(self, views: Sequence[View], spare: int) -> Sequence[Draft]:
        """As the scheduler does."""
        self._together = len(views)
        asking = [Asking(view, self._speculation, min(spare, view.room)) for view in views]
        return self._drafting.propose_all(asking, spare)

    def observe(self, view: View, verdict: Verdict) -> None:
        """See Policy."""
        self._drafting.observe(view, verdict)
        if self._drafting.timed and self._together == 1:
            rows, context = 1 + verdict.drafted, len(view.tokens) - len(verdict.tokens)
            self._drafting.ran(rows, context, self._curve.row_seconds(rows, context))
        if view.finished:
            self._drafting.forget(view.request_id)

    def drafting_seconds(self, curve: Curve) -> float:
        """See Policy."""
        return sum(model.seconds(curve) for model in self._models)


def replay(work: TracedWorkload, curve: Curve, new_policy: Callable[[], Policy]) -> Outcome:
    """All sequences of a workload, `together` at a time, each group under a policy of its own as after a
    fresh start."""
    total = Outcome()
    for first in range(0, len(work.traces), work.together):
        group = work.traces[first : first + work.together]
        total += _replay_group(group, curve, new_policy())
    return total


def _replay_group(traces: Sequence[Trace], curve: Curve, policy: Policy) -> Outcome:
    """A batch from the first step of all to the last of the longest."""
    views = [View(f"{trace.name}#{index}", trace) for index, trace in enumerate(traces)]
    total = Outcome()
    while views:
        contexts = [len(view.tokens) for view in views]
        spare = MAX_WANTED - len(views)
        drafts = policy.propose(views, spare)
        lengths = [len(draft.tokens) for draft in drafts]
        assert sum(lengths) <= spare, f"{sum(lengths)} tokens drafted; {spare} spare"
        assert all(n <= max(0, view.room) for n, view in zip(lengths, views, strict=True)), "over the limit"
        verdicts = [view.walk(draft.tokens) for view, draft in zip(views, drafts, strict=True)]
        for view, verdict in zip(views, verdicts, strict=True):
            policy.observe(view, verdict)
        total += step_outcome(curve, contexts, lengths, [len(each.tokens) for each in verdicts])
        views = [view for view in views if not view.finished]
    drafting = policy.drafting_seconds(curve)
    return total + Outcome(seconds=drafting, drafting_seconds=drafting)


def step_outcome(
    curve: Curve, contexts: Sequence[int], drafted: Sequence[int], emitted: Sequence[int]
) -> Outcome:
    """One step of one or several sequences, without drafters."""
    rows = [1 + count for count in drafted]
    seconds = curve.step_seconds(rows, contexts)
    refused = seconds - curve.step_seconds(emitted, contexts) if list(emitted) != rows else 0.0
    return Outcome(sum(emitted), len(rows), sum(rows), seconds, 0.0, refused)
