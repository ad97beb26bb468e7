"""Drafts: which sources draft here, how often they are right, and what they gain.

Decodes two short texts, one that repeats and an honest answer, under every source in turns (bench/arms), so
that what else the machine does hits all alike. A speed is told, never judged: a busy machine is no fault.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from quickdraft.bench.arms import WINDOW_TOKENS, ArmRun, run_prompt
from quickdraft.bench.engine_arms import EngineArms
from quickdraft.bench.paired import window_seconds
from quickdraft.doctor.check import Failed, Note
from quickdraft.doctor.patient import ASKED_FOR, GREEDY, LETTER, OFF, Patient
from quickdraft.engine.forced_drafting import ForcedDrafting
from quickdraft.types import Speculation

ANSWER_TOKENS: Final = 3 * WINDOW_TOKENS
COPY: Final = f"Copy this text, word for word.\n\n{LETTER}"
QUESTION: Final = f"{LETTER}\n\nWho on this ship worked hardest that night, and why do you think so?"
DRAFTED_AT_ONCE: Final = 3
ENOUGH_DRAFTED: Final = 16  # tokens: of so many, a model that drafts for this target has some right
SLOWER: Final = 0.97  # the share of plain decoding's speed below which a source is said to cost
DRAFTER_HINT: Final = "`--drafter none` turns those that come with quickdraft off"
GAIN_HINT: Final = (
    "`quickdraft bench stages` measures it with intervals; `--speculation off` turns drafts off"
)


@dataclass(frozen=True, slots=True)
class Text:
    """A text decoded under every stage; the first is plain."""

    name: str
    runs: tuple[ArmRun, ...]
    stages: tuple[Speculation, ...]

    def gain(self, index: int) -> float:
        """Median over windows of 32 tokens: plain's seconds over the stage's."""
        plain, stage = (window_seconds(self.runs[i].turns, WINDOW_TOKENS) for i in (0, index))
        return statistics.median(one / other for one, other in zip(plain, stage, strict=True))

    def drafted(self, index: int) -> tuple[int, int]:
        """Tokens a stage drafted, and how many of them were right."""
        timings = self.runs[index].arm.timings
        return sum(timings.drafted.values()), sum(timings.accepted.values())


def decode_texts(patient: Patient) -> tuple[Text, ...]:
    """Both texts under `off`, every source, and auto. CapacityError where the arms do not fit."""
    opened = patient.llm.opened
    sources = [source for source in opened.sources if source not in ASKED_FOR]
    stages = [OFF, *(Speculation(sources=(source,)) for source in sources), Speculation(auto=True)]
    params = dataclasses.replace(GREEDY, max_tokens=ANSWER_TOKENS)
    found = []
    patient.forget()  # the blocks that arms take are free ones
    with closing(EngineArms(opened.engine, opened.request, opened.memory.storage.copy_block)) as arms:
        for name, ids in prompts(patient):
            runs = run_prompt(arms, ids, params, stages)
            found.append(Text(name, tuple(runs), tuple(stages)))
    return tuple(found)


def drafters(patient: Patient, texts: Sequence[Text]) -> Note:
    """What is loaded and used, and the share of drafted tokens that were right on the honest text, of a model
    where it drafts at every step; Failed for one whose drafts were never right."""
    drafting, said = patient.llm.opened.engine.drafting, []
    auto, models = drafting.auto_sources, drafting.longest
    for index, stage in enumerate(texts[0].stages):
        if not stage.sources:
            continue
        source = stage.sources[0]
        drafted, accepted = _always(patient, source) if source in models else texts[-1].drafted(index)
        if source in models and drafted >= ENOUGH_DRAFTED and not accepted:
            raise Failed(
                f"{source} drafted {drafted} tokens, and not one was right",
                f"{DRAFTER_HINT}; does target_sha256 in its config.json name this model's file?",
            )
        use = "in auto" if source in auto else "only where a request names it"
        share = f"{accepted} of {drafted} drafted tokens right" if drafted else "nothing worth drafting"
        said.append(f"{source} ({use}): {share}")
    return Note(f"on {texts[-1].name}: " + "; ".join(said))


def _always(patient: Patient, source: str) -> tuple[int, int]:
    """Tokens a model drafts of the honest text at every step, paying or not, and how many are right."""
    engine, (_, ids) = patient.llm.opened.engine, prompts(patient)[-1]
    own = engine.drafting
    engine.drafting = ForcedDrafting(own, source, min(DRAFTED_AT_ONCE, own.longest[source]))
    try:
        params = dataclasses.replace(
            GREEDY, max_tokens=ANSWER_TOKENS, speculation=Speculation(sources=(source,))
        )
        timings = patient.cold(ids, params).timings
    finally:
        engine.drafting = own
    return timings.drafted.get(source, 0), timings.accepted.get(source, 0)


def gains(texts: Sequence[Text]) -> Note:
    """Speed of every stage over plain decoding's, in turns; Failed where a stage changes a token."""
    said, slow = [], False
    for text in texts:
        _check_ids(text)
        parts = []
        for index, stage in enumerate(text.stages[1:], 1):
            ratio = text.gain(index)
            slow |= stage.auto and ratio < SLOWER
            parts.append(f"{stage} {ratio:.2f} x")
        plain = text.runs[0]
        rate = len(plain.ids) / sum(turn.seconds for turn in plain.turns)
        said.append(f"{text.name}: plain {rate:.0f} tokens/s, {', '.join(parts)}")
    return Note("; ".join(said), GAIN_HINT if slow else "")


def _check_ids(text: Text) -> None:
    plain = text.runs[0]
    for run, stage in zip(text.runs, text.stages, strict=True):
        if run.arm.error is not None:
            raise Failed(f"{text.name} with {stage}: a request failed: {run.arm.error}", "")
        if run.ids != plain.ids:
            raise Failed(f"{text.name}: {stage} changes the answer", "`--speculation off` decodes plainly")


def prompts(patient: Patient) -> list[tuple[str, list[int]]]:
    """Name and ids of the text that repeats and of the honest one, cut to a short context."""
    llm = patient.llm
    if llm.tokenizer is None:
        ids = patient.text_ids(90, ANSWER_TOKENS)
        return [("ids that repeat", ids), ("other ids", ids[40:60])]
    asked = [("copying", COPY), ("a free answer", QUESTION)]
    if llm.opened.chat_template is None:
        found = [(name, llm.encode(text)) for name, text in asked]
    else:
        found = [(name, llm.chat_prompt([{"role": "user", "content": text}]).ids) for name, text in asked]
    room = llm.max_context_tokens - ANSWER_TOKENS - 1
    if min(room, *(len(ids) for _, ids in found)) == room:  # a short context, or one token a character
        found = [(name, ids[-(room // 2) :]) for name, ids in found]
    return found
