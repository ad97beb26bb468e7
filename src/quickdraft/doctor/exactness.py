"""The promises: speculation == none, cached == cold, alone == batched. Ids, and the bits of logprobs.

Each check also counts that what it compares has really happened (drafts accepted and refused, tokens taken
from the cache): equality of two runs that did the same proves nothing.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Final

from quickdraft.doctor.check import Failed, Note, Skipped
from quickdraft.doctor.patient import ASKED_FOR, GREEDY, SAMPLED, Patient, difference, with_speculation
from quickdraft.engine.drafters import Asking, Drafting
from quickdraft.engine.llm import Completion
from quickdraft.engine.loop import Engine
from quickdraft.speculate.draft import LOOKUP, Draft, SequenceView
from quickdraft.types import SamplingParams, Speculation, TokenLogprob

SPECULATION_HINT: Final = (
    "`--speculation off` decodes plainly; `QUICKDRAFT_KERNELS=scalar` tries the plain kernels"
)
CACHE_HINT: Final = "`quickdraft serve --no-prefix-cache` computes every prompt from its start"
BATCH_HINT: Final = "`quickdraft serve --max-sequences 1` computes one request at a time"
ANSWER_TOKENS: Final = 48
TURN_TOKENS: Final = 3
RESIDUES: Final = range(1, 41)  # cached lengths: every place in a block of 16, and one to two full ones
KINDS: Final = (("greedy", GREEDY), ("sampled", SAMPLED))


class Rehearsal(Drafting):
    """Drafts the known answer, at every step another length, and wrong from another place on: so that
    blocks of every shape are verified, whatever the real sources would draft here."""

    def __init__(self, answer: Sequence[int], vocabulary: int) -> None:
        super().__init__([])
        self._answer, self._vocabulary, self._turn = answer, vocabulary, 0

    def propose_all(self, asking: Sequence[Asking], rows: int) -> list[Draft]:
        return [self._draft(one.view, min(one.room, rows)) for one in asking]

    def _draft(self, view: SequenceView, budget: int) -> Draft:
        self._turn += 1
        length, right = 1 + 7 * self._turn % 15, 4 * self._turn % 11
        known = self._answer[len(view.tokens) - view.prompt_length :][: min(length, budget)]
        tokens = [
            token if index < right else (token + 1) % self._vocabulary for index, token in enumerate(known)
        ]
        return Draft(tuple(tokens), LOOKUP)


def speculation(patient: Patient) -> Note:
    """Every source alone, all that `auto` uses, models fused with lookup, and a rehearsed draft give the
    tokens of plain decoding."""
    sources = [source for source in patient.llm.opened.sources if source not in ASKED_FOR]
    ways = [Speculation(sources=(source,)) for source in sources]
    ways += [Speculation(sources=(source, LOOKUP)) for source in sources if source != LOOKUP]
    ways.append(Speculation(auto=True))
    prompt = patient.text_ids(150, ANSWER_TOKENS)
    drafted = accepted = 0
    for kind, params in KINDS:
        plain = patient.cold(prompt, dataclasses.replace(params, max_tokens=ANSWER_TOKENS))
        for way in ways:
            answer = patient.cold(prompt, with_speculation(params, way, ANSWER_TOKENS))
            _same(difference(f"{kind} with {way}", answer, "plain decoding", plain))
        found = _rehearse(patient, prompt, params, plain.ids)
        named = f"{kind} with a rehearsed draft"
        _same(difference(named, found, "plain decoding", plain))
        drafted += sum(found.timings.drafted.values())
        accepted += sum(found.timings.accepted.values())
    if not 0 < accepted < drafted:
        raise Failed(f"{accepted} of {drafted} rehearsed tokens accepted; some, not all, were right", "")
    return Note(
        f"{', '.join(map(str, ways))}: same {ANSWER_TOKENS} tokens as plain decoding, greedy and sampled; "
        f"in a rehearsal {accepted} drafted tokens were kept and {drafted - accepted} refused"
    )


def cached_is_cold(patient: Patient) -> Note:
    """A request that resumes from the prefix cache answers as one that computes its whole prompt: a next
    turn, and a text that parts from a cached one, at every cached length in RESIDUES."""
    if patient.llm.opened.engine.scheduler.cache is None:
        raise Skipped("the prefix cache is off")
    params = dataclasses.replace(GREEDY, max_tokens=TURN_TOKENS, logprobs=0)  # of all logits of a row
    text = patient.text_ids(RESIDUES.stop + 32, TURN_TOKENS)
    cached = possible = 0
    for length in RESIDUES:
        begin = text[:length]
        turn = patient.cold(begin, params)
        again = [*begin, *turn.ids, *text[-7:]]
        other = [*begin, (text[length] + 1) % patient.vocabulary_size, *text[-9:]]
        answers = [patient.warm(prompt, params) for prompt in (again, other)]
        for prompt, answer in zip((again, other), answers, strict=True):
            named = f"{length} tokens shared, {len(prompt)} in all"
            _same(difference(named, answer, "a cold cache", patient.cold(prompt, params)))
            cached += answer.cache.cached_tokens if answer.cache is not None else 0
        possible += 2 * length + TURN_TOKENS - 1  # the last one is not computed
    if not cached:
        raise Failed(f"none of {possible} tokens that were computed before came from the cache", CACHE_HINT)
    return Note(
        f"{2 * len(RESIDUES)} prompts that share {RESIDUES[0]} to {RESIDUES[-1]} tokens with an earlier one "
        f"answer as from a cold cache; {cached} of {possible} such tokens came from it"
    )


def alone_is_batched(patient: Patient) -> Note:
    """Four requests of different lengths and settings answer together as each does alone."""
    text = patient.text_ids(100, 32)
    auto = Speculation(auto=True)
    jobs = [
        (text[:5], dataclasses.replace(GREEDY, max_tokens=24)),
        (text[9:28], dataclasses.replace(SAMPLED, max_tokens=30, speculation=auto)),
        (text[20:53], dataclasses.replace(GREEDY, max_tokens=17, speculation=auto)),
        (text[30:], dataclasses.replace(SAMPLED, max_tokens=21, seed=21)),
    ]
    alone = [patient.cold(ids, params) for ids, params in jobs]
    for index, (answer, reference) in enumerate(zip(patient.together(jobs), alone, strict=True)):
        named = f"request {index + 1} of 4 in a batch"
        _same(difference(named, answer, "the request alone", reference))
    lengths = ", ".join(str(len(ids)) for ids, _ in jobs)
    return Note(f"4 requests with prompts of {lengths} tokens answer together as each does alone")


def _rehearse(
    patient: Patient, prompt: Sequence[int], params: SamplingParams, answer: Sequence[int]
) -> Completion:
    """The prompt in an engine of its own over the same runner, blocks and slots, drafts coming from
    `answer`. It has no prefix cache, so nothing of it is found later."""
    opened = patient.llm.opened
    patient.forget()
    scheduler = dataclasses.replace(
        opened.engine.scheduler, waiting=deque(), running=[], cache=None, resume_at=lambda request: None
    )
    engine = Engine(scheduler, opened.engine.runner, Rehearsal(answer, patient.vocabulary_size))
    params = with_speculation(params, Speculation(auto=True), ANSWER_TOKENS)
    request = opened.request(opened.next_id(), prompt, params)
    logprobs: list[TokenLogprob] = []
    try:
        engine.add(request)
        while request.finish is None:
            for event in engine.step():
                logprobs += event.logprobs
    finally:
        engine.abort(request.request_id)
    return patient.whole([Completion(
        tuple(request.output_ids), None, request.finish, request.seed, request.timings, tuple(logprobs),
        request.error,
    )])[0]  # fmt: skip


def _same(found: str | None) -> None:
    if found is not None:
        raise Failed(found, "")
