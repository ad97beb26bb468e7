"""What traces say of every drafted token: the material of the table of priors (speculate/priors.py).

Every source is judged at every position, as far as its proposal goes on to be right, whatever a policy would
have verified there. A sequence is a request; one that stands in several workloads counts once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from quickdraft.bench.hindsight import text_drafts
from quickdraft.bench.traces import Trace, TracedWorkload, TraceSet
from quickdraft.speculate.draft import CORPUS, PREDICTION, Draft
from quickdraft.speculate.priors import Judged


def without(traces: TraceSet, work: TracedWorkload) -> TraceSet:
    """The other workloads, without what they have of this one's texts, whatever else came with those."""
    texts = {(trace.prompt, trace.output) for trace in work.traces}
    left = (
        replace(other, traces=tuple(one for one in other.traces if (one.prompt, one.output) not in texts))
        for other in traces.workloads
    )
    return replace(traces, workloads=tuple(other for other in left if other.traces))


def judged(traces: TraceSet) -> Iterator[Judged]:
    """One value per drafted token before which its draft was right, the first wrong one included."""
    sequences = {trace.name: trace for work in traces.workloads for trace in work.traces}
    known: set[tuple[tuple[int, ...], tuple[int, ...], str]] = set()
    for trace in sequences.values():
        for source, drafts in (text_drafts(trace) | dict(trace.drafts)).items():
            same = trace.prompt, trace.output, source
            if same not in known or source in (PREDICTION, CORPUS):
                known.add(same)
                yield from _judged(trace, drafts)


def _judged(trace: Trace, drafts: Sequence[Draft]) -> Iterator[Judged]:
    for at, draft in enumerate(drafts):
        for index, (token, emitted) in enumerate(zip(draft.tokens, trace.output[at:], strict=False)):
            yield Judged(
                trace.name,
                draft.source,
                index,
                token == emitted,
                draft.match_length + index if draft.match_length else 0,
                draft.in_output,
                draft.scores[index] if draft.scores else None,
            )
            if token != emitted:
                break
